"""Files of random drafters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.torch import save_file

from rekindle.spec import ModelSpec
from rekindle.speculative.files import LAYER_OURS, OURS
from rekindle.speculative.spec import ConvSpec, DrafterSpec, DraftLayer, SelectorSpec


def random_weights(spec: DrafterSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return {name: 0.3 * torch.randn(shape, generator=dice) + (0.8 if "norm" in name else 0.0)
            for name, shape in spec.tensors().items()}  # fmt: skip


def window_of(spec: DrafterSpec) -> int:
    return next((layer.window for layer in spec.layers if layer.window is not None), 5)


def write_folder(folder: Path, spec: DrafterSpec, weights: dict[str, torch.Tensor], nested: bool) -> Path:
    folder.mkdir()
    theirs = {ours: name for name, ours in OURS.items()}
    layer_theirs = {ours: name for name, ours in LAYER_OURS.items()}
    named = {}
    for name, tensor in weights.items():
        if name.startswith("blk."):
            _, index, part = name.split(".", 2)
            named[f"layers.{index}.{layer_theirs[part]}"] = tensor.half()
        else:
            named[theirs[name]] = tensor.half()
    save_file(named, folder / "model.safetensors")
    inner: dict[str, Any] = {"mask_token_id": spec.mask, "target_layer_ids": list(spec.taps)}
    if spec.conv is not None and spec.selector is not None:
        inner |= {"conv_kernel_size": spec.conv.taps, "conv_group_size": spec.conv.group,
                  "selector_rank": spec.selector.rank, "selector_top_k": spec.selector.candidates}  # fmt: skip
    config: dict[str, Any] = {
        "hidden_size": spec.hidden, "num_hidden_layers": len(spec.layers), "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads, "head_dim": spec.head_dim, "intermediate_size": spec.width,
        "vocab_size": spec.vocab, "rms_norm_eps": spec.eps, "rope_parameters": {"rope_theta": spec.rope_theta},
        "layer_types": ["full_attention" if layer.window is None else "sliding_attention" for layer in spec.layers],
        "sliding_window": window_of(spec), "dflash_config": inner,
    }  # fmt: skip
    if spec.conv is not None:
        config["is_causal"] = False
    (inner if nested else config)["block_size"] = spec.block
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_gguf(
    path: Path,
    spec: DrafterSpec,
    weights: dict[str, torch.Tensor],
    architecture: str,
    quant: str,
    names_tokens: bool = False,
) -> Path:
    """names_tokens: how many there are is said by a list of them, and by no number."""
    llama = architecture == "dflash"
    writer = GGUFWriter(path, architecture)
    inner = "" if llama else "dflash."
    numbers = {
        "embedding_length": spec.hidden, "block_count": len(spec.layers), "feed_forward_length": spec.width,
        "attention.head_count": spec.heads, "attention.head_count_kv": spec.kv_heads, "vocab_size": spec.vocab,
        "attention.key_length": spec.head_dim, f"{inner}block_size": spec.block,
        "attention.sliding_window": window_of(spec),
    }  # fmt: skip
    if names_tokens:
        del numbers["vocab_size"]
        writer.add_token_list([f"token {number}" for number in range(spec.vocab)])
    for key, value in numbers.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.rope.freq_base", spec.rope_theta)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", spec.eps)
    pattern = [layer.window is not None for layer in spec.layers]
    writer.add_array(f"{architecture}.attention.sliding_window_pattern", pattern)
    if llama:
        writer.add_array("dflash.target_layers", [tap + 1 for tap in spec.taps])
        writer.add_uint32("tokenizer.ggml.mask_token_id", spec.mask)
    else:
        writer.add_array(f"{architecture}.dflash.target_layer_ids", list(spec.taps))
        writer.add_uint32(f"{architecture}.dflash.mask_token_id", spec.mask)
    if spec.conv is not None and spec.selector is not None:
        for key, value in {
            "conv_kernel_size": spec.conv.taps,
            "conv_group_size": spec.conv.group,
            "selector_rank": spec.selector.rank,
            "selector_top_k": spec.selector.candidates,
        }.items():
            writer.add_uint32(f"{architecture}.{key}", value)
        writer.add_bool(f"{architecture}.attention.causal", False)
    for name, tensor in weights.items():
        theirs = gguf_name(name, llama)
        values = tensor.numpy()
        if tensor.ndim == 2 and quant != "F32" and values.shape[1] % 32 == 0:
            kind = GGMLQuantizationType[quant]
            writer.add_tensor(theirs, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(theirs, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str, llama: bool) -> str:
    names = {
        "fc.weight": "fc.weight" if llama else "dflash.fc.weight",
        "context_norm.weight": "enc.output_norm.weight" if llama else "dflash.hidden_norm.weight",
        "selector.predecessor": "selector_predecessor.weight",
        "selector.successor": "selector_successor.weight",
        "selector.hidden.weight": "selector_hidden.weight",
    }
    inner = {"attn_conv.base": "attn_conv_base", "attn_conv.weight": "attn_conv_proj.weight",
             "ffn_conv.base": "ffn_conv_base", "ffn_conv.weight": "ffn_conv_proj.weight"}  # fmt: skip
    if name.startswith("blk."):
        head, index, rest = name.split(".", 2)
        return f"{head}.{index}.{inner.get(rest, rest)}"
    return names.get(name, name)


def tiny_spec(target: ModelSpec, version: int = 1, block: int = 6) -> DrafterSpec:
    """A drafter of two layers for a tiny target; of version 2 with convolutions and a selector."""
    layers = target.layers
    window, full = DraftLayer(5 if version == 1 else 33, causal=version == 1), DraftLayer(None, causal=False)
    spec = DrafterSpec(
        hidden=target.hidden, heads=4, kv_heads=2, head_dim=16, width=64, vocab=target.vocab,
        layers=(window, full) if version == 1 else (window, window), block=block, mask=target.vocab - 1,
        taps=(1, layers // 2, layers - 2), rope_theta=1e6, eps=1e-6,
    )  # fmt: skip
    if version == 1:
        return spec
    return replace(spec, conv=ConvSpec(2, 16), selector=SelectorSpec(32, min(4, target.vocab)))


def tiny_drafter(folder: Path, target: ModelSpec, version: int = 1, seed: int = 0) -> Path:
    """Its tokens hang on the context: attention is sharp, and weighs much in the sums."""
    spec = tiny_spec(target, version)
    weights = random_weights(spec, seed)
    for layer in range(len(spec.layers)):
        weights[f"blk.{layer}.attn_q_norm.weight"] *= 4
        weights[f"blk.{layer}.attn_output.weight"] *= 6
    return write_folder(folder, spec, weights, nested=version == 2)

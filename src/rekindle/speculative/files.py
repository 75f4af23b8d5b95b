"""Files of drafters: a folder with safetensors, or a GGUF file of llama.cpp (`dflash`) or of the C++ server
(`dflash-draft`, `qwen35-dflash-draft`). All are read into one spec and one set of tensor names.

GGUF files of llama.cpp count taps as layer inputs, the others as layer outputs: an input of layer n is the output of
n - 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.errors import BadModelFile
from rekindle.speculative.spec import ConvSpec, DrafterSpec, DraftLayer, SelectorSpec, default_taps
from rekindle.weights.fingerprint import fingerprint_of
from rekindle.weights.gguf_header import read_part
from rekindle.weights.safetensors_table import read_folder, read_json
from rekindle.weights.stored import Stored, decode, require_decodable
from rekindle.weights.types import TensorInfo

ARCHITECTURES = ("dflash", "dflash-draft", "qwen35-dflash-draft")
OURS = {  # of a folder
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.predecessor_codebook": "selector.predecessor",
    "candidate_selector.successor_codebook": "selector.successor",
    "candidate_selector.hidden_projection.weight": "selector.hidden.weight",
}
LAYER_OURS = {  # of a folder, behind layers.N.
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.g_proj.weight": "attn_gate.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv.base",
    "attention_conv.kernel_projection.weight": "attn_conv.weight",
    "mlp_conv.base_kernel": "ffn_conv.base",
    "mlp_conv.kernel_projection.weight": "ffn_conv.weight",
}
GGUF_OURS = {
    "dflash.fc.weight": "fc.weight",
    "dflash_fc.weight": "fc.weight",
    "enc.output_norm.weight": "context_norm.weight",
    "dflash.hidden_norm.weight": "context_norm.weight",
    "dflash_hidden_norm.weight": "context_norm.weight",
    "selector_predecessor.weight": "selector.predecessor",
    "selector_successor.weight": "selector.successor",
    "selector_hidden.weight": "selector.hidden.weight",
}
GGUF_LAYER_OURS = {
    "post_attention_norm.weight": "ffn_norm.weight",
    "attn_conv_base": "attn_conv.base",
    "attn_conv_proj.weight": "attn_conv.weight",
    "ffn_conv_base": "ffn_conv.base",
    "ffn_conv_proj.weight": "ffn_conv.weight",
}
NOT_OURS = ("markov_w1.weight", "dflash.dspark", "dflash.domino", "attn_sinks", "d2t")
_LAYER = re.compile(r"^(?:layers|blk)\.(\d+)\.(.+)$")


class DrafterFile:
    """A drafter on disk, checked against its own spec; reading a tensor touches the bytes of no other."""

    kind = "dflash"

    def __init__(self, path: Path, spec: DrafterSpec, stored: Mapping[str, Stored]) -> None:
        self.path = path
        self.spec = spec
        self._stored = stored
        self.tensors = {name: _shaped(path, stored, name, shape) for name, shape in spec.tensors().items()}

    def raw(self, name: str) -> np.ndarray:
        """uint8 [rows, bytes of a row]."""
        return self._stored[name].rows()

    def fingerprint(self) -> str:
        """Of the drafter as it was read: its numbers and samples of its tensors."""
        return fingerprint_of(repr(self.spec), [self._stored[name] for name in self.tensors])

    def values(self, name: str) -> np.ndarray:
        """float32 in the tensor's shape."""
        return decode(self.raw(name), self.tensors[name])


def open_drafter(path: str | Path) -> DrafterFile:
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise BadModelFile(f"{path} does not exist")
    return _open_gguf(path)


# Folders


def _open_folder(path: Path) -> DrafterFile:
    stored = {_folder_name(name): tensor for name, tensor in read_folder(path).items()}
    _refuse_others(path, stored)
    config = _Config(path / "config.json", read_json(path / "config.json"))
    return DrafterFile(path, _spec_of_config(config, stored), stored)


def _folder_name(name: str) -> str:
    name = name.removeprefix("model.")
    if found := _LAYER.match(name):
        return f"blk.{found[1]}.{LAYER_OURS.get(found[2], found[2])}"
    if name.startswith("aux_hidden_norm."):
        return name.replace("aux_hidden_norm", "feature_norm")
    return OURS.get(name, name)


class _Config:
    """Typed reading; a missing or senseless value is one clear error."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    @property
    def inner(self) -> _Config:
        """What is particular to DFlash."""
        return self.part("dflash_config")

    def part(self, key: str) -> _Config:
        found = self.values.get(key)
        return _Config(self.path, found if isinstance(found, dict) else {})

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadModelFile(f"{self.path}: {key} is {value!r}, not a whole number of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise BadModelFile(f"{self.path}: {key} is {value!r}, not a number above 0")
        return float(value)

    def flag(self, key: str) -> bool | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise BadModelFile(f"{self.path}: {key} is {value!r}, neither true nor false")
        return value

    def ids(self, key: str) -> tuple[int, ...] | None:
        value = self.values.get(key)
        if value is None:
            return None
        fine = isinstance(value, list) and value and all(isinstance(n, int) and 0 <= n < 1 << 16 for n in value)
        if not fine:
            raise BadModelFile(f"{self.path}: {key} is no list of layer numbers")
        return tuple(value)


def _spec_of_config(config: _Config, stored: Mapping[str, Stored]) -> DrafterSpec:
    inner = config.inner
    layers = config.count("num_hidden_layers")
    taps = inner.ids("target_layer_ids") or inner.ids("aux_hidden_state_layer_ids")
    heads = config.count("num_attention_heads")
    theta = config.part("rope_parameters").values.get("rope_theta", config.values.get("rope_theta"))
    return DrafterSpec(
        hidden=config.count("hidden_size"),
        heads=heads,
        kv_heads=config.count("num_key_value_heads", default=heads),
        head_dim=config.count("head_dim", default=config.count("hidden_size") // heads),
        width=config.count("intermediate_size"),
        vocab=config.count("vocab_size"),
        layers=_folder_layers(config, layers),
        block=inner.count("block_size", default=config.values.get("block_size")),
        mask=inner.count("mask_token_id", default=config.values.get("mask_token_id"), least=0),
        taps=taps or default_taps(config.count("num_target_layers")),
        rope_theta=_Config(config.path, {"rope_theta": theta}).number("rope_theta"),
        eps=config.number("rms_norm_eps"),
        conv=_conv(inner, "conv_kernel_size", "conv_group_size"),
        selector=_selector(inner, "selector_rank", "selector_top_k"),
        feature_norms="feature_norm.0.weight" in stored,
        context_norm_per_layer=bool(inner.flag("context_kv_layer_norm")),
        gate=_gate_rows(stored),
        embedding_scale=inner.number("input_embedding_scale", default=1.0),
        logit_scale=inner.number("output_multiplier", default=1.0),
        softcap=inner.values.get("final_logit_softcapping") or 0.0,
    )


def _folder_layers(config: _Config, count: int) -> tuple[DraftLayer, ...]:
    kinds = config.values.get("layer_types") or ["full_attention"] * count
    if not isinstance(kinds, list) or len(kinds) != count:
        raise BadModelFile(f"{config.path}: layer_types names other than {count} layers")
    sliding = [kind == "sliding_attention" for kind in kinds]
    window = config.count("sliding_window") if any(sliding) else 0
    causal = config.flag("is_causal")
    if causal is None:
        causal = config.inner.flag("causal")
    return _layers(sliding, window, causal)


def _layers(sliding: list[bool], window: int, causal: bool | None) -> tuple[DraftLayer, ...]:
    """Where a file does not say, layers with a window are causal inside the block and the others are not."""
    return tuple(DraftLayer(window if slides else None, slides if causal is None else causal) for slides in sliding)


# GGUF


def _open_gguf(path: Path) -> DrafterFile:
    part = read_part(path)
    architecture = part.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise BadModelFile(f"{path} has the architecture {architecture!r}; drafters have {', '.join(ARCHITECTURES)}")
    stored = {_gguf_name(name): tensor for name, tensor in part.tensors.items()}
    _refuse_others(path, stored)
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): value for key, value in part.metadata.items() if key.startswith(prefix)}
    values |= {key: value for key, value in part.metadata.items() if key.startswith("tokenizer.")}
    return DrafterFile(path, _spec_of_gguf(_Config(path, values), architecture == "dflash", stored), stored)


def _gguf_name(name: str) -> str:
    if found := _LAYER.match(name):
        return f"blk.{found[1]}.{GGUF_LAYER_OURS.get(found[2], found[2])}"
    if name.startswith("dflash.aux_hidden_norm."):
        return name.replace("dflash.aux_hidden_norm", "feature_norm")
    return GGUF_OURS.get(name, name)


def _spec_of_gguf(config: _Config, by_llama_cpp: bool, stored: Mapping[str, Stored]) -> DrafterSpec:
    inner = "" if by_llama_cpp else "dflash."
    layers, heads = config.count("block_count"), config.count("attention.head_count")
    hidden = config.count("embedding_length")
    return DrafterSpec(
        hidden=hidden,
        heads=heads,
        kv_heads=config.count("attention.head_count_kv", default=heads),
        head_dim=config.count("attention.key_length", default=hidden // heads),
        width=config.count("feed_forward_length"),
        vocab=_vocab(config, stored),
        layers=_gguf_layers(config, layers),
        block=config.count(f"{inner}block_size"),
        mask=config.count("tokenizer.ggml.mask_token_id" if by_llama_cpp else "dflash.mask_token_id", least=0),
        taps=_gguf_taps(config, by_llama_cpp),
        rope_theta=config.number("rope.freq_base"),
        eps=config.number("attention.layer_norm_rms_epsilon"),
        conv=_conv(config, f"{inner}conv_kernel_size", f"{inner}conv_group_size"),
        selector=_selector(config, f"{inner}selector_rank", f"{inner}selector_top_k"),
        feature_norms="feature_norm.0.weight" in stored,
        context_norm_per_layer=bool(config.flag("dflash.context_kv_layer_norm")),
        gate=_gate_rows(stored),
    )


def _gguf_taps(config: _Config, by_llama_cpp: bool) -> tuple[int, ...]:
    if not by_llama_cpp:
        return config.ids("dflash.target_layer_ids") or default_taps(config.count("dflash.n_target_layers"))
    inputs = config.ids("target_layers")
    if inputs is None or min(inputs) < 1:
        raise BadModelFile(f"{config.path}: target_layers is {inputs}, expected inputs of layers from 1 on")
    return tuple(layer - 1 for layer in inputs)


def _gguf_layers(config: _Config, count: int) -> tuple[DraftLayer, ...]:
    pattern = config.values.get("attention.sliding_window_pattern")
    window = config.count("attention.sliding_window", default=0, least=0)
    if pattern is None:
        pattern = [window > 0] * count
    if not isinstance(pattern, list) or len(pattern) != count or not all(isinstance(flag, bool) for flag in pattern):
        raise BadModelFile(f"{config.path}: sliding_window_pattern is no list of {count} times true or false")
    if any(pattern) and not window:
        raise BadModelFile(f"{config.path}: some layers have a window, and attention.sliding_window does not say which")
    return _layers(pattern, window, config.flag("attention.causal"))


def _vocab(config: _Config, stored: Mapping[str, Stored]) -> int:
    codebook = stored.get("selector.predecessor")
    tokens = config.values.get("tokenizer.ggml.tokens")
    named = len(tokens) if isinstance(tokens, Sequence) and not isinstance(tokens, str) else 0
    known = codebook.info.shape[0] if codebook is not None else named
    return config.count("vocab_size", default=known or None)


# Both


def _conv(config: _Config, taps: str, group: str) -> ConvSpec | None:
    count = config.count(taps, default=0, least=0)
    return ConvSpec(count, config.count(group)) if count else None


def _selector(config: _Config, rank: str, candidates: str) -> SelectorSpec | None:
    count = config.count(candidates, default=0, least=0)
    return SelectorSpec(config.count(rank), count) if count else None


def _gate_rows(stored: Mapping[str, Stored]) -> int:
    gate = stored.get("blk.0.attn_gate.weight")
    return 0 if gate is None else gate.info.shape[0]


def _refuse_others(path: Path, stored: Mapping[str, Stored]) -> None:
    for name in stored:
        if any(other in name for other in NOT_OURS):
            raise BadModelFile(
                f"{path} has the tensor {name}: drafters of that kind (DSpark, Domino) are not supported"
            )


def _shaped(path: Path, stored: Mapping[str, Stored], name: str, shape: tuple[int, ...]) -> TensorInfo:
    tensor = stored.get(name)
    if tensor is None:
        raise BadModelFile(f"{path} has no tensor {name}, which its numbers ask for")
    if _plain(tensor.info.shape) != _plain(shape):
        raise BadModelFile(f"{path}: tensor {name} is {tensor.info.shape}, its numbers ask for {shape}")
    require_decodable(str(path), tensor.info)
    return TensorInfo(name, shape, tensor.info.type, tensor.info.nbytes)


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without leading ones, which some writers add."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape

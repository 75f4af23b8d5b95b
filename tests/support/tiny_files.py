"""Tiny random hybrid models as GGUF files, in the mixes of types that people download.

No quantiser is needed: random bytes in a valid block layout are a model too, and its weights are what they decode to.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize

from support.vocabulary import ROWS, qwen_vocabulary

LAYERS, HIDDEN, WIDTH = 8, 256, 512
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
KEY_HEADS, VALUE_HEADS, STATE = 4, 8, 32
EXPERTS, USED, EXPERT_WIDTH = 16, 4, 64
STD = 0.06  # 1 / √hidden: what passes a matrix keeps its size

# Where a block keeps its float16 scale, and its float16 minimum with the ratio that centres the values
SCALE_AT = {"Q8_0": 0, "Q4_K": 0, "Q5_K": 0, "IQ4_XS": 0, "Q6_K": 208}
MINIMUM_RATIO = {"Q4_K": 7.5, "Q5_K": 15.5}

Mix = Callable[[str], str]


def _same(kind: str) -> Mix:
    return lambda name: kind


def _q4_k_m(name: str) -> str:
    if name == "output.weight" or name.split(".")[-2] in ("attn_qkv", "attn_v", "ffn_down"):
        return "Q6_K"
    return "Q8_0" if "ffn_down" in name else "Q4_K"  # rows of 64 columns hold no block of 256


def _iq4_xs(name: str) -> str:
    return "Q6_K" if name == "output.weight" else "Q5_K" if name == "blk.0.ffn_down.weight" else "IQ4_XS"


FILES: dict[str, tuple[bool, Mix, int]] = {  # name: routed experts or not, types, seed
    "tiny-qwen35-f16.gguf": (False, _same("F16"), 1),
    "tiny-qwen35-Q4_K_M.gguf": (False, _q4_k_m, 2),
    "tiny-qwen35-IQ4_XS.gguf": (False, _iq4_xs, 3),
    "tiny-qwen35moe-Q8_0.gguf": (True, _same("Q8_0"), 4),
    "tiny-qwen35moe-Q4_K_M.gguf": (True, _q4_k_m, 5),
}


def tiny_files(folder: Path) -> Path:
    """Writes what is missing of FILES. Processes that ask at the same time wait for one another."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in FILES:
            if not (folder / name).exists():
                write_tiny_file(folder / name)
    return folder


def write_tiny_file(path: Path, **numbers: int) -> Path:
    """The file of FILES that `path` is named after; the same bytes every time. numbers: metadata of another value."""
    routed, mix, seed = FILES[path.name]
    return _write(path, routed, mix, {seed: list(_shapes(routed))}, numbers)


def write_tied(path: Path, name: str) -> Path:
    """The file of FILES called `name` without an output matrix: its embedding is the head too."""
    routed, mix, seed = FILES[name]
    return _write(path, routed, mix, {seed: [each for each in _shapes(routed) if each[0] != "output.weight"]}, {})


def write_with_block(path: Path, name: str, alone: bool = False) -> Path:
    """The file of FILES called `name` with a next-token-prediction block behind its layers; alone: a companion file,
    which has the same block, the embedding and the head."""
    routed, mix, seed = FILES[name]
    shapes = list(_shapes(routed))
    layers = [each for each in shapes if not alone or not each[0].startswith("blk.")]
    recurrent = [*_layout()["attention.recurrent_layers"], False]
    numbers = {"block_count": LAYERS + 1, "nextn_predict_layers": 1, "attention.recurrent_layers": recurrent}
    return _write(path, routed, mix, {seed: layers, seed + 100: list(_block(routed))}, numbers)


def _write(
    path: Path, routed: bool, mix: Mix, shapes: dict[int, list[tuple[str, tuple[int, ...]]]], numbers: dict[str, Any]
) -> Path:
    """shapes: of tensors, by the seed that they are drawn with."""
    architecture = "qwen35moe" if routed else "qwen35"
    writer = GGUFWriter(path, architecture)
    for key, value in (_numbers(routed) | _layout() | numbers).items():
        add_value(writer, f"{architecture}.{key}", value)
    for key, value in {"general.name": path.stem, **qwen_vocabulary()}.items():
        add_value(writer, key, value)
    for seed, its_shapes in shapes.items():
        rng = np.random.default_rng(seed)
        for name, shape in its_shapes:
            kind = _kind(mix, name)
            data = _small_values(rng, name, shape) if kind == "F32" else random_blocks(rng, kind, shape)
            writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    """Metadata in the type that Python's value suggests."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def random_blocks(rng: np.random.Generator, kind: str, shape: tuple[int, ...], std: float = STD) -> np.ndarray:
    """Random codes and scales; uint8 [..., bytes of a row], or float16 [shape]."""
    if kind == "F16":
        return rng.normal(0, std, shape).astype(np.float16)
    columns, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = rng.integers(0, 256, (int(np.prod(shape)) // columns, size), dtype=np.uint8)
    _set_scales(raw, kind, np.ones(len(raw)))
    spread = dequantize(raw, GGMLQuantizationType[kind]).std()
    _set_scales(raw, kind, rng.uniform(0.7, 1.3, len(raw)) * std / spread)
    return raw.reshape(*shape[:-1], shape[-1] // columns * size)


def _set_scales(raw: np.ndarray, kind: str, scales: np.ndarray) -> None:
    at = SCALE_AT[kind]
    raw[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    if ratio := MINIMUM_RATIO.get(kind):
        raw[:, at + 2 : at + 4] = (scales * ratio).astype(np.float16)[:, None].view(np.uint8)


def _kind(mix: Mix, name: str) -> str:
    small = "norm" in name or name.split(".")[-2 if name.endswith(".weight") else 2] in (
        "ssm_a",
        "ssm_dt",
        "ssm_conv1d",
    )
    return "F32" if small or "ffn_gate_inp" in name else mix(name)


def _small_values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith("ssm_a"):
        values = -rng.uniform(0.05, 1.0, shape)
    elif name.endswith("ssm_dt.bias"):
        values = rng.uniform(-3.0, 1.0, shape)
    else:
        mean, std = (1.0, 0.2) if "norm" in name else (0.0, 0.4 if "conv1d" in name else STD)
        values = rng.normal(mean, std, shape)
    return values.astype(np.float32)


def _shapes(routed: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, rows first, in the order of the file."""
    yield "output.weight", (ROWS, HIDDEN)
    yield "output_norm.weight", (HIDDEN,)
    yield "token_embd.weight", (ROWS, HIDDEN)
    for layer in range(LAYERS):
        blocks = {**(_attention() if layer % 4 == 3 else _delta()), **(_experts() if routed else _dense())}
        yield from ((f"blk.{layer}.{name}", shape) for name, shape in blocks.items())


def _block(routed: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    norms = {f"nextn.{name}.weight": (HIDDEN,) for name in ("enorm", "hnorm", "shared_head_norm")}
    parts = {**_attention(), **(_experts() if routed else _dense()), "nextn.eh_proj.weight": (HIDDEN, 2 * HIDDEN)}
    yield from ((f"blk.{LAYERS}.{name}", shape) for name, shape in {**parts, **norms}.items())


def _attention() -> dict[str, tuple[int, ...]]:
    return {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (2 * HEADS * HEAD_DIM, HIDDEN),  # queries and their gates
        "attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_q_norm.weight": (HEAD_DIM,),
        "attn_k_norm.weight": (HEAD_DIM,),
        "attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
    }


def _delta() -> dict[str, tuple[int, ...]]:
    channels = (2 * KEY_HEADS + VALUE_HEADS) * STATE
    return {
        "attn_norm.weight": (HIDDEN,),
        "attn_qkv.weight": (channels, HIDDEN),
        "attn_gate.weight": (VALUE_HEADS * STATE, HIDDEN),
        "ssm_a": (VALUE_HEADS,),
        "ssm_alpha.weight": (VALUE_HEADS, HIDDEN),
        "ssm_beta.weight": (VALUE_HEADS, HIDDEN),
        "ssm_conv1d.weight": (channels, 4),
        "ssm_dt.bias": (VALUE_HEADS,),
        "ssm_norm.weight": (STATE,),
        "ssm_out.weight": (HIDDEN, VALUE_HEADS * STATE),
    }


def _dense() -> dict[str, tuple[int, ...]]:
    return {
        "post_attention_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (WIDTH, HIDDEN),
        "ffn_up.weight": (WIDTH, HIDDEN),
        "ffn_down.weight": (HIDDEN, WIDTH),
    }


def _experts() -> dict[str, tuple[int, ...]]:
    return {
        "post_attention_norm.weight": (HIDDEN,),
        "ffn_gate_inp.weight": (EXPERTS, HIDDEN),
        "ffn_gate_exps.weight": (EXPERTS, EXPERT_WIDTH, HIDDEN),
        "ffn_up_exps.weight": (EXPERTS, EXPERT_WIDTH, HIDDEN),
        "ffn_down_exps.weight": (EXPERTS, HIDDEN, EXPERT_WIDTH),
        "ffn_gate_inp_shexp.weight": (HIDDEN,),
        "ffn_gate_shexp.weight": (EXPERT_WIDTH, HIDDEN),
        "ffn_up_shexp.weight": (EXPERT_WIDTH, HIDDEN),
        "ffn_down_shexp.weight": (HIDDEN, EXPERT_WIDTH),
    }


def _numbers(routed: bool) -> dict[str, Any]:
    ffn = {
        "expert_count": EXPERTS,
        "expert_used_count": USED,
        "expert_feed_forward_length": EXPERT_WIDTH,
        "expert_shared_feed_forward_length": EXPERT_WIDTH,
    }
    return {
        "block_count": LAYERS,
        "context_length": 4096,
        "embedding_length": HIDDEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        **(ffn if routed else {"feed_forward_length": WIDTH}),
    }


def _layout() -> dict[str, Any]:
    return {
        "rope.dimension_sections": [3, 3, 2, 0],
        "rope.freq_base": 1e7,
        "rope.dimension_count": 16,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "ssm.conv_kernel": 4,
        "ssm.state_size": STATE,
        "ssm.group_count": KEY_HEADS,
        "ssm.time_step_rank": VALUE_HEADS,
        "ssm.inner_size": VALUE_HEADS * STATE,
        "attention.recurrent_layers": [layer % 4 != 3 for layer in range(LAYERS)],
        "full_attention_interval": 4,
    }

"""Synthetic models: random weights in the exact shape and quantisation mix of a real one, written at disk speed.

A speed does not depend on what the weights say, and tens of gigabytes cannot be fetched everywhere. So a modest run of
random but valid quantised blocks is made once per type and laid over all tensors, each starting at another place. The
run has a prime number of blocks: no row repeats while a tensor has fewer rows than the run has blocks.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.constants import GGMLQuantizationType

from rekindle.errors import BadConfig
from rekindle.spec import AttentionSpec, DeltaSpec, FfnSpec, ModelSpec
from rekindle.weights.expected import OUTPUT, expected_model
from rekindle.weights.gguf_header import (
    ARRAY,
    BOOL,
    DEFAULT_ALIGNMENT,
    FLOAT32,
    INT32,
    MAGIC,
    SCALARS,
    STRING,
    UINT32,
    VERSION,
)
from rekindle.weights.stored import row_bytes

STD = 0.03  # of the matrices' values
BIG_RUN, SMALL_RUN = 262_147, 4_099  # blocks, both prime
NORMAL_TOKEN, CONTROL_TOKEN, USER_TOKEN = 1, 3, 4

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What is written: the model in numbers and the place of its special tokens."""

    spec: ModelSpec
    sections: tuple[int, int, int, int]  # rotary axes of the vision half; half the rotated dimensions in sum
    first_special: int  # id of <|endoftext|>
    first_thinking: int  # id of <think>
    template: str = TEMPLATE  # of chats

    @property
    def specials(self) -> dict[int, str]:
        names = {self.first_special + i: name for i, name in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))}
        return names | {self.first_thinking: "<think>", self.first_thinking + 1: "</think>"}


@dataclass(frozen=True, slots=True)
class ShapeTotals:
    """Sizes of one shape in bytes."""

    by_type: dict[str, int]
    total: int
    per_token: int  # weights that one decoded token reads: one embedding row, the chosen experts, all the rest


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def nbytes(self) -> int:
        width = row_bytes(self.shape[-1], self.type)
        assert width is not None, f"{self.name} {self.shape} has no whole {self.type} blocks in a row"
        return math.prod(self.shape[:-1]) * width


def write_synthetic(path: str | Path, shape: str, seed: int = 0, template: str = TEMPLATE) -> Path:
    """Writes a GGUF file that opens, tokenizes and runs like a model of that shape."""
    chosen, path = replace(_shape(shape), template=template), Path(path)
    tensors = tensors_of(chosen.spec)
    rng = np.random.default_rng(seed)
    runs = {type: _doubled(run(rng, _run_length(chosen))) for type, run in RUNS.items()}
    with _named_once_whole(path) as file:
        file.write(_header(chosen, tensors))
        _pad(file)
        for tensor in tensors:
            _write_tensor(file, tensor, runs, rng)
            _pad(file)
    return path


def shape_totals(shape: str) -> ShapeTotals:
    spec = _shape(shape).spec
    by_type: Counter[str] = Counter()
    per_token = 0.0
    for tensor in tensors_of(spec):
        by_type[tensor.type] += tensor.nbytes
        per_token += tensor.nbytes * _share_read(spec, tensor.name)
    return ShapeTotals(dict(by_type), by_type.total(), round(per_token))


def _shape(name: str) -> Shape:
    if name not in SHAPES:
        raise BadConfig(f"there is no synthetic shape {name!r}; there are {', '.join(SHAPES)}")
    return SHAPES[name]


def _share_read(spec: ModelSpec, name: str) -> float:
    if name == "token_embd.weight":
        return 1 / spec.vocab
    return spec.ffn.used / spec.ffn.experts if name.endswith("_exps.weight") else 1.0


# ---- which tensors, in which types --------------------------------------------------------------------------------


def tensors_of(spec: ModelSpec) -> list[_Tensor]:
    """Names, shapes and types of a whole model."""
    return [_Tensor(name, shape, _type(spec, name)) for name, shape in expected_model(spec).items()]


def _type(spec: ModelSpec, name: str) -> str:
    """The mix known as Q4_K_M: 6 bits for the head and for the more delicate matrices of half of the layers."""
    base = name.split(".", 2)[-1] if name.startswith("blk.") else name
    if "norm" in base or base.startswith(("ssm_a", "ssm_b", "ssm_dt", "ssm_conv1d", "ffn_gate_inp")):
        return "F32"
    if name == OUTPUT:
        return "Q6_K"
    delicate = base.startswith(("attn_v.", "attn_qkv.", "ffn_down"))
    return "Q6_K" if delicate and _gets_more_bits(int(name.split(".")[1]), spec.layers) else "Q4_K"


def _gets_more_bits(layer: int, layers: int) -> bool:
    """The first and the last eighth of the layers, and every third between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


# ---- random blocks ------------------------------------------------------------------------------------------------


def _q4_k_run(rng: np.random.Generator, blocks: int) -> np.ndarray:
    """uint8 [blocks, 144]: d, dmin (f16), 12 bytes of eight 6-bit scales and minima, 128 bytes of 4-bit values.

    value = d · scale · q − dmin · minimum; with minimum = scale and dmin = 7.5 d that is d · scale · (q − 7.5).
    """
    scale = rng.integers(24, 41, (blocks, 8), dtype=np.uint8)
    spread = math.sqrt((16**2 - 1) / 12)  # of q uniform over 16 values
    d = np.float16(STD / (spread * 32.25))  # 32.25: root mean square of the scales
    run = np.empty((blocks, 144), np.uint8)
    run[:, :4] = np.array([d, 7.5 * float(d)], np.float16).view(np.uint8)
    low, high = scale[:, :4], scale[:, 4:]
    run[:, 4:8] = run[:, 8:12] = low | (high >> 4) << 6
    run[:, 12:16] = (high & 15) | (high & 15) << 4
    run[:, 16:] = rng.integers(0, 256, (blocks, 128), dtype=np.uint8)
    return run


def _q6_k_run(rng: np.random.Generator, blocks: int) -> np.ndarray:
    """uint8 [blocks, 210]: 128 + 64 bytes of 6-bit values, sixteen int8 scales, d (f16); d · scale · (q − 32)."""
    spread = math.sqrt((64**2 - 1) / 12)  # of q uniform over 64 values
    run = rng.integers(0, 256, (blocks, 210), dtype=np.uint8)
    run[:, 192:208] = rng.integers(12, 21, (blocks, 16), dtype=np.uint8)
    run[:, 208:] = np.array([STD / (spread * 16.2)], np.float16).view(np.uint8)
    return run


RUNS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {"Q4_K": _q4_k_run, "Q6_K": _q6_k_run}


def _run_length(shape: Shape) -> int:
    return BIG_RUN if shape.spec.vocab > SMALL_RUN else SMALL_RUN


def _doubled(run: np.ndarray) -> np.ndarray:
    """Twice over, so that a whole run can be written from any block on."""
    return np.concatenate([run, run])


def _small_values(rng: np.random.Generator, tensor: _Tensor) -> np.ndarray:
    """float32 tensors, in ranges that keep a random model's state alive and bounded."""
    if "norm" in tensor.name:
        return rng.normal(1.0, 0.1, tensor.shape)
    if tensor.name.endswith("ssm_a"):
        return -rng.uniform(0.01, 1.0, tensor.shape)
    if tensor.name.endswith("ssm_dt.bias"):
        return rng.uniform(-4.0, 0.0, tensor.shape)
    return rng.normal(0.0, 0.3 if "conv1d" in tensor.name else STD, tensor.shape)


# ---- the file -----------------------------------------------------------------------------------------------------


@contextmanager
def _named_once_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that bears its name only when all of it is written; what an interruption leaves is removed."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _write_tensor(file: BinaryIO, tensor: _Tensor, runs: dict[str, np.ndarray], rng: np.random.Generator) -> None:
    if tensor.type == "F32":
        file.write(_small_values(rng, tensor).astype(np.float32).tobytes())
        return
    twice = runs[tensor.type]
    length = len(twice) // 2
    start = int(rng.integers(length))
    whole = twice[start : start + length].reshape(-1).data
    left = tensor.nbytes
    while left:
        left -= file.write(whole[: min(left, len(whole))])


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % DEFAULT_ALIGNMENT))


def _header(shape: Shape, tensors: list[_Tensor]) -> bytes:
    values = list(_metadata(shape))
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(values)), *(_pair(*value) for value in values)]
    offset = 0
    for tensor in tensors:
        sizes = tuple(reversed(tensor.shape))
        number = GGMLQuantizationType[tensor.type].value
        parts += [_string(tensor.name), struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, number, offset)]
        offset += -(-tensor.nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    return b"".join(parts)


def _pair(key: str, kind: int, value: Any) -> bytes:
    """`kind` is that of the items where the value is a list."""
    if not isinstance(value, list):
        return _string(key) + struct.pack("<I", kind) + _item(kind, value)
    head = _string(key) + struct.pack("<IIQ", ARRAY, kind, len(value))
    if kind == STRING:
        return head + b"".join(map(_string, value))
    return head + struct.pack(f"<{len(value)}{SCALARS[kind]}", *value)


def _item(kind: int, value: Any) -> bytes:
    return _string(value) if kind == STRING else struct.pack("<" + SCALARS[kind], value)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _metadata(shape: Shape) -> Iterator[tuple[str, int, Any]]:
    spec = shape.spec
    assert spec.delta is not None, "every synthetic shape is a hybrid model"
    yield "general.architecture", STRING, spec.architecture
    yield "general.name", STRING, spec.name
    numbers = {
        "block_count": spec.layers,
        "context_length": spec.context,
        "embedding_length": spec.hidden,
        "attention.head_count": spec.attention.heads,
        "attention.head_count_kv": spec.attention.kv_heads,
        "attention.key_length": spec.attention.head_dim,
        "attention.value_length": spec.attention.head_dim,
        "rope.dimension_count": spec.attention.rope_dim,
        "full_attention_interval": 4,
        "ssm.conv_kernel": spec.delta.conv_width,
        "ssm.state_size": spec.delta.key_dim,
        "ssm.group_count": spec.delta.key_heads,
        "ssm.time_step_rank": spec.delta.value_heads,
        "ssm.inner_size": spec.delta.inner,
    }
    if spec.ffn.is_moe:
        numbers |= {
            "expert_count": spec.ffn.experts,
            "expert_used_count": spec.ffn.used,
            "expert_feed_forward_length": spec.ffn.expert_width,
            "expert_shared_feed_forward_length": spec.ffn.shared_width,
        }
    else:
        numbers["feed_forward_length"] = spec.ffn.width
    for key, number in numbers.items():
        yield f"{spec.architecture}.{key}", UINT32, number
    yield f"{spec.architecture}.rope.dimension_sections", INT32, list(shape.sections)
    yield f"{spec.architecture}.rope.freq_base", FLOAT32, spec.attention.rope_theta
    yield f"{spec.architecture}.attention.layer_norm_rms_epsilon", FLOAT32, spec.eps
    yield from _tokenizer(shape)


def _tokenizer(shape: Shape) -> Iterator[tuple[str, int, Any]]:
    """A byte-level vocabulary of the right size: 256 bytes, words without sense, the special tokens at their ids."""
    alphabet, specials = byte_alphabet(), shape.specials
    zero = chr(0x100)  # the character of byte 0
    tokens = [*alphabet, zero + zero]
    tokens += [_word(i) for i in range(len(tokens), shape.spec.vocab)]
    kinds = [NORMAL_TOKEN] * len(tokens)
    for id, name in specials.items():
        tokens[id] = name
        kinds[id] = USER_TOKEN if "think" in name else CONTROL_TOKEN
    yield "tokenizer.ggml.model", STRING, "gpt2"
    yield "tokenizer.ggml.pre", STRING, "qwen35"
    yield "tokenizer.ggml.tokens", STRING, tokens
    yield "tokenizer.ggml.token_type", INT32, kinds
    # one merge, of a pair that text hardly holds (two zero bytes): some readers refuse an empty list
    yield "tokenizer.ggml.merges", STRING, [f"{zero} {zero}"]
    yield "tokenizer.ggml.eos_token_id", UINT32, shape.first_special + 2
    yield "tokenizer.ggml.padding_token_id", UINT32, shape.first_special
    yield "tokenizer.ggml.add_bos_token", BOOL, False
    yield "tokenizer.chat_template", STRING, shape.template


def _word(number: int) -> str:
    """Another one for every number, of syllables, half of them behind a blank. A grammar walks the vocabulary as a
    tree, so its words should part like those of a language."""
    blank, number = "\u0120" * (number % 2), number // 2
    syllables = [consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou"]
    word = ""
    while number or not word:
        number, digit = divmod(number, len(syllables))
        word += syllables[digit]
    return blank + word


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE: printable ones as they are, the others from U+0100 on,
    in the order of their ids."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(b) for b in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]


# ---- the shapes ---------------------------------------------------------------------------------------------------


def _hybrid(
    name: str, layers: int, hidden: int, vocab: int, attention: AttentionSpec, delta: DeltaSpec, ffn: FfnSpec
) -> ModelSpec:
    return ModelSpec(
        architecture="qwen35moe" if ffn.is_moe else "qwen35",
        name=f"synthetic {name}",
        hidden=hidden,
        vocab=vocab,
        mixers=tuple(delta if (i + 1) % 4 else attention for i in range(layers)),
        ffn=ffn,
        eps=1e-6,
        context=262_144,
        tied=False,
    )


def _gated(heads: int, kv_heads: int, head_dim: int, rope_dim: int) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, head_dim, rope_dim, rope_theta=1e7, qk_norm=True, gated=True)


def _real(name: str, layers: int, hidden: int, attention: AttentionSpec, delta: DeltaSpec, ffn: FfnSpec) -> Shape:
    spec = _hybrid(name, layers, hidden, 248_320, attention, delta, ffn)
    return Shape(spec, sections=(11, 11, 10, 0), first_special=248_044, first_thinking=248_068)


def _tiny(name: str, ffn: FfnSpec) -> Shape:
    spec = _hybrid(name, 8, 256, 512, _gated(4, 2, 64, 16), DeltaSpec(4, 8, 32, 32, 4), ffn)
    return Shape(spec, sections=(3, 3, 2, 0), first_special=500, first_thinking=503)


def _small(name: str, hidden: int, attention: AttentionSpec, delta: DeltaSpec, ffn: FfnSpec) -> Shape:
    """For CPUs: 16 layers, and a vocabulary that does not outweigh them."""
    spec = _hybrid(name, 16, hidden, 32_768, attention, delta, ffn)
    return Shape(spec, sections=(11, 11, 10, 0), first_special=32_700, first_thinking=32_724)


_27B = _real("27b", 64, 5120, _gated(24, 4, 256, 64), DeltaSpec(16, 48, 128, 128, 4), FfnSpec(17_408))
_35B = _real("35b-a3b", 40, 2048, _gated(16, 2, 256, 64), DeltaSpec(16, 32, 128, 128, 4), FfnSpec(0, 256, 8, 512, 512))
SHAPES: dict[str, Shape] = {
    "qwen3.6-27b": _27B,
    "qwen3.6-35b-a3b": _35B,
    "hybrid-1b": _small("1b", 2048, _gated(16, 4, 128, 64), DeltaSpec(16, 16, 128, 128, 4), FfnSpec(6144)),
    "hybrid-2b-a0.3b": _small(
        "2b-a0.3b", 1024, _gated(8, 2, 128, 64), DeltaSpec(8, 16, 128, 128, 4), FfnSpec(0, 64, 4, 512, 512)
    ),
    "tiny": _tiny("tiny", FfnSpec(512)),
    "tiny-moe": _tiny("tiny-moe", FfnSpec(0, 8, 2, 256, 256)),
}

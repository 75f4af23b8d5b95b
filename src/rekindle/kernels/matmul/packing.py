"""Raw GGUF rows → planes, losslessly, in torch on whatever device the rows are on.

Value of a weight with code q (d, m and their like are the float16 numbers of the file):

    type    code      scales                             super_scales               value
    Q4_K    4 bits    int16  scale | min << 8            int32 d | dmin << 16 d·scale·q − dmin·min
    Q5_K    5 bits    the same                           the same             the same
    Q6_K    6 bits    int16  scale₀ | scale₁ << 8 (int8) float32 d            d·scaleₕ·(q − 32), h = half of the block
    Q8_0    8 bits    int16  d                                                d·(q − 128)
    Q4_0    4 bits    int16  d                                                d·(q − 8)
    Q5_0    5 bits    int16  d                                                d·(q − 16)
    Q4_1    4 bits    int32  d | m << 16                                      d·q + m
    Q5_1    5 bits    int32  d | m << 16                                      d·q + m
    IQ4_NL  4 bits    int16  d                                                d·table[q]
    IQ4_XS  4 bits    int8   scale                       float32 d            d·scale·table[q]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rekindle.kernels.matmul.types import Packed

BLOCK = 32
GROUPED = ("Q4_K", "Q5_K", "Q6_K")  # the types whose blocks lie interleaved by fours, as the tensor cores take them
SLAB = 1 << 27  # weights unpacked at a time: one byte each, and a few temporaries of the same order
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # values of IQ4 codes


class UnpackedBlocks(NamedTuple):
    """Unpacked rows: codes uint8 [n, 32] by block, scales [n] by block, super_scales [n / 8] or nothing."""

    codes: Tensor
    scales: Tensor
    super_scales: Tensor | None


class Format(NamedTuple):
    """How many weights and bytes a stored block has, how wide a code is, and how a stored block comes apart."""

    weights: int
    nbytes: int
    bits: int
    split: Callable[[Tensor], UnpackedBlocks]


def pack(raw: Tensor, type: str, columns: int) -> Packed:
    """raw uint8 [rows, bytes of a row], on any device -> the same weights in planes on that device."""
    form = FORMATS[type]
    rows, row_bytes = raw.shape
    assert columns % form.weights == 0, f"{type} rows come in blocks of {form.weights}, not {columns} columns"
    assert row_bytes == columns // form.weights * form.nbytes, f"{type}: {row_bytes} bytes for {columns} columns"
    step = max(1, SLAB // columns)
    to_words = _pack_groups if type in GROUPED else _pack_codes
    slabs = [_pack_slab(raw[at : at + step], form, columns // BLOCK, to_words) for at in range(0, rows, step)]
    planes = [None if slab[0] is None else torch.cat(slab) for slab in zip(*slabs, strict=True)]
    codes, high_bits, scales, super_scales = planes
    assert codes is not None, "codes are there for every type"
    assert scales is not None, "scales are there for every type"
    return Packed(type, rows, columns, codes, high_bits, scales, super_scales)


@cache
def _block_bytes(type: str) -> int:
    """What one stored block takes in planes."""
    form = FORMATS[type]
    planes = pack(torch.zeros(1, form.nbytes, dtype=torch.uint8), type, form.weights).planes
    return sum(plane.nbytes for plane in planes)


def packed_bytes(type: str, weights: int) -> int | None:
    """Bytes that `weights` weights take in planes, in whole blocks; None for a type that has no planes."""
    return weights // FORMATS[type].weights * _block_bytes(type) if type in FORMATS else None


def _pack_slab(
    raw: Tensor, form: Format, blocks: int, to_words: Callable[[Tensor, int], tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    rows = raw.shape[0]
    parts = form.split(raw.reshape(-1, form.nbytes))
    codes, high_bits = to_words(parts.codes, form.bits)
    super_scales = None if parts.super_scales is None else parts.super_scales.view(rows, -1).contiguous()
    return (
        codes.view(rows, blocks, -1),
        None if high_bits is None else high_bits.view(rows, blocks),
        parts.scales.reshape(rows, blocks).contiguous(),
        super_scales,
    )


def _pack_codes(codes: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """Codes uint8 [n, 32] -> words, and the plane of what does not fit a nibble."""
    if bits == 8:
        return _fold(codes.view(-1, 4, 8), width=8), None
    words = _fold((codes & 15).view(-1, 8, 4), width=4)
    rest = (codes >> 4).view(-1, 8, 4)
    if bits == 5:
        nibbles = rest[..., 0] | rest[..., 1] << 1 | rest[..., 2] << 2 | rest[..., 3] << 3
        return words, _fold(nibbles.view(-1, 8, 1), width=4).view(-1)
    return words, None


def _pack_groups(codes: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """The same for types that are grouped: `Packed` says what lies where."""
    fields = codes.view(-1, 4, 2, 4, 2, 2)  # group, block i, s, t, u, h
    words = _fold((fields & 15).permute(0, 5, 2, 4, 3, 1).reshape(-1, 8, 16), width=4)
    rest = fields >> 4
    if bits == 5:
        return words, _fold(rest.permute(0, 5, 1, 2, 4, 3).reshape(-1, 32, 4), width=1).view(-1)
    if bits == 6:
        pairs = rest.view(-1, 2, 2, 2, 4, 2, 2)  # group, pair of blocks, which of the pair, s, t, u, h
        halves = _fold(pairs.permute(0, 6, 2, 3, 5, 4, 1).reshape(-1, 16, 8), width=2)
        return words, halves.view(torch.int64).view(-1)
    return words, None


def _fold(fields: Tensor, width: int) -> Tensor:
    """uint8 [n, fields, words] -> int32 [n, words], field j at bit width·j; the fields fill the words."""
    while width < 8:  # in bytes, of which a quarter as many travel as of words
        fields, width = fields[:, 0::2] | fields[:, 1::2] << width, 2 * width
    return _int32(fields.transpose(1, 2).reshape(-1, 4)).view(len(fields), -1)


def _int16(bytes2: Tensor) -> Tensor:
    """uint8 [n, 2·m] -> int16 [n, m], little-endian."""
    return bytes2.contiguous().view(torch.int16)


def _int32(bytes4: Tensor) -> Tensor:
    return bytes4.contiguous().view(torch.int32)


def _float32(bytes2: Tensor) -> Tensor:
    """The float16 numbers in bytes, widened: four bytes can be copied to shared memory ahead of time, two cannot."""
    return bytes2.contiguous().view(torch.float16).float()


def _nibbles(qs: Tensor) -> Tensor:
    """uint8 [..., n] -> [..., 2n]: the low nibbles of all, then the high ones."""
    return torch.cat((qs & 15, qs >> 4), dim=-1)


def _scales_and_mins(packed: Tensor) -> Tensor:
    """The 12 bytes of 6-bit scales and mins -> int16 [n, 8], scale | min << 8."""
    low, mid, top = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scale = torch.cat((low & 63, (top & 15) | (low >> 2 & 48)), dim=1)
    least = torch.cat((mid & 63, (top >> 4) | (mid >> 2 & 48)), dim=1)
    return scale.to(torch.int16) | least.to(torch.int16) << 8


def _fifth_bits(qh: Tensor) -> Tensor:
    """4 bytes with one bit per weight -> uint8 [n, 32], the bit at its place in the code."""
    shifts = torch.arange(8, dtype=torch.uint8, device=qh.device)
    return (qh[:, :, None] >> shifts & 1).view(-1, BLOCK) << 4


def _split_q4_k(raw: Tensor) -> UnpackedBlocks:
    codes = _nibbles(raw[:, 16:].view(-1, 4, 32)).view(-1, BLOCK)
    return UnpackedBlocks(codes, _scales_and_mins(raw[:, 4:16]), _int32(raw[:, 0:4]))


def _split_q5_k(raw: Tensor) -> UnpackedBlocks:
    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device)[:, None]
    fifth = (raw[:, None, 16:48] >> shifts & 1) << 4  # [n, 8, 32]
    codes = _nibbles(raw[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32) | fifth
    return UnpackedBlocks(codes.view(-1, BLOCK), _scales_and_mins(raw[:, 4:16]), _int32(raw[:, 0:4]))


def _split_q6_k(raw: Tensor) -> UnpackedBlocks:
    low = _nibbles(raw[:, 0:128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device)[:, None]
    high_bits = raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    codes = low | high_bits << 4
    return UnpackedBlocks(codes.view(-1, BLOCK), _int16(raw[:, 192:208]), _float32(raw[:, 208:210]))


def _split_q8_0(raw: Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(raw[:, 2:] ^ 128, _int16(raw[:, 0:2]), None)


def _split_q4_0(raw: Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(_nibbles(raw[:, 2:]), _int16(raw[:, 0:2]), None)


def _split_q4_1(raw: Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(_nibbles(raw[:, 4:]), _int32(raw[:, 0:4]), None)


def _split_q5_0(raw: Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(_nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6]), _int16(raw[:, 0:2]), None)


def _split_q5_1(raw: Tensor) -> UnpackedBlocks:
    return UnpackedBlocks(_nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8]), _int32(raw[:, 0:4]), None)


def _split_iq4_xs(raw: Tensor) -> UnpackedBlocks:
    low = raw[:, 4:8]
    low = torch.stack((low & 15, low >> 4), dim=-1).view(-1, 8).to(torch.int16)
    shifts = torch.arange(0, 16, 2, dtype=torch.int16, device=raw.device)
    high_bits = _int16(raw[:, 2:4]) >> shifts & 3
    codes = _nibbles(raw[:, 8:].reshape(-1, 8, 16)).view(-1, BLOCK)
    return UnpackedBlocks(codes, ((low | high_bits << 4) - 32).to(torch.int8), _float32(raw[:, 0:2]))


FORMATS: dict[str, Format] = {
    "Q4_K": Format(256, 144, 4, _split_q4_k),
    "Q5_K": Format(256, 176, 5, _split_q5_k),
    "Q6_K": Format(256, 210, 6, _split_q6_k),
    "Q8_0": Format(32, 34, 8, _split_q8_0),
    "Q4_0": Format(32, 18, 4, _split_q4_0),
    "Q4_1": Format(32, 20, 4, _split_q4_1),
    "Q5_0": Format(32, 22, 5, _split_q5_0),
    "Q5_1": Format(32, 24, 5, _split_q5_1),
    "IQ4_NL": Format(32, 18, 4, _split_q4_0),
    "IQ4_XS": Format(256, 136, 4, _split_iq4_xs),
}

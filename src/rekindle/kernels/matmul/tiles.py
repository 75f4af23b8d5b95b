"""Triton pieces that read planes: shared by the dense kernels and the expert kernels.

A tile is [BB blocks, BN rows], blocks first: Triton then lays neighbouring threads along a row, whole blocks each.
`blk` [BB, BN] holds the flat block numbers (row · blocks of a row + block), from which every plane is addressed. TYPE
is the GGUF type; WORDS and FIELDS follow from it: a block is WORDS int32 words of FIELDS codes each, and
`weight_of` says which weight field j of word i is.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_hip


@triton.constexpr_function
def words_of(type):
    return 8 if type == "Q8_0" else 4


@triton.constexpr_function
def fields_of(type):
    return 4 if type == "Q8_0" else 8


@triton.constexpr_function
def bits_of(type):
    return {"Q8_0": 8, "Q6_K": 6, "Q5_K": 5, "Q5_0": 5, "Q5_1": 5}.get(type, 4)


@triton.constexpr_function
def is_grouped(type):
    return type in ("Q4_K", "Q5_K", "Q6_K")


@triton.constexpr_function
def step_of(type):
    """How far apart field j of neighbouring words is in x."""
    return 4 if is_grouped(type) else 1


@triton.constexpr_function
def first_of(type, j):
    """Which weight of the block field j of word 0 is."""
    if is_grouped(type):
        return 16 * (j % 4 // 2) + 2 * (j % 2) + j // 4
    return words_of(type) * j


@triton.constexpr_function
def in_second_half(type, j):
    """Field j of every word is in the second half of the block, which has its own scale in Q6_K."""
    return type == "Q6_K" and j % 4 >= 2


@triton.constexpr_function
def upper_shift(type, j):
    """Left shift that takes the upper bits of field j to right above the nibble where `place_of` puts it."""
    target = place_of(type, j)[1] + 4
    if is_grouped(type):
        return target - (16 * (j // 4) + (bits_of(type) - 4) * (j % 4))
    return target - 4 * j


@triton.constexpr_function
def zero_of(type):
    """The code that stands for zero, where there is one."""
    return {"Q8_0": 128, "Q6_K": 32, "Q5_0": 16, "Q4_0": 8}.get(type, 0)


@triton.constexpr_function
def has_minimum(type):
    return type in ("Q4_K", "Q5_K", "Q4_1", "Q5_1")


@triton.constexpr_function
def is_looked_up(type):
    return type in ("IQ4_NL", "IQ4_XS")


@triton.constexpr_function
def place_of(type, j):
    """Field j as (shift of the word to the right, bit of the field after it): five nibbles fit a float's mantissa."""
    if type == "Q8_0":
        return (16 * (j // 2), 8 * (j % 2))
    return (0, 4 * j) if j < 5 else (16, 4 * (j - 4))


@triton.constexpr_function
def lifted(place):
    """Bits of the float 2^(23 − place): or-ing a field into its mantissa at `place` adds the field's plain value."""
    return (150 - place) << 23


@triton.constexpr_function
def lifted_value(place, zero):
    return float(2 ** (23 - place) + zero)


@triton.constexpr_function
def field_mask(place, bits):
    return ((1 << bits) - 1) << place


@triton.jit
def either(first, one, other):
    """The pointers `one` where first, `other` elsewhere. Triton's compiler for AMD stops at a choice between pointers
    to two small tensors, so there it is one between addresses."""
    if is_hip():
        kind: tl.constexpr = other.dtype
        return tl.where(first, one.to(tl.int64), other.to(tl.int64)).to(kind)
    else:
        return tl.where(first, one, other)


@triton.jit
def codes_at(words, above, nought, j: tl.constexpr, TYPE: tl.constexpr):
    """Field j of every word as float32, its zero taken off: [BB, BN, WORDS].

    `nought` is 0, which the compiler must not know: the constant then sits in a register, and one three-input
    instruction cuts the field out and lifts it.
    """
    if is_looked_up(TYPE):
        index = (words >> (4 * j)) & 15
        negative = index < 8
        # The table's bytes, eight to a number: the lower half lifted by 128 so that all are positive.
        table = tl.where(negative, 0x766A5D4F3F2D1801, 0x7159453526190D01)
        value = (table >> ((index & 7) * 8).to(tl.int64)).to(tl.int32) & 255
        return (value - tl.where(negative, 128, 0)).to(tl.float32)
    shift: tl.constexpr = place_of(TYPE, j)[0]
    place: tl.constexpr = place_of(TYPE, j)[1]
    low: tl.constexpr = 8 if bits_of(TYPE) == 8 else 4
    bits = ((words >> shift) & field_mask(place, low)) | (lifted(place) + nought)
    if bits_of(TYPE) == 5 or bits_of(TYPE) == 6:
        left: tl.constexpr = upper_shift(TYPE, j)
        lined_up = (above << left) if left >= 0 else (above >> -left)
        bits = bits ^ (lined_up & field_mask(place + 4, bits_of(TYPE) - 4))  # an or here would be torn apart
    return bits.to(tl.float32, bitcast=True) - lifted_value(place, zero_of(TYPE))


@triton.jit
def half_at(bits):
    """int16 bits of a float16 -> float32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def read(p, mask, MASKED: tl.constexpr):
    """A load that carries a mask only where some of it is needed; weights pass the cache once."""
    if MASKED:
        return tl.load(p, mask, other=0, eviction_policy="evict_first")
    else:
        return tl.load(p, eviction_policy="evict_first")


@triton.jit
def load_words(codes, high_bits, blk, mask, TYPE: tl.constexpr, MASKED: tl.constexpr):
    """The words of the blocks [BB, BN, WORDS], and the upper bits per word (or the words again, unused)."""
    WORDS: tl.constexpr = words_of(TYPE)
    i = tl.arange(0, WORDS)
    if is_grouped(TYPE):
        first = blk // 4 * 4  # the group's entry 0 of the plane `high_bits`
        which = blk % 4
        words = read((codes + first * 4 + which)[:, :, None] + 4 * i[None, None, :], mask[:, :, None], MASKED)
        above = words
        if bits_of(TYPE) > 4:
            above = read((high_bits + first)[:, :, None] + i[None, None, :], mask[:, :, None], MASKED)
        if bits_of(TYPE) == 5:
            above = above >> (4 * which)[:, :, None].to(tl.int32)
        if bits_of(TYPE) == 6:
            above = (above >> (32 * (which // 2) + 8 * (which % 2))[:, :, None].to(tl.int64)).to(tl.int32)
    else:
        words = read((codes + blk * WORDS)[:, :, None] + i[None, None, :], mask[:, :, None], MASKED)
        above = words
        if bits_of(TYPE) == 5:
            above = read(high_bits + blk, mask, MASKED)[:, :, None] >> i[None, None, :]
    return words, above


@triton.jit
def block_numbers(b, row, blocks):
    """Flat block numbers [BB, BN], 64 bits wide so that constant distances between rows fold into addresses.

    The hint denies what is true, that blocks are contiguous: each thread must own a whole block in every plane.
    """
    return tl.max_contiguous(b[:, None] + row[None, :].to(tl.int64) * blocks, (1, 1))


@triton.jit
def load_scales(scales, super_scales, blk, mask, TYPE: tl.constexpr, MASKED: tl.constexpr):
    """(a, b, c) per block: weight = a · code + c, where the second half of the block has b for a."""
    entry = read(scales + blk, mask, MASKED)
    if TYPE == "Q4_K" or TYPE == "Q5_K":
        both = read(super_scales + blk // 8, mask, MASKED)
        bytes2 = entry.to(tl.uint16, bitcast=True).to(tl.int32)
        a = half_at(both & 0xFFFF) * (bytes2 & 255).to(tl.float32)
        c = half_at(both >> 16) * -(bytes2 >> 8).to(tl.float32)
        return a, a, c
    elif TYPE == "Q6_K":
        d = read(super_scales + blk // 8, mask, MASKED)
        bytes2 = entry.to(tl.uint16, bitcast=True).to(tl.int32)
        a = d * (bytes2 << 24 >> 24).to(tl.float32)
        b = d * (bytes2 << 16 >> 24).to(tl.float32)
        return a, b, a
    elif TYPE == "IQ4_XS":
        a = read(super_scales + blk // 8, mask, MASKED) * entry.to(tl.float32)
        return a, a, a
    elif TYPE == "Q4_1" or TYPE == "Q5_1":
        a = half_at(entry & 0xFFFF)
        return a, a, half_at(entry >> 16)
    else:
        a = half_at(entry)
        return a, a, a


@triton.jit
def dot_blocks(
    x, codes, high_bits, scales, super_scales, b, b_mask, blk, mask, nought, TYPE: tl.constexpr, MASKED: tl.constexpr
):
    """Σ weight · x over every block: x is one row, read at 32 · b; float32 [BB, BN]."""
    WORDS: tl.constexpr = words_of(TYPE)
    FIELDS: tl.constexpr = fields_of(TYPE)
    words, above = load_words(codes, high_bits, blk, mask, TYPE, MASKED)
    a, a2, c = load_scales(scales, super_scales, blk, mask, TYPE, MASKED)
    p_x = x + b[:, None] * 32 + step_of(TYPE) * tl.arange(0, WORDS)[None, :]  # [BB, WORDS]
    x_sum = tl.zeros([b.shape[0], WORDS], tl.float32)
    first = tl.zeros([b.shape[0], blk.shape[1], WORDS], tl.float32)
    second = first
    for j in tl.static_range(FIELDS):
        if MASKED:
            x_j = tl.load(p_x + first_of(TYPE, j), b_mask[:, None], other=0.0, eviction_policy="evict_last").to(
                tl.float32
            )
        else:
            x_j = tl.load(p_x + first_of(TYPE, j), eviction_policy="evict_last").to(tl.float32)
        q = codes_at(words, above, nought, j, TYPE)
        if in_second_half(TYPE, j):
            second += q * x_j[:, None, :]
        else:
            first += q * x_j[:, None, :]
        if has_minimum(TYPE):
            x_sum += x_j
    total = a * tl.sum(first, 2)
    if TYPE == "Q6_K":
        total += a2 * tl.sum(second, 2)
    if has_minimum(TYPE):
        total += c * tl.sum(x_sum, 1)[:, None]
    return total


@triton.jit
def weights_at(words, above, a, a2, c, nought, j: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr):
    """Field j of every word as the weight itself: [BB, BN, WORDS] in DTYPE."""
    q = codes_at(words, above, nought, j, TYPE)
    if in_second_half(TYPE, j):
        value = q * a2[:, :, None]
    elif has_minimum(TYPE):
        value = q * a[:, :, None] + c[:, :, None]
    else:
        value = q * a[:, :, None]
    return value.to(DTYPE)


@triton.jit
def load_weights(
    codes,
    high_bits,
    scales,
    super_scales,
    blk,
    mask,
    nought,
    TYPE: tl.constexpr,
    DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The tile's weights in the order of the file: [BN, 32 · BB] in DTYPE. Masked blocks are zero."""
    BB: tl.constexpr = blk.shape[0]
    BN: tl.constexpr = blk.shape[1]
    words, above = load_words(codes, high_bits, blk, mask, TYPE, MASKED)
    a, a2, c = load_scales(scales, super_scales, blk, mask, TYPE, MASKED)
    v0 = weights_at(words, above, a, a2, c, nought, 0, TYPE, DTYPE)
    v1 = weights_at(words, above, a, a2, c, nought, 1, TYPE, DTYPE)
    v2 = weights_at(words, above, a, a2, c, nought, 2, TYPE, DTYPE)
    v3 = weights_at(words, above, a, a2, c, nought, 3, TYPE, DTYPE)
    if fields_of(TYPE) == 4:
        joined = tl.join(tl.join(v0, v2), tl.join(v1, v3))  # [BB, BN, i, upper bit of j, lower bit of j]
        return tl.permute(joined, (1, 0, 3, 4, 2)).reshape(BN, BB * 32)
    else:
        v4 = weights_at(words, above, a, a2, c, nought, 4, TYPE, DTYPE)
        v5 = weights_at(words, above, a, a2, c, nought, 5, TYPE, DTYPE)
        v6 = weights_at(words, above, a, a2, c, nought, 6, TYPE, DTYPE)
        v7 = weights_at(words, above, a, a2, c, nought, 7, TYPE, DTYPE)
        even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
        odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
        joined = tl.join(even, odd)  # [BB, BN, i, upper, middle, lower bit of j]
        if is_grouped(TYPE):
            return tl.permute(joined, (1, 0, 4, 2, 5, 3)).reshape(BN, BB * 32)  # j is h, s, u; the order is s, i, u, h
        else:
            return tl.permute(joined, (1, 0, 3, 4, 5, 2)).reshape(BN, BB * 32)


@triton.jit
def dot_pair(weights, x, acc, EXACT: tl.constexpr):
    """acc [BN, BM] += weights [BN, K] · x [BM, K]ᵀ."""
    if EXACT:
        return tl.dot(weights, tl.trans(x), acc, input_precision="ieee")
    else:
        return tl.dot(weights, tl.trans(x), acc)

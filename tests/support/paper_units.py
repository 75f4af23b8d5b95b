"""The instructions of `matmul.ptx`, on paper: what each does to the registers of all threads, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from rekindle.kernels.matmul import gemv, mma, mma_row, ptx


def array(value: Any) -> np.ndarray:
    return np.asarray(value.handle.data if isinstance(value, tl.tensor) else getattr(value, "value", value))


def registers(values: np.ndarray, type: tl.dtype) -> tl.tensor:
    return tl.tensor(TensorHandle(values, type), tl.block_type(type, list(values.shape)))


def words(values: np.ndarray) -> tl.tensor:
    return registers(values.astype(np.uint32).view(np.int32), tl.int32)


class Stretch:
    """Words of memory from an address on, as numpy asks for them."""

    def __init__(self, address: int, count: int) -> None:
        self.__array_interface__ = {"data": (address, True), "shape": (count,), "typestr": "<u4", "version": 3}


def memory(addresses: np.ndarray, count: int, live: np.ndarray) -> list[tl.tensor]:
    """`count` words at each address; where not live, bits that would show if they were used."""
    found = np.full((*addresses.shape, count), 0x7FFF7FFF, dtype=np.uint32)
    wanted = addresses[live != 0].astype(np.int64)
    if wanted.size:
        first = int(wanted.min())
        every = np.asarray(Stretch(first, (int(wanted.max()) - first) // 4 + count))
        found[live != 0] = every[(wanted - first)[:, None] // 4 + np.arange(count)]
    return [words(found[..., i]) for i in range(count)]


class Written(Stretch):
    """The same, to be written."""

    def __init__(self, address: int, count: int, typestr: str) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (count,), "typestr": typestr, "version": 3}


def stored(p: tl.tensor, bits: tl.tensor, live: tl.tensor, size: int) -> None:
    """The lower `size` bytes of every register, at its address, where live."""
    shape = np.broadcast_shapes(*(array(each).shape for each in (p, bits, live)))
    addresses, values, lives = (np.broadcast_to(array(each), shape) for each in (p, bits, live))
    wanted = addresses[lives != 0].astype(np.int64)
    if wanted.size:
        first = int(wanted.min())
        every = np.asarray(Written(first, (int(wanted.max()) - first) // size + 1, f"<u{size}"))
        every[(wanted - first) // size] = values[lives != 0].astype(f"<u{size}")


def store_word(p: tl.tensor, bits: tl.tensor, live: tl.tensor) -> None:
    stored(p, bits, live, 4)


def store_half(p: tl.tensor, bits: tl.tensor, live: tl.tensor) -> None:
    stored(p, bits, live, 2)


def load_four(p: tl.tensor, live: tl.tensor) -> tuple[tl.tensor, ...]:
    return tuple(memory(array(p), 4, np.broadcast_to(array(live), array(p).shape)))


def ask_for(p: tl.tensor, live: tl.tensor) -> None:
    """Nothing that could be seen."""


def bring(p: tl.tensor, nbytes: int, live: tl.tensor) -> None:
    """Nothing that could be seen."""


def nothing() -> None:
    """Launches follow one another here: none waits."""


def hold(address: tl.tensor) -> tl.tensor:
    return address


def load_two(address: tl.tensor) -> tuple[tl.tensor, ...]:
    return tuple(memory(array(address), 2, np.ones(array(address).shape)))


def load_piece(address: tl.tensor) -> tuple[tl.tensor, ...]:
    return tuple(memory(array(address), 4, np.ones(array(address).shape)))


def load_quad(address: tl.tensor) -> tuple[tl.tensor, ...]:
    return tuple(registers(array(word).view(np.float32), tl.float32) for word in load_piece(address))


def load_sums(address: tl.tensor) -> tuple[tl.tensor, ...]:
    return tuple(registers(array(word).view(np.float32), tl.float32) for word in load_two(address))


def load_scales(p: tl.tensor) -> tuple[tl.tensor, ...]:
    return load_two(p)


def load_one(p: tl.tensor) -> tl.tensor:
    return memory(array(p), 1, np.ones(array(p).shape))[0]


def load_pair(p: tl.tensor, live: tl.tensor) -> tuple[tl.tensor, ...]:
    return tuple(memory(array(p), 2, np.broadcast_to(array(live), array(p).shape)))


def load_or_nought(p: tl.tensor, live: tl.tensor) -> tl.tensor:
    lives = np.broadcast_to(array(live), array(p).shape)
    return words(np.where(lives != 0, array(memory(array(p), 1, lives)[0]), 0))


def lifted_nibbles(word: tl.tensor) -> tuple[tl.tensor, ...]:
    bits = array(word).view(np.uint32)
    return tuple(words(bits >> 4 * f & 0x000F000F | 0x43004300) for f in range(4))


def with_bits(pair: tl.tensor, bits: tl.tensor, mask: int) -> tl.tensor:
    return words(array(pair).view(np.uint32) | array(bits).view(np.uint32) & np.uint32(mask))


def nearest(values: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16, to the nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def in_two_parts(low: tl.tensor, high: tl.tensor) -> tuple[tl.tensor, ...]:
    first, second = (nearest(array(each)) for each in (low, high))
    rest, rest2 = nearest(array(low) - first), nearest(array(high) - second)
    pairs = (first, second), (rest, rest2)
    return tuple(words(lower.view(np.uint32) >> 16 | upper.view(np.uint32)) for lower, upper in pairs)


def lowered(pair: tl.tensor) -> tl.tensor:
    low, high = (half - np.float32(160) for half in halves(array(pair).view(np.uint32)))
    return words(low.view(np.uint32) >> 16 | high.view(np.uint32) & 0xFFFF0000)


def bfloat16_pair(low: np.ndarray, high: np.ndarray) -> tl.tensor:
    """Two numbers that bfloat16 has, in a register."""
    low, high = (half.astype(np.float32).view(np.uint32) for half in (low, high))
    assert not (low & 0xFFFF).any() and not (high & 0xFFFF).any(), "bfloat16 has no such number"
    return words(low >> 16 | high)


def small_bytes(word: tl.tensor, k: int) -> tl.tensor:
    bits = array(word).view(np.uint32)
    low, high = (bits >> 8 * int(k) & 255, bits >> 8 * int(k) + 16 & 255)
    return bfloat16_pair(low % 128, high % 128)  # more is of no use: not live


def signed_bytes(word: tl.tensor, half: tl.tensor) -> tl.tensor:
    bits = array(word).view(np.uint32) >> 16 * array(half).astype(np.uint32)
    low, high = (((bits >> shift & 255) ^ 128).astype(np.int64) - 128 for shift in (0, 8))
    return bfloat16_pair(low, high)


def byte_as_float(word: tl.tensor, k: int) -> tl.tensor:
    return registers((32768 + (array(word).view(np.uint32) >> 8 * int(k) & 255)).astype(np.float32), tl.float32)


def pairs(register: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The two bfloat16 numbers of a register, the low half first, as float32 [N_TILES, warps, 8, 4]."""
    bits = np.broadcast_to(array(register).astype(np.int64).astype(np.uint32), shape).reshape(shape[0], -1, 8, 4)
    return halves(bits)


def halves(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return (bits << 16).view(np.float32), (bits & 0xFFFF0000).view(np.float32)


def product(*operands: Any) -> tuple[tl.tensor, ...]:
    """mma.m16n8k16: a [16, 16] rows, b [16, 8] columns, c [16, 8], each spread over a warp as the PTX manual has it."""
    b_shape = array(operands[4]).shape
    a0, a1, a2, a3, b0, b1 = (pairs(register, b_shape) for register in operands[:6])
    c = [np.broadcast_to(array(each), b_shape).reshape(b_shape[0], -1, 8, 4) for each in operands[6:]]
    a = np.zeros((*c[0].shape[:2], 16, 16))
    b = np.zeros((*c[0].shape[:2], 16, 8))
    for h in range(2):
        a[..., :8, h:8:2], a[..., 8:, h:8:2] = a0[h], a1[h]
        a[..., :8, 8 + h :: 2], a[..., 8:, 8 + h :: 2] = a2[h], a3[h]
        b[..., h:8:2, :], b[..., 8 + h :: 2, :] = b0[h].swapaxes(-1, -2), b1[h].swapaxes(-1, -2)
    y = a @ b
    parts = y[..., :8, 0::2], y[..., :8, 1::2], y[..., 8:, 0::2], y[..., 8:, 1::2]
    sums = [(part + each).astype(np.float32).reshape(b_shape) for part, each in zip(parts, c, strict=True)]
    return tuple(registers(each, tl.float32) for each in sums)


def lay_out(monkeypatch: pytest.MonkeyPatch, *users: Any) -> None:
    """Replace the instructions of `ptx` where they are used."""
    here = {
        "bring": bring,
        "gdc_wait": nothing,
        "gdc_launch_dependents": nothing,
        "load_four": load_four,
        "ask_for": ask_for,
        "hold": hold,
        "load_two": load_two,
        "load_piece": load_piece,
        "load_quad": load_quad,
        "load_sums": load_sums,
        "load_scales": load_scales,
        "load_one": load_one,
        "load_codes": load_four,
        "load_eight_scales": load_four,
        "load_pair": load_pair,
        "load_or_nought": load_or_nought,
        "store_word": store_word,
        "store_half": store_half,
        "lifted_nibbles": lifted_nibbles,
        "with_bits": with_bits,
        "in_two_parts": in_two_parts,
        "lowered": lowered,
        "small_bytes": small_bytes,
        "signed_bytes": signed_bytes,
        "byte_as_float": byte_as_float,
        "mma": product,
    }
    for module in (ptx, mma, mma_row, gemv, *users):
        for name, function in here.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, function)

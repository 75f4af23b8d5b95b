"""The expert kernels for NVIDIA's integer tensor cores, with their instructions laid out on paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from support.expert_stacks import matrix, stack
from support.matrices import drawn, error
from support.paper_units import array, lay_out, load_one, load_piece, memory, registers
from torch import Tensor

from rekindle.kernels.matmul import mma
from rekindle.kernels.moe import integers, naive, tensor_core
from rekindle.kernels.moe import triton as fast
from rekindle.kernels.moe.types import SharedExpert

EXPERTS, HIDDEN, WIDTH = 3, 256, 256
BF16 = torch.bfloat16


def load_long(address: tl.tensor) -> tl.tensor:
    both = memory(array(address), 2, np.ones(array(address).shape))
    lower, upper = (array(word).view(np.uint32).astype(np.uint64) for word in both)
    return registers((upper << np.uint64(32) | lower).view(np.int64), tl.int64)


def bytes_of(register: Any, shape: tuple[int, ...], type: type[np.integer[Any]]) -> np.ndarray:
    """The four bytes of a register, the lowest first: int64 [PAIRS, warps, 8, 4, 4]."""
    bits = np.ascontiguousarray(np.broadcast_to(array(register), shape)).view(np.uint32)
    return bits.reshape(shape[0], -1, 8, 4, 1).view(type).astype(np.int64)


def integer_product(*operands: Any) -> tuple[tl.tensor, ...]:
    """mma.m16n8k32 for bytes: a [16, 32] rows, b [32, 8] columns, c [16, 8], spread as the PTX manual has it."""
    shape = array(operands[4]).shape
    a0, a1, a2, a3 = (bytes_of(register, shape, np.uint8) for register in operands[:4])
    b0, b1 = (bytes_of(register, shape, np.int8) for register in operands[4:6])
    c = [np.broadcast_to(array(each), shape).reshape(shape[0], -1, 8, 4) for each in operands[6:]]
    flat = (*c[0].shape[:2], 8, 16)
    a = np.concatenate([np.concatenate([x.reshape(flat) for x in half], -1) for half in ((a0, a2), (a1, a3))], -2)
    b = np.concatenate([b0.reshape(flat), b1.reshape(flat)], -1).swapaxes(-1, -2)
    y = a @ b
    parts = y[..., :8, 0::2], y[..., :8, 1::2], y[..., 8:, 0::2], y[..., 8:, 1::2]
    sums = [(part + each).astype(np.int32).reshape(shape) for part, each in zip(parts, c, strict=True)]
    return tuple(registers(each, tl.int32) for each in sums)


@pytest.fixture(autouse=True)
def _paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma, "available", lambda x: x.dtype == BF16)
    lay_out(monkeypatch, tensor_core, integers)
    for name, function in {
        "load_codes": load_piece,
        "load_entry": load_piece,
        "load_fixed": load_one,
        "load_long": load_long,
        "load_scales": load_piece,
        "integer_mma": integer_product,
    }.items():
        monkeypatch.setattr(integers, name, function)


class Layer:
    def __init__(self, up_type: str, down_type: str) -> None:
        self.gate, gate = stack(up_type, EXPERTS, WIDTH, HIDDEN, 1)
        self.up, up = stack(up_type, EXPERTS, WIDTH, HIDDEN, 2)
        self.down, down = stack(down_type, EXPERTS, HIDDEN, WIDTH, 3)
        s_gate, s_gate_values = matrix("Q6_K", WIDTH, HIDDEN, 4)
        s_up, s_up_values = matrix("Q6_K", WIDTH, HIDDEN, 5)
        s_down, s_down_values = matrix("Q4_K", HIDDEN, WIDTH, 6)
        self.shared = SharedExpert(s_gate, s_up, s_down, drawn(HIDDEN) / HIDDEN**0.5)
        self.values = gate, up, down
        self.shared_values = s_gate_values, s_up_values, s_down_values, self.shared.scale


def shares_of(layer: Layer, h: Tensor, ids: Tensor, weights: Tensor, shared: integers.Three | None) -> Tensor:
    planes = layer.gate.planes, layer.up.planes, layer.down.planes
    return integers.run_experts(h, ids, weights, *planes, EXPERTS, shared)


@pytest.mark.parametrize(("up_type", "down_type"), [("Q4_K", "Q6_K"), ("Q5_K", "Q4_K")])
def test_shares_agree_with_the_definition(up_type: str, down_type: str) -> None:
    """One expert has five pairs, more than pass at a time, one has one and one has none."""
    layer = Layer(up_type, down_type)
    h = drawn(3, HIDDEN).to(BF16)
    ids = torch.tensor([[2, 0], [2, 2], [2, 2]], dtype=torch.int32)
    weights = torch.tensor([[0.25, 0.75], [0.5, 1.5], [1.0, 2.0]])
    shares = shares_of(layer, h, ids, weights, None)
    assert error(shares.view(3, 2, HIDDEN).sum(1), naive.moe(h, ids, weights, *layer.values)) < 2e-4


def test_the_shared_expert_runs_beside_the_others() -> None:
    layer = Layer("Q4_K", "Q4_K")
    h = drawn(5, HIDDEN).to(BF16)  # more rows than pass at a time
    gate, up, down = (part.packed for part in (layer.shared.gate, layer.shared.up, layer.shared.down))
    assert gate is not None and up is not None and down is not None
    ids, weights = torch.zeros(5, 1, dtype=torch.int32), torch.ones(5, 1)
    shares = shares_of(layer, h, ids, weights, (gate, up, down))
    assert error(shares[:5], naive.moe(h, ids, weights, *layer.values)) < 2e-4
    part = torch.sigmoid(h.float() @ layer.shared.scale.float())[:, None]
    assert error(part * shares[5:], naive.shared_expert(h, *layer.shared_values)) < 2e-4


def test_values_come_back_from_whole_ones() -> None:
    x = drawn(2, 512)
    x[0, :32] = 0
    x[1, 40] = 1e4
    values, entries = integers.prepare(x, torch.zeros(2, 1, dtype=torch.int32), 1)[0]
    upper, lower = values.long().unbind(2)
    factor, total = (entries[..., i : i + 1].contiguous().view(torch.float32) for i in (0, 1))
    n = torch.arange(32)
    place = 8 * (n % 16 // 4) + 4 * (n // 2 % 2) + 2 * (n % 2) + n // 16
    v = (256 * upper + lower)[..., place]
    blocks = x.view(2, 16, 32)
    assert bool(((v * factor - blocks).abs() <= 0.51 * factor).all())
    assert torch.equal(v.abs().amax(-1), torch.where(blocks.abs().amax(-1) > 0, 32512, 0))
    assert torch.allclose(total[..., 0], -(v * factor).sum(-1), rtol=1e-5, atol=1e-4)
    assert torch.equal(entries[..., 2:], torch.stack((v[..., :16].sum(-1), v[..., 16:].sum(-1)), -1).int() * -32)


def test_every_pair_is_in_one_tile_of_its_expert() -> None:
    ids = torch.tensor([[2, 0, 5], [2, 5, 4], [2, 5, 0], [5, 2, 1]], dtype=torch.int32)
    _, order, tiles = integers.prepare(drawn(4, 256), ids, 6)
    flat = ids.flatten().tolist()
    assert order.tolist() == sorted(range(12), key=lambda pair: (flat[pair], pair))
    # expert 0 has two pairs, 1 one, 2 four, 3 none, 4 one, 5 four
    assert tiles.tolist() == [2, 0, 4 + 1, 8 + 2, 0, 8 + 2, 0, 16 + 1, 20 + 2, 0, 20 + 2, 0]


def test_rows_between_pairs_and_groups_take_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer("Q4_K", "Q4_K")
    taken = []
    ways = {
        "pairs": (tensor_core, "by_pair"),
        "integers": (fast, "by_integers"),
        "groups": (fast, "by_group_along_outputs"),
    }
    for name, (module, function) in ways.items():
        monkeypatch.setattr(module, function, lambda *_, name=name: taken.append(name))
    for rows in (8, 9, 32, 33):
        h, ids, weights = drawn(rows, HIDDEN).to(BF16), torch.zeros(rows, 1, dtype=torch.int32), torch.ones(rows, 1)
        fast.moe(h, ids, weights, layer.gate, layer.up, layer.down)
    assert taken == ["pairs", "integers", "integers", "groups"]

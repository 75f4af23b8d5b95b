"""The expert kernels whose warps stand along the outputs, with NVIDIA's instructions laid out on paper."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.expert_stacks import matrix, stack
from support.matrices import drawn, error
from support.paper_units import lay_out
from torch import Tensor

from rekindle.kernels.matmul import fragments, mma, skinny, stream_k, tensor_core
from rekindle.kernels.moe import along_outputs, naive
from rekindle.kernels.moe import triton as fast
from rekindle.kernels.moe.along_outputs import AlongConfig
from rekindle.kernels.moe.types import SharedExpert

EXPERTS, HIDDEN, WIDTH = 3, 512, 256  # two turns of columns for gate and up, one for down
BF16 = torch.bfloat16
BOUND = 8e-3  # what lies between the products is in bfloat16


@pytest.fixture(autouse=True)
def _paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instructions on paper, and what is allocated holds no numbers until it is written."""
    monkeypatch.setattr(mma, "available", lambda x: x.dtype == BF16)
    lay_out(monkeypatch, fragments, skinny, stream_k, tensor_core, along_outputs)
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))


def _poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: object, **kwargs: object) -> Tensor:
        values = make(*args, **kwargs)
        return values.fill_(float("nan")) if values.is_floating_point() else values

    return made


class Layer:
    def __init__(self, up_type: str, down_type: str) -> None:
        self.gate, gate = stack(up_type, EXPERTS, WIDTH, HIDDEN, 1)
        self.up, up = stack(up_type, EXPERTS, WIDTH, HIDDEN, 2)
        self.down, down = stack(down_type, EXPERTS, HIDDEN, WIDTH, 3)
        s_gate, s_gate_values = matrix(up_type, WIDTH, HIDDEN, 4)
        s_up, s_up_values = matrix(up_type, WIDTH, HIDDEN, 5)
        s_down, s_down_values = matrix(down_type, HIDDEN, WIDTH, 6)
        self.shared = SharedExpert(s_gate, s_up, s_down, drawn(HIDDEN) / HIDDEN**0.5)
        self.values = gate, up, down
        self.shared_values = s_gate_values, s_up_values, s_down_values, self.shared.scale

    def run(self, h: Tensor, ids: Tensor, weights: Tensor, shared: bool, config: AlongConfig) -> Tensor:
        beside = self.shared if shared else None
        return fast.by_group_along_outputs(h, ids, weights, self.gate, self.up, self.down, beside, config)

    def expected(self, h: Tensor, ids: Tensor, weights: Tensor, shared: bool) -> Tensor:
        routed = naive.moe(h, ids, weights, *self.values)
        return routed + naive.shared_expert(h, *self.shared_values) if shared else routed


def uneven(rows: int) -> tuple[Tensor, Tensor]:
    """Both choices of every row but the first fall on the last expert, one on the first, none on the other."""
    ids = torch.full((rows, 2), EXPERTS - 1, dtype=torch.int32)
    ids[0, 1] = 0
    return ids, drawn(rows, 2).abs() + 0.1


@pytest.mark.parametrize(
    ("up_type", "down_type", "rows", "shared", "config"),
    [
        ("Q4_K", "Q4_K", 3, True, AlongConfig(4, 1, 1, 1, 128, 128)),
        ("Q4_K", "Q6_K", 7, False, AlongConfig(4, 2, 2, 2, 168, 128)),
        ("Q5_K", "Q5_K", 11, True, AlongConfig(4, 1, 2, 1, 128, 128)),
        ("Q6_K", "Q4_K", 20, False, AlongConfig(8, 2, 4, 1, 168, 168)),
        ("Q4_K", "Q6_K", 37, False, AlongConfig(4, 1, 8, 2, 255, 255)),
    ],
)
def test_experts_agree_with_the_definition(
    up_type: str, down_type: str, rows: int, shared: bool, config: AlongConfig
) -> None:
    layer, h = Layer(up_type, down_type), drawn(rows, HIDDEN).to(BF16)
    ids, weights = uneven(rows)
    out = layer.run(h, ids, weights, shared, config)
    assert error(out, layer.expected(h, ids, weights, shared)) < BOUND


def test_a_shared_expert_of_other_types_runs_apart() -> None:
    layer, h = Layer("Q4_K", "Q4_K"), drawn(2, HIDDEN).to(BF16)
    other, other_values = matrix("Q6_K", HIDDEN, WIDTH, 6)
    layer.shared = SharedExpert(layer.shared.gate, layer.shared.up, other, layer.shared.scale)
    layer.shared_values = *layer.shared_values[:2], other_values, layer.shared.scale
    ids, weights = uneven(2)
    config = AlongConfig(4, 1, 1, 1, 128, 128)
    assert fast._alike(h, layer.shared, layer.gate, layer.up, layer.down) is None
    assert error(layer.run(h, ids, weights, True, config), layer.expected(h, ids, weights, True)) < BOUND


def test_x_is_laid_out_by_threads_and_summed_by_blocks() -> None:
    h = drawn(3, 2304).to(BF16)  # blocks that fill no whole number of programs
    ids = torch.tensor([[2], [0], [2]], dtype=torch.int32)
    values, sums, order, starts = along_outputs.prepare(h, ids, 3)
    blocks = h.view(-1, 2, 4, 4)  # s, t, k
    assert torch.equal(values.view(-1, 4, 2, 4), blocks.transpose(1, 2))
    both = sums.float().view(-1, 2, 2).sum(1).flatten()  # what is nearest, and what is nearest to the rest
    assert torch.allclose(both, -128 * h.float().view(-1, 32).sum(1), rtol=2**-14, atol=1e-3)
    assert order.tolist() == [1, 0, 2] and starts.tolist() == [0, 1, 1, 3]

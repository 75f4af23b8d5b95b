"""The expert kernels whose programs are all on the card at once, with their instructions laid out on paper."""

from __future__ import annotations

import pytest
import torch
from support.expert_stacks import matrix, stack
from support.matrices import drawn, error
from support.paper_units import lay_out, lay_out_integers
from torch import Tensor

from rekindle.kernels.matmul.types import Packed
from rekindle.kernels.moe import naive, resident
from rekindle.kernels.moe.resident import ResidentConfig, resident_config

EXPERTS, HIDDEN, WIDTH = 4, 512, 256
BF16 = torch.bfloat16
FORMS = [
    ResidentConfig(4, 4, 2, twos=True),  # of narrow rows fewer warps across
    ResidentConfig(4, 1, 4, twos=False),
    resident_config(8),
]


@pytest.fixture(autouse=True)
def _paper(monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out(monkeypatch, resident)
    lay_out_integers(monkeypatch)


class Layer:
    def __init__(self, up_type: str, down_type: str) -> None:
        self.gate, gate = stack(up_type, EXPERTS, WIDTH, HIDDEN, 1)
        self.up, up = stack(up_type, EXPERTS, WIDTH, HIDDEN, 2)
        self.down, down = stack(down_type, EXPERTS, HIDDEN, WIDTH, 3)
        s_gate, s_gate_values = matrix("Q6_K", WIDTH, HIDDEN, 4)
        s_up, s_up_values = matrix("Q6_K", WIDTH, HIDDEN, 5)
        s_down, s_down_values = matrix("Q4_K", HIDDEN, WIDTH, 6)
        self.scale = drawn(HIDDEN) / HIDDEN**0.5
        self.shared = *(_planes_of(part.packed) for part in (s_gate, s_up, s_down)), self.scale
        self.values = gate, up, down
        self.shared_values = s_gate_values, s_up_values, s_down_values, self.scale


def _planes_of(packed: Packed | None) -> Packed:
    assert packed is not None, "these types have planes"
    return packed


def run(layer: Layer, form: ResidentConfig, rows: tuple[Tensor, ...], shared: object) -> Tensor:
    planes = layer.gate.planes, layer.up.planes, layer.down.planes
    return resident.run(*rows, *planes, WIDTH, shared, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("up_type", "down_type"), [("Q4_K", "Q6_K"), ("Q5_K", "Q4_K")])
def test_rows_agree_with_the_definition(form: ResidentConfig, up_type: str, down_type: str) -> None:
    """One expert has three pairs, one two, one one and one none; the rows are odd, too."""
    layer = Layer(up_type, down_type)
    h = drawn(3, HIDDEN).to(BF16)
    ids = torch.tensor([[3, 0], [1, 3], [3, 1]], dtype=torch.int32)
    weights = torch.tensor([[0.25, 0.75], [0.5, 1.5], [1.0, 2.0]])
    out = run(layer, form, (h, ids, weights), layer.shared)
    expected = naive.moe(h, ids, weights, *layer.values) + naive.shared_expert(h, *layer.shared_values)
    assert error(out, expected) < 8e-3  # in bfloat16, and so may be what lies between the products


@pytest.mark.parametrize("form", FORMS)
def test_no_shared_expert(form: ResidentConfig) -> None:
    layer = Layer("Q4_K", "Q4_K")
    h = drawn(2, HIDDEN).to(BF16)
    ids, weights = torch.tensor([[2, 1, 0], [0, 3, 2]], dtype=torch.int32), drawn(2, 3).abs()
    out = run(layer, form, (h, ids, weights), None)
    assert error(out, naive.moe(h, ids, weights, *layer.values)) < 8e-3


def test_pairs_of_an_expert_far_apart() -> None:
    """More of them than are looked at together."""
    layer = Layer("Q4_K", "Q4_K")
    h = drawn(20, HIDDEN).to(BF16)
    ids = torch.tensor([[row % 2, 2 + row % 2, 1 - row % 2, 3 - row % 2] for row in range(20)], dtype=torch.int32)
    weights = drawn(20, 4).abs()
    out = run(layer, resident_config(8), (h, ids, weights), None)
    assert error(out, naive.moe(h, ids, weights, *layer.values)) < 8e-3

"""Routed experts against their definition: by pair, by group, expanded, and on the CPU."""

from __future__ import annotations

import functools

import pytest
import torch
from support.expert_stacks import matrix, random_rows, stack, values_of
from support.matrices import drawn, error
from torch import Tensor

from rekindle.kernels import moe as kernels
from rekindle.kernels.matmul.expand import ExpandConfig
from rekindle.kernels.matmul.types import Matrix
from rekindle.kernels.moe import groups, naive, pairs
from rekindle.kernels.moe import router as fast_router
from rekindle.kernels.moe import triton as fast
from rekindle.kernels.moe.grouping import group
from rekindle.kernels.moe.types import ExpertStack, SharedExpert

CPU = torch.device("cpu")
EXPERTS, HIDDEN, WIDTH, USED = 6, 256, 32, 3  # small: the interpreter takes milliseconds for every program


class Layer:
    """Packed experts with a shared one, and what they should give."""

    def __init__(self, gate: str = "Q4_K", up: str = "Q4_K", down: str = "Q8_0", shared: str = "Q4_0") -> None:
        self.gate, self.gate_values = stack(gate, EXPERTS, WIDTH, HIDDEN, 1)
        self.up, self.up_values = stack(up, EXPERTS, WIDTH, HIDDEN, 2)
        self.down, self.down_values = stack(down, EXPERTS, HIDDEN, WIDTH, 3)
        s_gate, s_gate_values = matrix(shared, WIDTH, HIDDEN, 4)
        s_up, s_up_values = matrix(shared, WIDTH, HIDDEN, 5)
        s_down, s_down_values = matrix(shared, HIDDEN, WIDTH, 6)
        self.shared = SharedExpert(s_gate, s_up, s_down, drawn(HIDDEN) / HIDDEN**0.5)
        self.shared_values = s_gate_values, s_up_values, s_down_values, self.shared.scale

    def routed(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return naive.moe(h, ids, weights, self.gate_values, self.up_values, self.down_values)

    def expected(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.routed(h, ids, weights) + naive.shared_expert(h, *self.shared_values)


@pytest.fixture(autouse=True)
def _wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are expanded by few programs."""
    monkeypatch.setattr(groups, "expand", functools.partial(groups.expand, config=ExpandConfig(64, 8, 4)))


@pytest.fixture(scope="module", name="layer")
def _layer() -> Layer:
    return Layer()


def chosen(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    h = drawn(rows, HIDDEN)
    return h, *naive.route(h, drawn(EXPERTS, HIDDEN) / HIDDEN**0.5, USED)


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("experts", [6, 64, 100])
def test_route_chooses_as_the_definition_does(rows: int, experts: int) -> None:
    h, router = drawn(rows, 96), drawn(experts, 96)
    ids, weights = fast_router.route(h, router, 4)
    expected_ids, expected_weights = naive.route(h, router, 4)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights)


def test_of_equal_experts_the_lowest_is_chosen() -> None:
    h, router = torch.ones(2, 32), torch.ones(10, 32)  # whole numbers: equal to the last bit
    for route in (fast_router.route, naive.route):
        ids, weights = route(h, router, 3)
        assert ids.tolist() == [[0, 1, 2]] * 2
        torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


def test_weights_sum_to_one_and_a_tiny_sum_is_not_blown_up() -> None:
    _, weights = naive.route(drawn(5, 32), drawn(10, 32), 3)
    torch.testing.assert_close(weights.sum(1), torch.ones(5))
    h, router = (
        torch.ones(1, 1),
        torch.zeros(40_000, 1),
    )  # every chance is 2.5e-5: two of them sum to less than the least
    _, weights = naive.route(h, router, 2)
    torch.testing.assert_close(weights, torch.full((1, 2), 2.5e-5 / naive.LEAST_SUM))


@pytest.mark.parametrize("rows", [1, 3])
def test_pairs_agree_with_the_definition(layer: Layer, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if rows > 1:
        monkeypatch.setattr(pairs, "UP_PAIRS", pairs.PairConfig(16, 1))
        monkeypatch.setattr(pairs, "DOWN_PAIRS", pairs.PairConfig(64, 1))
    h, ids, weights = chosen(rows)
    out = fast.moe(h, ids, weights, layer.gate, layer.up, layer.down, layer.shared)
    assert error(out, layer.expected(h, ids, weights)) < 3e-6


def test_pairs_without_a_shared_expert(layer: Layer) -> None:
    h, ids, weights = chosen(1)
    out = fast.moe(h, ids, weights, layer.gate, layer.up, layer.down, None)
    assert error(out, layer.routed(h, ids, weights)) < 3e-6


@pytest.mark.parametrize(("rows", "expanding"), [(1, False), (8, False), (17, False), (3, True), (40, True)])
def test_groups_agree_with_the_definition(layer: Layer, rows: int, expanding: bool) -> None:
    h, ids, weights = chosen(rows)
    out = fast.by_group(h, ids, weights, layer.gate, layer.up, layer.down, layer.shared, expanding)
    assert error(out, layer.expected(h, ids, weights)) < 3e-6


def test_experts_are_expanded_some_at_a_time(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "SCRATCH", 4 * HIDDEN * WIDTH)  # two experts of gate and up, four of down
    h, ids, weights = chosen(9)
    out = fast.by_group(h, ids, weights, layer.gate, layer.up, layer.down, None, expanding=True)
    assert error(out, layer.routed(h, ids, weights)) < 3e-6


def test_gate_and_up_may_be_of_different_types() -> None:
    layer = Layer(gate="Q4_K", up="Q6_K", down="Q4_0", shared="Q8_0")
    h, ids, weights = chosen(1)
    out = fast.moe(h, ids, weights, layer.gate, layer.up, layer.down, layer.shared)
    assert error(out, layer.expected(h, ids, weights)) < 3e-6


def test_a_layer_may_mix_types_that_have_planes_with_types_that_have_none(layer: Layer) -> None:
    """Say gate and up in Q4_K and down in a type that only values can be made of."""
    experts, rows, columns = layer.down_values.shape
    down = ExpertStack((experts, rows, columns), dense=layer.down_values)
    h, ids, weights = chosen(2)
    assert error(kernels.moe(h, ids, weights, layer.gate, layer.up, down), layer.routed(h, ids, weights)) < 3e-6


def test_groups_list_every_pair_once_in_its_order() -> None:
    ids = torch.tensor([[3, 0], [1, 3], [3, 1]], dtype=torch.int32)  # pairs 0 … 5
    order, starts = group(ids, 5)
    assert order.tolist() == [1, 2, 5, 0, 3, 4]
    assert starts.tolist() == [0, 1, 3, 3, 6, 6]


def test_on_the_cpu_experts_agree_with_the_definition_and_rows_do_not_disturb_each_other(layer: Layer) -> None:
    def dense(values: Tensor) -> ExpertStack:
        experts, rows, columns = values.shape
        return ExpertStack((experts, rows, columns), dense=values)

    stacks = [dense(v) for v in (layer.gate_values, layer.up_values, layer.down_values)]
    gate, up, down, scale = layer.shared_values
    shared = SharedExpert(*(Matrix((v.shape[0], v.shape[1]), dense=v) for v in (gate, up, down)), scale)
    h, ids, weights = chosen(7)
    out = kernels.moe(h, ids, weights, *stacks, shared)
    assert error(out, layer.expected(h, ids, weights)) < 2e-6
    backwards = kernels.moe(h.flip(0), ids.flip(0), weights.flip(0), *stacks, shared).flip(0)
    torch.testing.assert_close(out, backwards, rtol=1e-5, atol=1e-5)


def test_without_kernels_in_c_a_stack_is_expanded_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "can_multiply", lambda: False)
    raw = random_rows("Q4_K", 6, 256, 0)
    made = kernels.make_stack(raw, "Q4_K", (3, 2, 256), CPU, torch.float32)
    assert torch.equal(made.values, values_of(raw, "Q4_K", 3, 2, 256))
    assert made.nbytes == 6 * 256 * 4


@pytest.mark.usefixtures("small_card")
@pytest.mark.parametrize("expanding", [False, True])
def test_the_forms_of_smaller_cards_agree(expanding: bool) -> None:
    layer, h = Layer(), drawn(9, HIDDEN)
    ids, weights = naive.route(h, drawn(EXPERTS, HIDDEN), USED)
    three = layer.gate, layer.up, layer.down
    out = fast.by_group(h, ids, weights, *three, layer.shared, expanding=expanding)
    torch.testing.assert_close(out, layer.expected(h, ids, weights), atol=1e-5, rtol=1e-4)

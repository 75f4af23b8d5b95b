"""Routed experts against their definition: by pair, by group, expanded, and on the CPU."""

from __future__ import annotations

import functools

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from rekindle.kernels import moe as door
from rekindle.kernels.matmul.packing import FORMATS, pack
from rekindle.kernels.matmul.triton import ExpandConfig
from rekindle.kernels.matmul.types import Matrix
from rekindle.kernels.moe import naive
from rekindle.kernels.moe import triton as fast
from rekindle.kernels.moe.types import ExpertStack, SharedExpert

CPU = torch.device("cpu")
EXPERTS, HIDDEN, WIDTH, USED = 6, 256, 32, 3  # small: the interpreter takes milliseconds for every program


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def random_rows(type: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Valid stored rows: any codes and integer scales, small float16 factors."""
    form = FORMATS[type]
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows * columns // form.weights, form.nbytes), dtype=np.uint8)
    for start in {"Q6_K": [208], "Q4_K": [0, 2], "Q5_K": [0, 2]}.get(type, [0]):
        raw[:, start : start + 2] = random.uniform(1e-4, 5e-4, len(raw)).astype(np.float16)[:, None].view(np.uint8)
    return raw.reshape(rows, -1)


def values_of(raw: np.ndarray, type: str, *shape: int) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type])).view(shape)


def stack(type: str, experts: int, rows: int, columns: int, seed: int) -> tuple[ExpertStack, Tensor]:
    raw = random_rows(type, experts * rows, columns, seed)
    packed = pack(torch.from_numpy(raw), type, columns)
    return ExpertStack((experts, rows, columns), packed=packed), values_of(raw, type, experts, rows, columns)


def matrix(type: str, rows: int, columns: int, seed: int) -> tuple[Matrix, Tensor]:
    raw = random_rows(type, rows, columns, seed)
    return Matrix((rows, columns), packed=pack(torch.from_numpy(raw), type, columns)), values_of(
        raw, type, rows, columns
    )


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
    monkeypatch.setattr(fast, "expand", functools.partial(fast.expand, config=ExpandConfig(64, 8, 4)))


@pytest.fixture(scope="module", name="layer")
def _layer() -> Layer:
    return Layer()


def chosen(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    h = drawn(rows, HIDDEN)
    return h, *naive.route(h, drawn(EXPERTS, HIDDEN) / HIDDEN**0.5, USED)


def error(out: Tensor, expected: Tensor) -> float:
    assert out.isfinite().all(), "an element was not written"
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("experts", [6, 64, 100])
def test_route_chooses_as_the_definition_does(rows: int, experts: int) -> None:
    h, router = drawn(rows, 96), drawn(experts, 96)
    ids, weights = fast.route(h, router, 4)
    expected_ids, expected_weights = naive.route(h, router, 4)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights)


def test_of_equal_experts_the_lowest_is_chosen() -> None:
    h, router = torch.ones(2, 32), torch.ones(10, 32)  # whole numbers: equal to the last bit
    for route in (fast.route, naive.route):
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
        monkeypatch.setattr(fast, "UP_PAIRS", fast.PairConfig(16, 1))
        monkeypatch.setattr(fast, "DOWN_PAIRS", fast.PairConfig(64, 1))
    h, ids, weights = chosen(rows)
    out = fast.moe(h, ids, weights, layer.gate, layer.up, layer.down, layer.shared)
    assert error(out, layer.expected(h, ids, weights)) < 3e-6


def test_pairs_without_a_shared_expert_and_with_a_residual(layer: Layer) -> None:
    h, ids, weights = chosen(1)
    residual = drawn(1, HIDDEN, seed=1)
    out = fast.moe(h, ids, weights, layer.gate, layer.up, layer.down, None, residual)
    assert error(out, residual + layer.routed(h, ids, weights)) < 3e-6


@pytest.mark.parametrize(("rows", "expanding"), [(1, False), (8, False), (17, False), (3, True), (40, True)])
def test_groups_agree_with_the_definition(layer: Layer, rows: int, expanding: bool) -> None:
    h, ids, weights = chosen(rows)
    residual = drawn(rows, HIDDEN, seed=1)
    out = fast.by_group(h, ids, weights, layer.gate, layer.up, layer.down, layer.shared, residual, expanding)
    assert error(out, residual + layer.expected(h, ids, weights)) < 3e-6


def test_experts_are_expanded_some_at_a_time(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "SCRATCH", 4 * HIDDEN * WIDTH)  # two experts of gate and up, four of down
    h, ids, weights = chosen(9)
    out = fast.by_group(h, ids, weights, layer.gate, layer.up, layer.down, None, None, expanding=True)
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
    assert error(door.moe(h, ids, weights, layer.gate, layer.up, down), layer.routed(h, ids, weights)) < 3e-6


def test_groups_list_every_pair_once_in_its_order() -> None:
    ids = torch.tensor([[3, 0], [1, 3], [3, 1]], dtype=torch.int32)  # pairs 0 … 5
    order, starts = fast.group(ids, 5)
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
    residual = drawn(7, HIDDEN, seed=1)
    out = door.moe(h, ids, weights, *stacks, shared, residual)
    assert error(out, residual + layer.expected(h, ids, weights)) < 2e-6
    backwards = door.moe(h.flip(0), ids.flip(0), weights.flip(0), *stacks, shared, residual.flip(0)).flip(0)
    torch.testing.assert_close(out, backwards, rtol=1e-5, atol=1e-5)


def test_on_the_cpu_a_stack_is_expanded() -> None:
    raw = random_rows("Q4_K", 6, 256, 0)
    made = door.make_stack(raw, "Q4_K", (3, 2, 256), CPU, torch.float32)
    assert torch.equal(made.values, values_of(raw, "Q4_K", 3, 2, 256))
    assert made.nbytes == 6 * 256 * 4

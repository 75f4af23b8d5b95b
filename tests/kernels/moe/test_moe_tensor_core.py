"""The expert kernels for NVIDIA's tensor cores, with their instructions laid out on paper."""

from __future__ import annotations

import pytest
import torch
from support.expert_stacks import matrix, stack
from support.matrices import drawn, error
from support.paper_units import lay_out
from torch import Tensor

from rekindle.experts.planes import empty_stack, make_parts, zeros_on
from rekindle.kernels.matmul import mma
from rekindle.kernels.moe import naive, tensor_core
from rekindle.kernels.moe import triton as fast
from rekindle.kernels.moe.cold import ColdAnswer, Missing
from rekindle.kernels.moe.types import SharedExpert

EXPERTS, HIDDEN, WIDTH, USED = 2, 256, 256, 1
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma, "available", lambda x: x.dtype == BF16)
    lay_out(monkeypatch, tensor_core)


class Layer:
    def __init__(self) -> None:
        self.gate, gate = stack("Q4_K", EXPERTS, WIDTH, HIDDEN, 1)
        self.up, up = stack("Q4_K", EXPERTS, WIDTH, HIDDEN, 2)
        self.down, down = stack("Q6_K", EXPERTS, HIDDEN, WIDTH, 3)
        s_gate, s_gate_values = matrix("Q6_K", WIDTH, HIDDEN, 4)
        s_up, s_up_values = matrix("Q6_K", WIDTH, HIDDEN, 5)
        s_down, s_down_values = matrix("Q4_K", HIDDEN, WIDTH, 6)
        self.shared = SharedExpert(s_gate, s_up, s_down, drawn(HIDDEN) / HIDDEN**0.5)
        self.values = gate, up, down
        self.shared_values = s_gate_values, s_up_values, s_down_values, self.shared.scale

    def routed(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return naive.moe(h, ids, weights, *self.values)

    def expected(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.routed(h, ids, weights) + naive.shared_expert(h, *self.shared_values)


@pytest.fixture(scope="module", name="layer")
def _layer() -> Layer:
    return Layer()


def chosen(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    h = drawn(rows, HIDDEN).to(BF16)
    return h, *naive.route(h.float(), drawn(EXPERTS, HIDDEN) / HIDDEN**0.5, USED)


def test_pairs_agree_with_the_definition(layer: Layer) -> None:
    h, ids, weights = chosen(1)
    out = fast.moe(h, ids, weights, layer.gate, layer.up, layer.down, layer.shared)
    assert error(out, layer.expected(h, ids, weights)) < 8e-3  # in bfloat16, and so is what lies between the products


def test_pairs_without_a_shared_expert(layer: Layer) -> None:
    h, ids, weights = chosen(2)
    out = fast.moe(h, ids, weights, layer.gate, layer.up, layer.down, None)
    assert error(out, layer.routed(h, ids, weights)) < 8e-3


def test_a_missing_expert_is_brought_and_multiplied_in_the_same_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_core, "when_stored", lambda base, word: base)  # programs run one after the other here
    full = [stack(type, 4, 256, 256, seed)[0] for seed, type in enumerate(("Q4_K", "Q4_K", "Q6_K"), start=1)]
    cached = [empty_stack(part, 3, zeros_on(torch.device("cpu"))) for part in full]
    parts = make_parts(full, cached, torch.device("cpu"))
    h, weights, experts = drawn(1, 256).to(BF16), torch.tensor([[0.3, 0.7]]), torch.tensor([[3, 1]], dtype=torch.int32)

    def run(slots: Tensor, stacks: list, missing: Missing | None = None) -> Tensor:
        return tensor_core.by_pair(h, slots, weights, *(part.planes for part in stacks), 256, None, missing=missing)

    hot, slots = run(experts, full), torch.tensor([[0, 2]], dtype=torch.int32)
    assert torch.equal(run(slots, cached, Missing(experts, parts)), hot)
    assert torch.equal(run(slots, cached, Missing(torch.full_like(experts, -1), parts)), hot)  # they are there now


def test_what_the_host_computes_is_taken_in_once_and_added_by_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_core, "when_stored", lambda base, word: base)
    full = [stack(type, 4, 256, 256, seed)[0] for seed, type in enumerate(("Q4_K", "Q4_K", "Q6_K"), start=1)]
    parts = make_parts(full, full, torch.device("cpu"))
    h, planes = drawn(1, 256).to(BF16), [part.planes for part in full]
    slots = torch.tensor([[0, 3, 0]], dtype=torch.int32)
    done, lost, theirs = torch.tensor([7], dtype=torch.int32), torch.zeros(1, dtype=torch.int32), drawn(256)
    count, number, gone = (torch.tensor([value], dtype=torch.int32) for value in (2, 7, 0))
    answer = ColdAnswer(count, number, gone, torch.zeros(256), done.data_ptr(), lost.data_ptr(), theirs.data_ptr())

    def run(weights: list[float]) -> Tensor:
        missing = Missing(torch.full_like(slots, -1), parts, answer)
        return tensor_core.by_pair(h, slots, torch.tensor([weights]), *planes, 256, None, missing=missing)

    alone = tensor_core.by_pair(h, slots[:, 1:2], torch.tensor([[0.4]]), *planes, 256, None)
    assert torch.allclose(run([0.0, 0.4, 0.0]).float(), alone + theirs, rtol=0.01, atol=0.01)  # of bfloat16
    count.zero_()  # nobody was asked: what an earlier layer left there is not added
    assert torch.allclose(run([0.0, 0.4, 0.0]), alone, atol=1e-6)
    assert not int(lost)
    count.fill_(1)
    gone.fill_(1)
    assert run([0.0, 0.4, 0.0]).isnan().all()

"""CPU threads that take a share of a step: through the mailbox, asked by the host and by the kernels themselves."""

from __future__ import annotations

import mmap
import re
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from rekindle.errors import CpuExpertsLost
from rekindle.experts import SpanExperts, expert_set, probe, routed
from rekindle.experts import triton as kernels
from rekindle.experts.cost import CostModel
from rekindle.experts.counts import LayerCounter, RoutingCounts
from rekindle.experts.cpu_experts import CpuExperts, LayerCpuExperts
from rekindle.experts.expert_set import ExpertSet, Way
from rekindle.experts.memory import HostMemory
from rekindle.experts.packed import PackedWeights
from rekindle.experts.probe import EvenTimes, best_split, measure_takes, share_out
from rekindle.experts.residency import Residency
from rekindle.experts.stored import StoredExperts, StoredPart
from rekindle.kernels.matmul.naive import packed_values
from rekindle.kernels.matmul.packing import FORMATS, pack
from rekindle.kernels.matmul.types import Matrix
from rekindle.kernels.moe import ExpertStack, SharedExpert, cold, moe, route
from rekindle.kernels.moe.expert_threads import describe

CPU = torch.device("cpu")
EXPERTS, HIDDEN, WIDTH, USED = 6, 512, 256, 2  # whole super-blocks both ways
SHAPES = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
NONE, ALL = [0] * 5, [0, 1, 2, 3, 4]  # of so many missing experts the CPU takes so many
SLOW_LINK = CostModel(pcie=1e-9, host_call=0, host_expert=0, host_pair=0, device_pair=0)


def random_rows(type: str, rows: int, columns: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows * columns // 256, FORMATS[type].nbytes), dtype=np.uint8)
    for start in [208] if type == "Q6_K" else [0, 2]:
        raw[:, start : start + 2] = random.uniform(1e-4, 5e-4, len(raw)).astype(np.float16)[:, None].view(np.uint8)
    return raw.reshape(rows, -1)


def paper_moe(h: Tensor, ids: Tensor, weights: Tensor, *parts: ExpertStack | SharedExpert) -> Tensor:
    """The device's part by definition: in the interpreter the real kernels take minutes for whole super-blocks."""
    dense = [ExpertStack(p.shape, dense=values_of(p)) if isinstance(p, ExpertStack) else p for p in parts]
    return moe(h, ids, weights, *dense)  # type: ignore[arg-type]


def values_of(stack: ExpertStack) -> Tensor:
    return packed_values(stack.planes).view(stack.shape)


class Layer:
    def __init__(self, types: tuple[str, str, str]) -> None:
        self.stored = StoredExperts(
            tuple(  # type: ignore[arg-type]
                StoredPart(random_rows(type, EXPERTS * rows, columns, i), type, (EXPERTS, rows, columns))
                for i, (type, (rows, columns)) in enumerate(zip(types, SHAPES, strict=True))
            )
        )
        parts = self.stored.parts
        self.stacks = [ExpertStack(p.shape, packed=pack(torch.from_numpy(p.raw), p.type, p.shape[2])) for p in parts]
        self.values = [values_of(stack) for stack in self.stacks]
        one = (torch.randn(shape) / 16 for shape in SHAPES)
        gate, up, down = (Matrix(shape, dense=values) for shape, values in zip(SHAPES, one, strict=True))
        self.shared = SharedExpert(gate, up, down, torch.randn(HIDDEN) / 16)
        self.router = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(4)) / 16

    def expected(self, h: Tensor) -> Tensor:
        ids, weights = route(h, self.router, USED)
        return paper_moe(h, ids, weights, *self.stacks, self.shared)

    def share(self, x: Tensor, expert: int) -> Tensor:
        gate, up, down = (values[expert] for values in self.values)
        return down @ (silu(gate @ x) * (up @ x))

    def cold(self, hot: list[int], cache_slots: int) -> tuple[ExpertSet, PackedWeights]:
        residency = Residency(hot, cache_slots, EXPERTS, CPU)
        weights = PackedWeights(self.stored, residency, CPU)
        counter = LayerCounter(RoutingCounts(1, EXPERTS), 0, CPU)
        return ExpertSet(self.router, USED, weights, residency, self.shared, SLOW_LINK, counter), weights


@pytest.fixture(autouse=True)
def _paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_set, "moe", paper_moe)


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer(("Q4_K", "Q4_K", "Q6_K"))


@pytest.fixture(scope="module")
def helper() -> CpuExperts:
    made = CpuExperts.start(rows=2, pairs=4, hidden=HIDDEN, width=WIDTH, device=CPU, threads=2)
    assert made is not None, "there is a C compiler where Triton is"
    return made


def help_out(weights: PackedWeights, helper: CpuExperts, takes: list[int]) -> None:
    helper.takes.copy_(torch.tensor(takes))
    weights.use_cpu_experts(helper)


def drawn(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


def close(have: Tensor, want: Tensor) -> bool:
    """The CPU threads take x and inner values in 16-bit numbers: nearer than the device's bfloat16 gets."""
    return bool((have - want).norm() < 1e-3 * want.norm())


@pytest.mark.parametrize("types", [("Q4_K", "Q4_K", "Q6_K"), ("Q5_K", "Q6_K", "Q4_K"), ("Q6_K", "Q4_K", "Q5_K")])
def test_cpu_threads_give_what_the_definition_gives(
    types: tuple[str, str, str], helper: CpuExperts, ask_cpu_threads: Any
) -> None:
    layer = Layer(types)
    described = describe(layer.stacks)
    assert described is not None
    x = drawn(1, 1)[0]
    for places in ([1], [0, 3, 5], [2, 2, 4, 1]):
        weights = [0.5 - 0.1 * i for i in range(len(places))]
        want = sum(w * layer.share(x, place) for w, place in zip(weights, places, strict=True))
        assert isinstance(want, Tensor)
        assert close(ask_cpu_threads(helper.threads.box, described, x, places, weights), want)
    helper.number.copy_(helper.threads.box.asked)  # the device counts on from there


def test_types_that_cpu_threads_cannot_read_are_named() -> None:
    raw = torch.zeros(32, HIDDEN // 32 * 34, dtype=torch.uint8)
    stack = ExpertStack((1, 32, HIDDEN), packed=pack(raw, "Q8_0", HIDDEN))
    assert describe([stack, stack, stack]) is None


def test_every_request_is_answered_by_itself(layer: Layer, helper: CpuExperts, ask_cpu_threads: Any) -> None:
    """Threads that come late to a request must not touch the next one."""
    described = describe(layer.stacks)
    assert described is not None
    x = drawn(1, 2)[0]
    alone = [ask_cpu_threads(helper.threads.box, described, x, [place], [1.0]) for place in range(EXPERTS)]
    for turn in range(200):
        place = turn * 5 % EXPERTS
        assert torch.equal(ask_cpu_threads(helper.threads.box, described, x, [place], [1.0]), alone[place])
    helper.number.copy_(helper.threads.box.asked)  # the device counts on from there


@pytest.mark.parametrize("takes", [NONE, [0, 0, 1, 1, 2], ALL])
@pytest.mark.parametrize("hot", [[], [1, 4]])
def test_a_step_shared_with_the_cpu_gives_what_all_hot_gives(
    layer: Layer, helper: CpuExperts, takes: list[int], hot: list[int]
) -> None:
    experts, weights = layer.cold(hot, cache_slots=4)
    help_out(weights, helper, takes)
    for seed in range(3):
        h = drawn(2 if seed else 1, seed)
        assert experts.way(len(h)) is Way.CACHE
        assert experts.can_record(len(h))
        assert close(experts.forward(h), layer.expected(h))
        experts.poll(len(h))
        experts.residency.check()
    if takes == ALL:
        assert experts.residency.owner.tolist() == [-1] * 4  # nothing came over the link
        assert int(helper.number) == int(helper.threads.box.done) > 0


def test_a_row_asks_in_the_launch_that_chooses_its_experts(layer: Layer, helper: CpuExperts) -> None:
    """The same slots, tables and requests as with a launch for each, and the same answer."""
    (plain, apart), (fast, together) = (layer.cold([1], cache_slots=3) for _ in range(2))
    for weights in (apart, together):
        help_out(weights, helper, [0, 0, 1, 2, 3])
    assert apart.cpu_experts is not None and together.cpu_experts is not None
    asked = []
    for seed in range(6):
        h = drawn(1, seed)
        ids, weights = route(h, layer.router, USED)
        slots, load = plain.residency.admit(ids, plain.counter.tally, helper.takes)
        away, came = slots < 0, torch.isin(ids, load)
        kept = apart.cpu_experts.ask(h, ids, slots, weights)
        want = torch.zeros(1, HIDDEN)
        apart.cpu_experts.collect(want)
        asked.append(int(helper.count))
        helper.count.fill_(99)  # what an earlier layer left
        found = kernels.route_row(
            h, layer.router, USED, fast.residency, fast.counter.tally, together.places, together.cpu_experts.mailbox
        )
        assert torch.equal(found[0], slots)
        places = torch.where(came, together.places[ids.long()], -1)
        assert torch.equal(found[1], places)
        assert torch.allclose(found[2], kept)
        assert int(helper.count) == asked[-1] == int(away.sum())
        have = torch.zeros(1, HIDDEN)
        together.cpu_experts.collect(have)
        assert torch.allclose(have, want, rtol=1e-4, atol=1e-4)
        for name in ("table", "owner", "used_at", "step"):
            assert torch.equal(getattr(fast.residency, name), getattr(plain.residency, name)), name
    assert {0, 1} <= set(asked)


def test_an_expert_that_changed_places_is_found_by_the_cpu_threads(layer: Layer, helper: CpuExperts) -> None:
    experts, weights = layer.cold([0, 1], cache_slots=2)
    help_out(weights, helper, ALL)
    experts.swap(0, 5)
    experts.swap(1, 3)
    for seed in range(4):
        h = drawn(1, seed)
        assert close(experts.forward(h), layer.expected(h))


def test_the_link_and_the_cpu_are_measured_as_the_device_asks_for_them(
    layer: Layer, helper: CpuExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that knows how much was brought and how much was asked for: the CPU computes three experts in the time in
    which the link brings two, and takes a unit to begin. Of more than are cold it takes the same share."""
    _, weights = layer.cold([0, 1, 2, 3], cache_slots=2)
    help_out(weights, helper, NONE)
    assert weights.cpu_experts is not None
    monkeypatch.setattr(probe, "TURNS", 1)
    brought, asked = 0, 0

    def take_in(load: Tensor) -> None:
        nonlocal brought, asked
        brought, asked = int((load >= 0).sum()), int(helper.count)

    def best(work: Callable[[], object], device: torch.device, repeats: int) -> float:
        work()
        return max(3.0 * brought, 1 + 2.0 * asked if asked else 0)

    monkeypatch.setattr(weights, "take_in_staging", take_in)
    monkeypatch.setattr(probe, "_best", best)
    assert measure_takes(weights, weights.cpu_experts, drawn(1, 0)) == [0, 0, 1, 1, 2]
    assert int(helper.number) == int(helper.threads.box.asked) == int(helper.threads.box.done)


def test_every_load_of_a_model_shares_alike() -> None:
    """Two loads on one H200, µs of 1 to 8 experts. By the quickest of all measured splits the first would have given
    the CPU 3 of 4 and 6 of 8, the second 2 of 2 as well; decode was slower with both, by up to 8 %."""
    first = (47.6, 88, 128.5, 168.8, 209.1, 249.6, 290.2, 330.6), (59, 75.4, 88.9, 106, 122.5, 143.7, 156.4, 177.3)
    second = (48.6, 88.8, 129.4, 169.8, 210.1, 250.8, 291.4, 335.3), (56.4, 69.1, 82.7, 98.5, 109.5, 128.9, 152, 169.7)
    for link, cpu in (first, second):
        assert share_out(EvenTimes.through(link), EvenTimes.through(cpu), 8) == [0, 0, 1, 2, 2, 3, 4, 4, 5]


def test_a_measurement_far_off_and_times_that_fall_change_little() -> None:
    link, cpu = (50, 90, 130, 170, 210, 250, 290, 330), (60, 75, 90, 105, 120, 135, 150, 900)
    line = EvenTimes.through(cpu)
    assert line.of(1) == pytest.approx(60, abs=3) and line.of(7) == pytest.approx(150, abs=3)
    shares = share_out(EvenTimes.through(link), line, 8)
    assert all(0 <= after - before <= 1 for before, after in pairwise(shares)), shares
    falling = EvenTimes.through([50.0, 49.0, 48.0])
    assert falling.each == 0 and falling.of(2) == pytest.approx(49)


def test_a_line_through_even_times_is_those_times() -> None:
    line = EvenTimes.through([5.0, 7.0, 9.0])
    assert [line.of(experts) for experts in (1, 2, 3)] == pytest.approx([5.0, 7.0, 9.0])
    assert EvenTimes.through([5.0]).of(1) == 5.0
    assert EvenTimes(3.0, 2.0).of(0) == 0.0, "nothing is asked for"


def test_one_expert_more_on_the_cpu_must_gain_something() -> None:
    assert best_split([100, 99, 98.5, 98.3]) == 0
    assert best_split([100, 94, 92, 60, 59]) == 3
    assert best_split([100, 120, 90]) == 2


def test_cpu_threads_that_do_not_answer_when_measured_are_not_asked_again(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one vain wait they look quick: nobody waits for them any more."""

    def measure(weights: object, helper: LayerCpuExperts, x: Tensor) -> list[int]:
        helper.stage.lost[0] = 1
        return ALL

    monkeypatch.setattr(routed, "measure_takes", measure)
    plan = SpanExperts([[0], [0]], [4, 4], RoutingCounts(2, EXPERTS))
    for _ in range(2):
        weights = layer.cold([0], 4)[1]
        plan.attach_cpu_experts(weights, USED, WIDTH, drawn(1, 0))
        assert weights.cpu_experts is None


@pytest.mark.parametrize(("takes", "cache_slots"), [([0, 0, 1, 1, 2], 4), (NONE, 4), ([0, 0], 1)])
def test_one_helper_serves_all_layers_of_a_span_or_none_where_it_gains_nothing(
    layer: Layer, monkeypatch: pytest.MonkeyPatch, takes: list[int], cache_slots: int
) -> None:
    asked = []
    monkeypatch.setattr(routed, "measure_takes", lambda *given: asked.append(given) or takes)
    plan = SpanExperts([[0], [0]], [cache_slots, cache_slots], RoutingCounts(2, EXPERTS))
    both = [layer.cold([0], cache_slots)[1] for _ in range(2)]
    for weights in both:
        plan.attach_cpu_experts(weights, USED, WIDTH, drawn(1, 0))
    assert len(asked) == (cache_slots >= USED)
    first, second = (weights.cpu_experts for weights in both)
    if any(takes) and cache_slots >= USED:
        assert first is not None and second is not None
        assert first.stage is second.stage
        assert first.box.rows * USED == first.box.pairs == cache_slots
        assert first.takes.tolist() == takes
    else:
        assert first is None and second is None


def test_layers_that_the_cpu_cannot_read_leave_the_others_to_it(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[PackedWeights]()
    monkeypatch.setattr(routed, "measure_takes", lambda weights, *_: asked.append(weights) or ALL)
    plan = SpanExperts([[0]] * 3, [4] * 3, RoutingCounts(3, EXPERTS))
    unread = Layer(("IQ4_XS", "IQ4_XS", "Q6_K"))
    span = [each.cold([0], 4)[1] for each in (unread, layer, unread, layer)]
    for weights in span:
        plan.attach_cpu_experts(weights, USED, WIDTH, drawn(1, 0))
    assert [weights.cpu_experts is not None for weights in span] == [False, True, False, True]
    assert asked == [span[1]], "measured on the first layer that it can read"


def test_threads_that_do_not_answer_are_an_error_waited_for_once_and_give_nothing_plausible(
    layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = CpuExperts.start(rows=1, pairs=2, hidden=HIDDEN, width=WIDTH, device=CPU, threads=1)
    assert helper is not None, "there is a C compiler where Triton is"
    experts, weights = layer.cold([], cache_slots=2)
    help_out(weights, helper, [0, 1, 2])
    assert weights.cpu_experts is not None
    monkeypatch.setattr(cold, "PATIENCE", 3)
    helper.count.fill_(1)
    helper.number.add_(1)  # nobody was asked
    total = torch.zeros(1, HIDDEN)
    weights.cpu_experts.collect(total)
    assert total.isnan().all()
    monkeypatch.setattr(cold, "PATIENCE", 1 << 40)  # would never end
    asked = int(helper.threads.box.asked)
    for seed in range(2):
        assert experts.forward(drawn(1, seed)).isnan().all()
        with pytest.raises(CpuExpertsLost, match="did not answer; restart"):
            experts.poll(1)
    assert int(helper.threads.box.asked) == asked, "a mailbox that was given up is left alone"


def test_the_mailbox_stays_pinned_as_long_as_the_helper_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[HostMemory]] = []

    class Watched(HostMemory):
        def __init__(self, nbytes: int, device: torch.device) -> None:
            super().__init__(nbytes, device)
            made.append(weakref.ref(self))

    monkeypatch.setattr("rekindle.experts.cpu_experts.HostMemory", Watched)
    helper = CpuExperts.start(1, 8, 256, 256, torch.device("cpu"), threads=1)
    assert helper is not None, "there is a compiler"
    assert made[0]() is not None, "memory that is let go is unpinned, and the device writes to it"


def test_host_memory_may_have_large_pages_and_is_not_handed_to_children() -> None:
    memory = HostMemory(4 << 20, CPU)
    address = memory.take((1,), torch.int32).data_ptr()
    areas = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
    edges = [[int(edge, 16) for edge in area.split(" ", 1)[0].split("-")] for area in areas]
    (area,) = (area for area, (start, stop) in zip(areas, edges, strict=True) if start <= address < stop)
    flags = re.search("VmFlags:(.*)", area)
    assert flags is not None
    assert "sh" not in flags[1].split(), "shared memory gets no large pages"
    assert "dc" in flags[1].split()


def test_a_system_without_large_pages_has_host_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, advice: int, *where: int) -> None:
            if advice == mmap.MADV_HUGEPAGE:
                raise OSError("Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    assert HostMemory(100, CPU).take((4,), torch.int32).shape == (4,)

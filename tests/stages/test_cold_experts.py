"""Where an expert's weights lie never changes an answer: on the CPU in float32 not by one bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.batch import Batch, Segment, Wanted
from rekindle.bench.synth import write_synthetic
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling, Token
from rekindle.experts import ROUND, CostModel, ExpertSet, RoutedFfn, RoutingCounts, SpanExperts, Way
from rekindle.experts.looped import LaneWeights
from rekindle.layers import load_span
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import Prompt
from rekindle.stages import LocalStage, Pipeline
from rekindle.weights import open_weights

LAYERS, EXPERTS, USED = 8, 8, 2  # of the tiny model
BRING = CostModel.same_memory()
ON_HOST = CostModel(pcie=1e-9, host_call=0, host_expert=0, host_pair=0, device_pair=0)  # a link that never arrives


def cold_stage(
    tiny: Any,
    hot: Sequence[Sequence[int]],
    cache_slots: Sequence[int],
    cost: CostModel = BRING,
    keep: int = 0,
    **options: Any,
) -> LocalStage:
    """`options`: of the stage."""
    file = tiny.open()
    plan = SpanExperts(hot, cache_slots, RoutingCounts(LAYERS, EXPERTS), cost, keep)
    model = load_span(file, file.spec.whole, torch.device("cpu"), torch.float32, experts=plan)
    return LocalStage(model, slots=4, kv_type="f32", **{"pages": 64, **options})


def sets_of(stage: LocalStage) -> list[ExpertSet]:
    return [ffn for ffn in stage.model.routed if isinstance(ffn, ExpertSet)]


def tokens_of(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 320, count).tolist())


def logits_of(stage: LocalStage, edges: Sequence[int], swaps: dict[int, tuple[int, int, int]] | None = None) -> Any:
    """The logits of one sequence, cut at `edges`; before edge i, layer l swaps its a-th hot with its b-th cold."""
    tokens = tokens_of(edges[-1])
    stage.open(1)
    rows = []
    for i, (start, stop) in enumerate(zip([0, *edges[:-1]], edges, strict=True)):
        if swaps and i in swaps:
            swap_some(stage, *swaps[i])
        out = stage.forward(Batch((Segment(1, start, tokens[start:stop], Wanted.ALL),)), None)
        assert out.logits is not None
        rows.append(out.logits)
    return torch.cat(rows)


def swap_some(stage: LocalStage, layer: int, goes: int, comes: int) -> None:
    ffn = stage.model.routed[layer]
    if isinstance(ffn, ExpertSet) and ffn.residency.hot:
        cold = [expert for expert in range(EXPERTS) if expert not in ffn.residency.hot]
        ffn.swap(ffn.residency.hot[goes % len(ffn.residency.hot)], cold[comes % len(cold)])


EDGES = (40, 41, 42, 43, 47, 48, 49, 70, 71, 72)


@pytest.fixture(scope="module")
def tiny(make_tiny: Any) -> Any:
    return make_tiny("moe")


@pytest.fixture(scope="module")
def all_hot(tiny: Any) -> torch.Tensor:
    return logits_of(tiny.stage(), EDGES)


@st.composite
def placements(draw: Any) -> tuple[list[list[int]], list[int]]:
    hot = [draw(st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=EXPERTS)) for _ in range(LAYERS)]
    return hot, [draw(st.integers(0, EXPERTS - len(ids))) for ids in hot]


@settings(max_examples=25, deadline=None)
@given(
    placements(),
    st.sampled_from([BRING, ON_HOST]),
    st.integers(0, 2),
    st.dictionaries(st.integers(0, 9), st.tuples(*[st.integers(0, 7)] * 3)),
)
def test_any_placement_any_executor_any_swap_gives_the_bits_of_all_hot(
    tiny: Any, all_hot: torch.Tensor, placed: Any, cost: CostModel, keep: int, swaps: Any
) -> None:
    stage = cold_stage(tiny, *placed, cost, keep)
    assert torch.equal(logits_of(stage, EDGES, swaps), all_hot)
    for experts in sets_of(stage):
        experts._finish_arrival()
        experts.residency.check()


@pytest.mark.parametrize("cost", [BRING, ON_HOST])
def test_quantised_experts_give_the_same_bits_expanded_at_start_or_on_use(tmp_path: Path, cost: CostModel) -> None:
    file = open_weights(write_synthetic(tmp_path / "model.gguf", "tiny-moe"))
    spec = file.spec
    tokens = tokens_of(24)
    logits = []
    for hot, cache_slots in ((range(spec.ffn.experts), 0), ([1], 2), ([], 0)):
        counts = RoutingCounts(spec.layers, spec.ffn.experts)
        plan = SpanExperts([hot] * spec.layers, [cache_slots] * spec.layers, counts, cost)
        model = load_span(file, spec.whole, torch.device("cpu"), torch.float32, experts=plan)
        stage = LocalStage(model, slots=1, pages=4, kv_type="f32")
        stage.open(0)
        for start, stop in ((0, 20), (20, 21), (21, 24)):
            out = stage.forward(Batch((Segment(0, start, tokens[start:stop], Wanted.LAST),)), None)
            logits.append(out.logits)
    assert all(torch.equal(logits[i], logits[i % 3]) for i in range(9))


@pytest.mark.parametrize("cost", [BRING, ON_HOST])
def test_a_slot_holds_the_weights_of_the_expert_the_table_names(tiny: Any, cost: CostModel) -> None:
    stage = cold_stage(tiny, [[1, 5]] * LAYERS, [3] * LAYERS, cost)
    logits_of(stage, EDGES, {3: (0, 0, 0), 5: (2, 1, 3)})
    full = tiny.stage().model.routed
    for have, want in zip(sets_of(stage), full, strict=True):
        have._finish_arrival()
        for expert, slot in enumerate(have.residency.table.tolist()):
            if slot >= 0:
                assert torch.equal(have.weights.stacks[0].lanes.expert(slot).data, want.gate.lanes.expert(expert).data)
                assert torch.equal(have.weights.stacks[2].lanes.expert(slot).data, want.down.lanes.expert(expert).data)
        assert have.residency.table.ge(0).sum() <= have.residency.slots


def test_few_rows_use_the_cache_many_stream_and_a_slow_link_means_the_host(tiny: Any) -> None:
    (first, *_) = sets_of(cold_stage(tiny, [[0]] * LAYERS, [4] * LAYERS))
    assert [first.way(rows) for rows in (1, 2, 3, 64)] == [Way.CACHE, Way.CACHE, Way.STREAM, Way.STREAM]
    (first, *_) = sets_of(cold_stage(tiny, [[0]] * LAYERS, [4] * LAYERS, ON_HOST))
    assert {first.way(rows) for rows in (1, 64)} == {Way.HOST}


def test_all_hot_layers_are_the_plain_ones(tiny: Any) -> None:
    stage = cold_stage(tiny, [range(EXPERTS)] * LAYERS, [0] * LAYERS)
    assert stage.model.all_resident
    assert all(isinstance(ffn, RoutedFfn) for ffn in stage.model.routed)
    assert not sets_of(stage)
    assert all(ffn.counter is None for ffn in stage.model.routed)
    mixed = cold_stage(tiny, [[0, 1]] + [range(EXPERTS)] * (LAYERS - 1), [2] + [0] * (LAYERS - 1))
    assert not mixed.model.all_resident
    assert len(sets_of(mixed)) == 1


def test_the_experts_in_use_become_hot(tiny: Any) -> None:
    """Whatever was placed first, after enough rows the most chosen experts have their slots for good."""
    stage = cold_stage(tiny, [[0, 1, 2]] * LAYERS, [0] * LAYERS)
    tokens = tokens_of(64, seed=5)
    for _ in range(24):
        stage.open(1)
        stage.forward(Batch((Segment(1, 0, tokens, Wanted.LAST),)), None)
    for experts in sets_of(stage):
        counts = experts.counter.row
        cold = [expert for expert in range(EXPERTS) if expert not in experts.residency.hot]
        assert counts.sum() > 0
        assert counts[cold].max() < 1.5 * counts[experts.residency.hot].min() + 4
    assert sum(experts.swaps for experts in sets_of(stage)) > 0


def test_no_step_waits_for_the_swaps_of_all_layers(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take turns, also when a long chunk has brought all their counts up to date at once."""
    stage = cold_stage(tiny, [[0, 1, 2]] * LAYERS, [0] * LAYERS)
    by_step, swap_some_of = list[int](), ExpertSet.swap_some

    def count(experts: ExpertSet) -> None:
        by_step[-1] += 1
        swap_some_of(experts)

    monkeypatch.setattr(ExpertSet, "swap_some", count)
    stage.model.poll_experts(ROUND)  # the tallies are on their way
    for _ in range(4 * ROUND + 1):
        by_step.append(0)
        stage.model.poll_experts(1)
    assert max(by_step) == 1
    assert sum(by_step) == 5 * len(sets_of(stage)), "and every layer has its turn in every round"


def test_a_chunk_waits_for_the_swaps_of_one_layer_and_all_have_their_turn(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every chunk is a round by itself, and those that have waited longest come first."""
    stage = cold_stage(tiny, [[0, 1, 2]] * LAYERS, [0] * LAYERS)
    turns, swap_some_of = list[list[int]](), ExpertSet.swap_some

    def note(experts: ExpertSet) -> None:
        turns[-1].append(sets_of(stage).index(experts))
        swap_some_of(experts)

    monkeypatch.setattr(ExpertSet, "swap_some", note)
    for _ in range(2 + 3 * LAYERS):
        turns.append([])
        stage.model.poll_experts(ROUND)
    assert max(map(len, turns)) == 1
    had = [layer for turn in turns for layer in turn]
    assert sorted(had[:LAYERS]) == list(range(LAYERS)), "none has a second turn before all had one"
    assert {had.count(layer) for layer in range(LAYERS)} <= {len(had) // LAYERS, -(-len(had) // LAYERS)}


def test_a_stage_says_which_way_its_layers_took_and_who_moved(tiny: Any) -> None:
    stage = cold_stage(tiny, [[0, 3]] * LAYERS, [2] * LAYERS)
    logits_of(stage, (40, 41, 42))
    swap_some(stage, 0, 0, 0)
    work = stage.work()
    assert (work["step:eager"], work["step:recorded"]) == (3, 0)
    assert (work["experts:stream"], work["experts:cache"], work["experts:host"]) == (LAYERS, 2 * LAYERS, 0)
    assert work["swaps:"] == sum(experts.swaps for experts in sets_of(stage)) >= 1
    assert {key for key in work if key.startswith("pages:")} == {"pages:out", "pages:in", "pages:away", "pages:skipped"}
    assert Pipeline([stage]).work() == work


def run_again(step: Callable[[], None], warm: Callable[[], None] | None = None) -> Callable[[], None]:
    return step


def test_a_chunk_that_streams_is_recorded_and_has_the_bits_of_an_eager_one_whatever_moved(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that fill their step: 2, which go through the cache, and more, which do not."""
    placed = [[0, 3]] * LAYERS, [4] * LAYERS
    edges, swaps = (64, 66, 98, 130, 132), {1: (0, 0, 0), 2: (3, 1, 2), 3: (5, 0, 4)}
    eager = logits_of(cold_stage(tiny, *placed), edges, swaps)
    monkeypatch.setattr(LaneWeights, "recordable", True)
    begun, begin = list[str](), LaneWeights.begin
    monkeypatch.setattr(LaneWeights, "begin", lambda weights: (begun.append("begun"), begin(weights))[1])
    stage = cold_stage(tiny, *placed, record=run_again, table_width=64)
    assert torch.equal(logits_of(stage, edges, swaps), eager)
    work = stage.work()
    assert (work["step:recorded"], work["step:eager"]) == (5, 0)
    assert (work["experts:stream"], work["experts:cache"]) == (3 * LAYERS, 2 * LAYERS)
    assert len(begun) == 3 * LAYERS, "a layer hears of every forward in which it streams, and of no other"
    on_host = cold_stage(tiny, *placed, ON_HOST, record=run_again, table_width=64)
    logits_of(on_host, edges)
    assert on_host.work()["step:recorded"] == 0


# Through the engine


class Answers:
    def __init__(self, stage: LocalStage, **changes: Any) -> None:
        prefixes = PrefixCache(local_tiers(1 << 26))
        settings_ = EngineSettings(**{"context": 1024, "grid": 64, "queue": 64, **changes})
        self.engine = Engine(Pipeline([stage]), prefixes, settings_).start()

    def ask(self, prompts: Sequence[tuple[int, ...]], sampling: Sampling, on_token: Any = None) -> list[list[int]]:
        import threading

        events: list[list[Event]] = [[] for _ in prompts]
        done = [threading.Event() for _ in prompts]

        def sink(i: int) -> Any:
            def take(event: Event) -> None:
                events[i].append(event)
                if on_token is not None and isinstance(event, Token):
                    on_token(len(events[i]))
                if isinstance(event, Finished | Failed):
                    done[i].set()

            return take

        for i, prompt in enumerate(prompts):
            self.engine.submit(
                Request(f"r{i}", Prompt(prompt), sampling, sink=sink(i), max_tokens=12, stop_tokens=frozenset())
            )
        for i, event in enumerate(done):
            assert event.wait(60), f"request {i} has no end: {events[i][-2:]}"
        assert all(isinstance(log[-1], Finished) for log in events), [log[-1] for log in events]
        return [[event.token for event in log if isinstance(event, Token)] for log in events]


@pytest.mark.parametrize("cost", [BRING, ON_HOST])
@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=0.9, seed=7)])
def test_swaps_in_the_middle_of_a_generation_do_not_change_its_tokens(
    tiny: Any, sampling: Sampling, cost: CostModel
) -> None:
    prompt = tokens_of(90, seed=2)
    plain = Answers(tiny.stage())
    expected = plain.ask([prompt], sampling)
    plain.engine.stop()
    stage = cold_stage(tiny, [[0, 3]] * LAYERS, [2] * LAYERS, cost)
    answers = Answers(stage)
    random = np.random.default_rng(0)

    def swap(_: int) -> None:  # sinks run in the engine's thread, between two steps
        for layer in range(LAYERS):
            swap_some(stage, layer, *random.integers(0, 8, 2).tolist())

    assert answers.ask([prompt], sampling, swap) == expected
    answers.engine.stop()
    assert all(experts.swaps > 5 for experts in sets_of(stage))


def test_a_restored_prefix_runs_only_the_suffix_with_cold_experts(tiny: Any) -> None:
    """The suffix is one batched prefill, not token by token, and says what all-hot says."""
    prompt = tokens_of(120, seed=4)
    stage = cold_stage(tiny, [[0, 3]] * LAYERS, [2] * LAYERS)
    answers = Answers(stage)
    greedy = Sampling(temperature=0)
    first = answers.ask([prompt], greedy)[0]
    rows = []
    run = stage.forward

    def counted(batch: Batch, *rest: Any) -> Any:
        rows.append(batch.rows)
        return run(batch, *rest)

    stage.forward = counted  # type: ignore[method-assign]
    longer = (*prompt, *first[:-1], *tokens_of(30, seed=6))
    second = answers.ask([longer], greedy)[0]
    answers.engine.stop()
    plain = Answers(tiny.stage())
    assert plain.ask([longer], greedy)[0] == second
    plain.engine.stop()
    assert sum(rows) < len(longer)  # a hit
    assert rows[0] > 8


def test_thirty_two_requests_against_a_tiny_pool_and_a_tiny_cache_are_answered(tiny: Any) -> None:
    lengths = np.random.default_rng(3).integers(3, 60, 32)
    lengths[::4] *= 8  # some outgrow the pool by themselves
    prompts = [tokens_of(int(count), seed=100 + i) for i, count in enumerate(lengths)]
    plain = Answers(tiny.stage())
    greedy = Sampling(temperature=0)
    expected = [plain.ask([prompt], greedy)[0] for prompt in prompts]
    plain.engine.stop()
    stage = cold_stage(tiny, [[2]] * LAYERS, [2] * LAYERS, pages=7, host_pages=40)
    answers = Answers(stage)
    assert answers.ask(prompts, greedy) == expected
    work = answers.engine.status().work
    answers.engine.stop()
    assert work["pages:out"] > 0
    assert work["experts:stream"] > 0
    stage.check()
    count = stage.pages()
    assert (count.free, count.used, count.total) == (47, 0, 47)
    for experts in sets_of(stage):
        experts.residency.check()
        free = experts.residency.owner.lt(0).sum().item()
        assert experts.residency.table.ge(0).sum().item() + free == 1 + 2
    assert math.isfinite(sum(experts.counter.row.sum() for experts in sets_of(stage)))

"""A pool smaller than the sequence, in exact mode: the same answers as with all KV on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle.batch import Batch, Segment, Wanted
from rekindle.errors import PoolFull, SnapshotMismatch
from rekindle.layers import paged
from rekindle.pool.page_table import HeldPage, PageTable
from rekindle.snapshots.types import Page
from rekindle.spec import PAGE, Span
from rekindle.stages import LocalStage

TOKENS = np.random.default_rng(7).integers(0, 320, 4 * 1024).tolist()


def feed(stage: LocalStage, slot: int, start: int, stop: int, step: int = 128) -> torch.Tensor:
    """Run TOKENS[start:stop] in segments of `step`; the last row of logits."""
    logits = None
    for at in range(start, stop, step):
        segment = Segment(slot, at, tuple(TOKENS[at : min(at + step, stop)]), Wanted.LAST)
        logits = stage.forward(Batch((segment,)), None).logits
    assert logits is not None
    return logits[-1]


def greedy(stage: LocalStage, slot: int, position: int, logits: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Logits of `count` greedy steps, the given ones first."""
    seen = [logits]
    for at in range(position, position + count):
        token = int(seen[-1].argmax())
        output = stage.forward(Batch((Segment(slot, at, (token,), Wanted.LAST),)), None).logits
        assert output is not None
        seen.append(output[0])
    return seen


@pytest.fixture(params=["dense", "moe"])
def tiny(request: Any, make_tiny: Any) -> Any:
    return make_tiny(request.param)


@pytest.mark.parametrize("kv_type", ["f32", "q8"])
def test_a_pool_of_a_sixteenth_of_the_sequence_gives_the_very_bits_of_full_kv(tiny: Any, kv_type: str) -> None:
    length, places = 2000, 2  # 32 pages in 2 places
    full = tiny.stage(slots=1, pages=64, kv_type=kv_type)
    pooled = tiny.stage(slots=1, pages=places, host_pages=62, kv_type=kv_type)
    runs = [greedy(s, 0, length, feed(s, 0, 0, length), 70) for s in (full, pooled)]
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)
    assert pooled.paging().page_outs >= length // PAGE - places
    assert pooled.paging().away_attended > 70 * 28
    assert pooled.paging().skipped == 0
    pooled.check()


def test_large_chunks_prefill_in_a_small_pool(tiny: Any) -> None:
    full, pooled = tiny.stage(slots=1, pages=64), tiny.stage(slots=1, pages=10, host_pages=60)
    assert torch.equal(feed(full, 0, 0, 1800, step=512), feed(pooled, 0, 0, 1800, step=512))
    with pytest.raises(PoolFull, match="all 10 places"):
        feed(pooled, 0, 1800, 1800 + 1024, step=1024)


def test_a_page_goes_and_comes_back_with_the_same_bytes(tiny: Any) -> None:
    stage = tiny.stage(slots=2, pages=8, host_pages=40)
    feed(stage, 0, 0, 400)
    before = [page.data.clone() for part in stage.capture(0) for page in part.pages]
    feed(stage, 1, 0, 450)  # sends the other's pages away
    assert sum(page.place is None for page in stage._tables[0].pages) >= 6
    stage.close(1)
    feed(stage, 0, 400, 401)  # brings them back
    assert all(page.place is not None for page in stage._tables[0].pages)
    resident = [
        stage.pool.kv[layer][page.place]
        for layer in range(len(stage.pool.kv))
        for page in stage._tables[0].pages[: 400 // PAGE]
    ]
    assert len(before) == len(resident)
    assert all(torch.equal(a, b) for a, b in zip(before, resident, strict=True))
    assert stage.paging().page_ins >= 6


def test_sink_and_tail_stay_even_of_a_sequence_that_ran_long_ago(tiny: Any) -> None:
    stage = tiny.stage(slots=2, pages=14, host_pages=60)
    feed(stage, 0, 0, 12 * PAGE)
    feed(stage, 1, 0, 1600, step=64)
    resident = [[i for i, page in enumerate(table.pages) if page.place is not None] for table in stage._tables]
    assert resident[0] == [0, 8, 9, 10, 11]
    assert {0, 20, 21, 22, 23, 24} <= set(resident[1])


def test_state_captured_in_one_pool_goes_on_in_any_other(tiny: Any) -> None:
    sizes = [(64, 0), (7, 60), (12, 40)]
    stages = [tiny.stage(slots=2, pages=places, host_pages=host) for places, host in sizes]
    straight = stages[0]
    feed(straight, 0, 0, 700)
    wanted = feed(straight, 0, 700, 900)
    for first, second in [(1, 2), (2, 1), (0, 1), (1, 0)]:
        there, back = stages[first], stages[second]
        there.open(1)
        feed(there, 1, 0, 700)
        back.restore(1, 700, there.capture(1))
        there.restore(1, 700, back.capture(1))
        for stage in (there, back):
            assert torch.equal(feed(stage, 1, 700, 900), wanted)
            stage.close(1)
            stage.check()


@pytest.mark.parametrize(("places", "portions"), [(64, [2, 6, 10, 10]), (11, [2, 6, 10, 10]), (10, [10])])
def test_pages_travel_while_the_next_are_listed_where_all_have_room(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, places: int, portions: list[int]
) -> None:
    """Of 10 and an open one: in portions of 2, 4 and what is left, and the stage asks once more at the end."""
    monkeypatch.setattr(paged, "FIRST_PORTION", 2)
    there, stage = tiny.stage(slots=1, pages=64), tiny.stage(slots=1, pages=places, host_pages=64)
    feed(there, 0, 0, 700)
    parts, asked, page_in = there.capture(0), list[int](), stage.pool.page_in

    def noted(table: PageTable) -> None:
        asked.append(len(table.pages[: table.sealed]))
        page_in(table)

    monkeypatch.setattr(stage.pool, "page_in", noted)
    stage.restore(0, 700, parts)
    assert asked == portions
    assert stage.paging().page_ins == min(10, places - 1)
    assert stage._tables[0].position == 700
    assert torch.equal(feed(stage, 0, 700, 900), feed(there, 0, 700, 900))
    stage.close(0)
    stage.check()


def test_a_restore_that_fails_behind_its_first_pages_leaves_nothing(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "FIRST_PORTION", 2)
    there, stage = tiny.stage(slots=1, pages=64), tiny.stage(slots=1, pages=64)
    feed(there, 0, 0, 700)
    adopted, adopt = list[HeldPage](), stage.pool.adopt

    def seven(copies: tuple[Page, ...]) -> HeldPage:
        if len(adopted) == 7:
            raise PoolFull("on paper")
        adopted.append(adopt(copies))
        return adopted[-1]

    monkeypatch.setattr(stage.pool, "adopt", seven)
    with pytest.raises(PoolFull, match="on paper"):
        stage.restore(0, 700, there.capture(0))
    assert stage.paging().page_ins == 6 and stage._tables[0].position == 0
    stage.check()
    assert stage.pages().used == 0


def test_restored_sequences_share_pages_that_are_away(tiny: Any) -> None:
    stage = tiny.stage(slots=3, pages=9, host_pages=9)
    feed(stage, 0, 0, 15 * PAGE)
    parts = stage.capture(0)
    for slot in (1, 2):
        stage.restore(slot, 15 * PAGE, parts)
    assert stage.pages().used == 15
    expected = feed(stage, 0, 960, 1000)
    assert all(torch.equal(feed(stage, slot, 960, 1000), expected) for slot in (1, 2))
    for slot in range(3):
        stage.close(slot)
    stage.check()
    assert stage.pages().used == 0


def test_rewind_reopens_a_page_that_was_sent_away_meanwhile(tiny: Any) -> None:
    stage, straight = tiny.stage(slots=2, pages=4, host_pages=40), tiny.stage(slots=2, pages=64)
    for s in (stage, straight):
        feed(s, 0, 0, 500)
        s.forward(Batch((Segment(0, 500, tuple(TOKENS[500:516])),), rewindable=True), None)
    feed(stage, 1, 0, 250)  # takes every place but that of the open page
    assert stage._tables[0].pages[7].place is None
    for s in (stage, straight):
        s.rewind(0, 505)
    assert torch.equal(feed(stage, 0, 505, 600), feed(straight, 0, 505, 600))
    stage.close(0)
    stage.close(1)
    stage.check()


def test_a_batch_whose_pages_do_not_fit_at_once_runs_in_turns(tiny: Any) -> None:
    pooled, large = tiny.stage(slots=4, pages=7, host_pages=60), tiny.stage(slots=4, pages=64)
    outputs = []
    for stage in (pooled, large):
        for slot in range(3):
            feed(stage, slot, 0, 100 + 70 * slot)
        segments = [Segment(i, 100 + 70 * i, tuple(TOKENS[:130]), Wanted.LAST) for i in range(3)]
        output = stage.forward(Batch((*segments, Segment(3, 0, tuple(TOKENS[:64]), Wanted.ALL))), None).logits
        assert output is not None
        outputs.append(output)
    assert outputs[0].shape == outputs[1].shape == (67, 320)
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-4, rtol=1e-4)


def test_a_split_pools_every_stage_by_itself(tiny: Any) -> None:
    whole = tiny.stage(slots=1, pages=64)
    front = tiny.stage(Span(0, 5), slots=1, pages=3, host_pages=30)
    back = tiny.stage(Span(5, 8), slots=1, pages=6, host_pages=30)
    for at in range(0, 640, 128):
        batch = Batch((Segment(0, at, tuple(TOKENS[at : at + 128]), Wanted.LAST),))
        logits = back.forward(batch, front.forward(batch, None).hidden).logits
    assert logits is not None
    assert torch.equal(logits[0], feed(whole, 0, 0, 640))


def test_snapshots_of_another_kv_type_are_refused(tiny: Any) -> None:
    packed, plain = tiny.stage(slots=1, kv_type="q8"), tiny.stage(slots=1, kv_type="f32")
    feed(packed, 0, 0, 100)
    with pytest.raises(SnapshotMismatch, match=r"uint8, the stage .* torch.float32"):
        plain.restore(0, 100, packed.capture(0))


@pytest.mark.parametrize("kv_type", ["bf16", "f16", "q8"])
def test_smaller_kv_types_stay_close_to_f32(tiny: Any, kv_type: str) -> None:
    truth, small = tiny.stage(slots=1), tiny.stage(slots=1, kv_type=kv_type)
    a, b = feed(truth, 0, 0, 1000), feed(small, 0, 0, 1000)
    off = float((a - b).abs().max() / a.std())
    print(f"{kv_type}: logits off by {off:.4f} of their spread")
    assert 0 < off < 0.05


STEPS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["run", "decode", "save", "load", "close"])), max_size=14)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_any_interleaving_in_a_tiny_pool_equals_a_large_one_and_leaks_nothing(make_tiny: Any, steps: list[Any]) -> None:
    tiny = make_tiny("dense")
    pooled, large = tiny.stage(slots=3, pages=7, host_pages=80), tiny.stage(slots=3, pages=100)
    positions, saved = [0, 0, 0], list[tuple[int, Any, Any]]()
    for slot, step in steps:
        at = positions[slot]
        if step in ("run", "decode"):
            end = at + (150 if step == "run" else 1)
            logits = [feed(stage, slot, at, end, step=end - at) for stage in (pooled, large)]
            assert torch.equal(*logits)
            positions[slot] = end
        elif step == "save":
            saved.append((at, pooled.capture(slot), large.capture(slot)))
        elif step == "load" and saved:
            positions[slot], small_parts, large_parts = saved[-1]
            pooled.restore(slot, positions[slot], small_parts)
            large.restore(slot, positions[slot], large_parts)
        elif step == "close":
            pooled.close(slot)
            large.close(slot)
            positions[slot] = 0
        count = pooled.pages()
        assert count.free + count.used == count.total == 87
        pooled.check()
    for slot in range(3):
        pooled.close(slot)
    pooled.check()
    assert pooled.pages().used == 0

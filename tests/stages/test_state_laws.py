"""Capture, restore and rewind on a stage: what comes back is what was there, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle.batch import Batch, Segment, Wanted
from rekindle.errors import SnapshotMismatch
from rekindle.snapshots.types import TAIL, Part
from rekindle.spec import PAGE, Span
from rekindle.stages import LocalStage

TOKENS = np.random.default_rng(7).integers(0, 320, 400).tolist()


def feed(stage: LocalStage, slot: int, start: int, stop: int, step: int = 10**9) -> torch.Tensor:
    """Run TOKENS[start:stop] in segments of `step`; the last row of logits."""
    logits = None
    for at in range(start, stop, step):
        segment = Segment(slot, at, tuple(TOKENS[at : min(at + step, stop)]), Wanted.LAST)
        logits = stage.forward(Batch((segment,)), None).logits
    assert logits is not None
    return logits[-1]


@pytest.fixture(params=["dense", "moe"])
def stage(request: Any, make_tiny: Any) -> LocalStage:
    result: LocalStage = make_tiny(request.param).stage(slots=3, pages=32)
    return result


@pytest.mark.parametrize("position", [1, 63, 64, 65, 128, 200])
def test_restored_slot_goes_on_with_the_same_bits(stage: LocalStage, position: int) -> None:
    stage.open(0)
    feed(stage, 0, 0, position)
    parts = stage.capture(0)
    straight = [feed(stage, 0, position, position + 40), feed(stage, 0, position + 40, position + 60, step=1)]
    stage.restore(2, position, parts)
    restored = [feed(stage, 2, position, position + 40), feed(stage, 2, position + 40, position + 60, step=1)]
    for a, b in zip(straight, restored, strict=True):
        assert torch.equal(a, b)


def test_captured_parts_do_not_change_when_the_sequence_runs_on(stage: LocalStage) -> None:
    stage.open(0)
    feed(stage, 0, 0, 100)
    parts = stage.capture(0)
    before = [_tensors(part) for part in parts]
    copies = [[t.clone() for t in tensors] for tensors in before]
    feed(stage, 0, 100, 180)
    stage.close(0)
    stage.open(1)
    feed(stage, 1, 0, 250)
    for tensors, kept in zip(before, copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))


def _tensors(part: Part) -> list[torch.Tensor]:
    return [*(page.data for page in part.pages), *part.tensors.values()]


def test_a_chain_of_captures_holds_every_sealed_page_once(stage: LocalStage) -> None:
    stage.open(0)
    feed(stage, 0, 0, 150)
    first = stage.capture(0)
    feed(stage, 0, 150, 300)
    second = stage.capture(0)
    for a, b in zip(first, second, strict=True):
        if a.is_paged:
            assert len(a.pages) == 150 // PAGE
            assert len(b.pages) == 300 // PAGE
            assert all(x is y for x, y in zip(a.pages, b.pages, strict=False))


def test_sequences_restored_from_one_snapshot_share_its_sealed_pages(stage: LocalStage) -> None:
    stage.open(0)
    feed(stage, 0, 0, 200)
    parts = stage.capture(0)
    used = stage.pages().used
    stage.restore(1, 200, parts)
    stage.restore(2, 200, parts)
    assert stage.pages().used == used + 2, "only the open page of each is its own"
    feed(stage, 1, 200, 230)
    assert torch.equal(feed(stage, 2, 200, 230), feed(stage, 0, 200, 230))
    for slot in range(3):
        stage.close(slot)
    stage.check()
    assert stage.pages().used == 0


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(0, 140), rows=st.integers(1, 20), data=st.data())
def test_rewound_slot_equals_one_that_never_ran_the_rejected_rows(
    stage: LocalStage, start: int, rows: int, data: st.DataObject
) -> None:
    keep = data.draw(st.integers(0, rows))
    stage.open(0)
    if start:
        feed(stage, 0, 0, start)
    block = Segment(0, start, tuple(TOKENS[start : start + rows]), Wanted.ALL)
    stage.forward(Batch((block,), rewindable=True), None)
    stage.rewind(0, start + keep)
    stage.open(1)
    if start:
        feed(stage, 1, 0, start)
    if keep:
        short = Segment(1, start, tuple(TOKENS[start : start + keep]), Wanted.ALL)
        stage.forward(Batch((short,), rewindable=True), None)
    for a, b in zip(stage.capture(0), stage.capture(1), strict=True):
        for x, y in zip(_tensors(a), _tensors(b), strict=True):
            assert torch.equal(x, y)
    stage.close(0)
    stage.close(1)
    stage.check()


def verify(stage: LocalStage, slot: int, start: int, stop: int) -> None:
    stage.forward(Batch((Segment(slot, start, tuple(TOKENS[start:stop]), Wanted.ALL),), rewindable=True), None)


@pytest.fixture(params=["recorded on a CPU", "recorded as on a GPU", "not recorded"])
def blocks(request: Any, make_tiny: Any) -> LocalStage:
    """Every way in which a stage runs blocks and settles them; what they are logged in holds no number before."""
    record = (lambda step, warm=None: step) if request.param == "recorded as on a GPU" else None
    result: LocalStage = make_tiny("dense").stage(slots=3, pages=32, rewind_rows=16, record=record)
    if request.param == "not recorded":
        result._cpu_steps = None
    for state in result._state.layers.values():
        for tensor in getattr(state, "log", None).tensors if state.logs_rows else ():
            tensor.fill_(torch.nan)
    return result


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("reader", ["forward", "capture", "a block", "a rewind to its end"])
def test_a_block_that_nobody_settled_is_settled_whole_by_whoever_reads_next(
    blocks: LocalStage, reader: str, rows: int
) -> None:
    """Slot 1 runs the same rows one by one; slot 2 has a block that stays pending meanwhile."""
    stage, end = blocks, 60 + rows
    for slot in range(3):
        feed(stage, slot, 0, 60)
    verify(stage, 2, 60, 76)
    verify(stage, 0, 60, end)
    feed(stage, 1, 60, end, step=1)
    if reader == "forward":
        assert torch.equal(feed(stage, 0, end, end + 1), feed(stage, 1, end, end + 1))
    elif reader == "a block":
        for slot in (0, 1):
            verify(stage, slot, end, end + 5)
            stage.rewind(slot, end + 2)
    elif reader == "a rewind to its end":
        stage.rewind(0, end)
    assert _same(stage, 0, 1)
    feed(stage, 1, stage._tables[1].position, 90, step=1)
    feed(stage, 0, stage._tables[0].position, 90, step=1)
    stage.rewind(2, 63)
    feed(stage, 2, 63, 90, step=1)
    assert _same(stage, 0, 1) and _same(stage, 2, 1)


def test_a_pending_block_is_dropped_with_what_its_slot_held(blocks: LocalStage) -> None:
    feed(blocks, 0, 0, 60)
    parts = blocks.capture(0)
    verify(blocks, 0, 60, 70)
    blocks.restore(0, 60, parts)
    feed(blocks, 1, 0, 30)
    verify(blocks, 1, 30, 40)
    blocks.close(1)
    feed(blocks, 1, 0, 60)
    assert _same(blocks, 0, 1)


def test_blocks_of_one_batch_are_settled_each_by_itself(blocks: LocalStage) -> None:
    starts, rows, keep = (60, 33, 5), (4, 16, 1), (2, 16, 0)
    for slot, start in enumerate(starts):
        feed(blocks, slot, 0, start)
    pieces = zip(range(3), starts, rows, strict=True)
    segments = [Segment(slot, at, tuple(TOKENS[at : at + count]), Wanted.ALL) for slot, at, count in pieces]
    blocks.forward(Batch(tuple(segments), rewindable=True), None)
    for slot in (2, 0):  # the other is settled by its capture
        blocks.rewind(slot, starts[slot] + keep[slot])
    settled = [blocks.capture(slot) for slot in range(3)]
    for parts, start, count in zip(settled, starts, keep, strict=True):
        blocks.open(0)
        feed(blocks, 0, 0, start)
        if count:
            feed(blocks, 0, start, start + count, step=1)
        for a, b in zip(parts, blocks.capture(0), strict=True):
            assert all(map(torch.equal, _tensors(a), _tensors(b)))


@pytest.mark.parametrize("way", ["capture", "rewind", "forward"])
def test_a_settled_block_cannot_be_gone_back_into(stage: LocalStage, way: str) -> None:
    """So no page is cut that a snapshot shares."""
    feed(stage, 0, 0, 60)
    verify(stage, 0, 60, 70)
    if way == "capture":
        stage.capture(0)
    elif way == "rewind":
        stage.rewind(0, 70)
    else:
        feed(stage, 0, 70, 71)
    stands = 71 if way == "forward" else 70
    stage.rewind(0, stands)
    with pytest.raises(AssertionError, match=f"cannot go back to 62: .* or is settled at {stands}"):
        stage.rewind(0, 62)


def _same(stage: LocalStage, a: int, b: int) -> bool:
    pairs = zip(stage.capture(a), stage.capture(b), strict=True)
    return all(all(map(torch.equal, _tensors(x), _tensors(y))) for x, y in pairs)


def test_parts_of_other_layers_or_lengths_are_refused_and_leave_the_slot_empty(stage: LocalStage) -> None:
    stage.open(0)
    feed(stage, 0, 0, 70)
    parts = stage.capture(0)
    with pytest.raises(SnapshotMismatch, match="holds layers"):
        stage.restore(1, 70, parts[:-1])
    with pytest.raises(SnapshotMismatch, match="70 positions, not 69"):
        stage.restore(1, 69, parts)
    bent = [Part(p.layer, {TAIL: p.tensors[TAIL].double()}, p.pages) if p.is_paged else p for p in parts]
    with pytest.raises(SnapshotMismatch, match="float64"):
        stage.restore(1, 70, bent)
    short = [p if p.is_paged else Part(p.layer, {**p.tensors, "window": p.tensors["window"][:1]}) for p in parts]
    with pytest.raises(SnapshotMismatch, match="layer 0: the snapshot has"):
        stage.restore(1, 70, short)
    stage.close(0)
    stage.check()
    assert stage.pages().used == 0


def test_a_span_loads_alone_and_two_spans_in_a_row_equal_the_whole(make_tiny: Any) -> None:
    tiny = make_tiny("moe")
    whole = tiny.stage()
    front, back = tiny.stage(Span(0, 3)), tiny.stage(Span(3, 8))
    batch = Batch((Segment(0, 0, tuple(TOKENS[:90]), Wanted.ALL),))
    expected = whole.forward(batch, None).logits
    hidden = front.forward(batch, None).hidden
    assert hidden is not None
    got = back.forward(batch, hidden).logits
    assert expected is not None
    assert got is not None
    assert torch.equal(expected, got)


def test_batching_with_others_changes_no_greedy_token_and_hardly_a_logit(stage: LocalStage) -> None:
    stage.open(0)
    alone = feed(stage, 0, 0, 100)
    stage.close(0)
    stage.open(1)
    stage.open(2)
    feed(stage, 1, 0, 37)
    for slot in (0,):
        stage.open(slot)
    together = Batch(
        (
            Segment(1, 37, (3,), Wanted.LAST),
            Segment(0, 0, tuple(TOKENS[:100]), Wanted.LAST),
            Segment(2, 0, tuple(TOKENS[50:120]), Wanted.LAST),
        )
    )
    logits = stage.forward(together, None).logits
    assert logits is not None
    assert (logits[1] - alone).abs().max() < 1e-4
    assert logits[1].argmax() == alone.argmax()


@pytest.mark.parametrize("position", [99, 121])
def test_a_rewind_that_the_last_block_does_not_reach_is_refused_before_anything_moves(
    stage: LocalStage, position: int
) -> None:
    for slot in (0, 1):
        feed(stage, slot, 0, 100)
        verify(stage, slot, 100, 120)
    with pytest.raises(AssertionError, match=f"cannot go to {position}: .* from 100 to 120"):
        stage.rewind(0, position)
    for slot in (0, 1):
        stage.rewind(slot, 110)
    assert _same(stage, 0, 1)


def test_a_stage_that_stops_ends_the_threads_of_its_copies(stage: LocalStage, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = list[bool]()
    monkeypatch.setattr(stage.pool.copies, "stop", lambda: stopped.append(True))
    stage.stop()
    assert stopped == [True]

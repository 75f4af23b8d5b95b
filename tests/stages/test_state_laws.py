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


def test_rewind_does_not_write_into_a_page_that_a_snapshot_shares(stage: LocalStage) -> None:
    stage.open(0)
    feed(stage, 0, 0, 60)
    stage.forward(Batch((Segment(0, 60, tuple(TOKENS[60:70])),), rewindable=True), None)
    parts = stage.capture(0)
    copies = [[t.clone() for t in _tensors(part)] for part in parts]
    stage.restore(1, 70, parts)
    stage.rewind(0, 62)
    stage.forward(Batch((Segment(0, 62, (5, 6, 7)),)), None)
    for part, kept in zip(parts, copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(_tensors(part), kept, strict=True))
    expected = feed(stage, 1, 70, 80)
    stage.restore(2, 70, parts)
    assert torch.equal(feed(stage, 2, 70, 80), expected)


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
    stage.open(0)
    feed(stage, 0, 0, 100)
    stage.forward(Batch((Segment(0, 100, tuple(TOKENS[100:120])),), rewindable=True), None)
    before = stage.capture(0)
    with pytest.raises(AssertionError, match=f"cannot go to {position}: .* from 100 to 120"):
        stage.rewind(0, position)
    for part, truth in zip(stage.capture(0), before, strict=True):
        if not part.is_paged:
            assert all(map(torch.equal, part.tensors.values(), truth.tensors.values()))
    stage.rewind(0, 110)
    stage.close(0)


def test_a_stage_that_stops_ends_the_threads_of_its_copies(stage: LocalStage, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = list[bool]()
    monkeypatch.setattr(stage.pool.copies, "stop", lambda: stopped.append(True))
    stage.stop()
    assert stopped == [True]

"""Recorded steps on the CPU: static buffers, padding and tables as on a GPU; to replay is to run the step again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rekindle.batch import DRAWN, Batch, Segment, Wanted
from rekindle.models.state import DeltaState
from rekindle.pool import Seat
from rekindle.spec import PAGE, Span
from rekindle.stages import LocalStage
from rekindle.stages.layout import Form, Layout, round_up
from rekindle.stages.types import Ahead

TOKENS = np.random.default_rng(9).integers(0, 320, 2048).tolist()
CPU = torch.device("cpu")


class Reruns:
    """Records by keeping the step; counts what was recorded and how often it was replayed."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        step()

        def replay() -> None:
            self.replayed += 1
            step()

        return replay


def pair(make_tiny: Any, **options: Any) -> tuple[LocalStage, LocalStage, Reruns]:
    """A stage that records and one that does not."""
    tiny, record = make_tiny("dense"), Reruns()
    options = {"slots": 3, "pages": 32, **options}
    return tiny.stage(**options, record=record), tiny.stage(**options), record


def run(stage: LocalStage, *segments: Segment, rewindable: bool = False) -> torch.Tensor:
    logits = stage.forward(Batch(segments, rewindable), None).logits
    assert logits is not None
    return logits


def prefill(stage: LocalStage, slot: int, stop: int, chunk: int = 128) -> None:
    for at in range(0, stop, chunk):
        run(stage, Segment(slot, at, tuple(TOKENS[at : min(at + chunk, stop)]), Wanted.LAST))


def row(slot: int, position: int) -> Segment:
    return Segment(slot, position, (TOKENS[position],), Wanted.LAST)


def states(stage: LocalStage, slot: int) -> list[torch.Tensor]:
    deltas = [state for state in stage._states.values() if isinstance(state, DeltaState)]
    return [tensor[slot] for state in deltas for tensor in (state.states, state.windows)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_recorded_decode_step_has_the_bits_of_a_plain_one(make_tiny: Any) -> None:
    stage, plain, record = pair(make_tiny)
    for s in (stage, plain):
        prefill(s, 1, 120)
    for at in range(120, 140):  # over a page edge
        assert torch.equal(run(stage, row(1, at)), run(plain, row(1, at)))
    assert (record.recorded, record.replayed) == (1, 20)
    assert same(states(stage, 1), states(plain, 1))


def test_rows_of_padding_leave_every_slot_and_page_alone(make_tiny: Any) -> None:
    stage, plain, record = pair(make_tiny)
    for s in (stage, plain):
        for slot, length in enumerate((70, 64, 9)):
            prefill(s, slot, length)
    for step in range(3):  # three rows in a step of four
        rows = [row(slot, length + step) for slot, length in enumerate((70, 64, 9))]
        torch.testing.assert_close(run(stage, *rows), run(plain, *rows), atol=1e-4, rtol=1e-4)
    assert record.replayed == 3
    stage.open(1)
    stage.pool.kv[0].zero_()
    before = [tensor.clone() for slot in (0, 2) for tensor in states(stage, slot)]
    run(stage, Segment(1, 0, tuple(TOKENS[:5]), Wanted.ALL), rewindable=True)  # five rows in a step of eight
    assert same(before, [*states(stage, 0), *states(stage, 2)])
    written = stage.pool.kv[0][: stage.pool.scratch_page].abs().sum((1, 3, 4)).nonzero().tolist()
    assert written == [[stage._tables[1].pages[0].place, i] for i in range(5)], "page, and row inside it"


@pytest.mark.parametrize("policy", ["qk", "lru"])
def test_sparse_decode_is_recorded_at_every_row_and_attends_what_a_plain_step_does(make_tiny: Any, policy: str) -> None:
    options = {"pages": 8, "host_pages": 200, "kv_mode": "sparse", "policy": policy}
    stage, plain, record = pair(make_tiny, **options)
    for s in (stage, plain):
        prefill(s, 2, 1300)
    for at in range(1300, 1300 + 2 * PAGE + 10):  # two page edges: pages are chosen anew
        assert torch.equal(run(stage, row(2, at)), run(plain, row(2, at)))
        assert stage._tables[2].chosen == plain._tables[2].chosen
    assert record.replayed == 2 * PAGE + 10
    assert stage.paging().skipped == plain.paging().skipped > 0
    if policy == "qk":
        ours, theirs = stage._tables[2].queries.now, plain._tables[2].queries.now
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)
        assert ours.flatten(1).any(1).all(), "noted in every layer"
        assert record.recorded == 2, "one step that notes the query, one that does not"


def test_only_the_sequence_that_left_out_pages_is_called_an_approximation(make_tiny: Any) -> None:
    stage, _, _ = pair(make_tiny, pages=10, host_pages=200, kv_mode="sparse")
    prefill(stage, 0, 1300)
    prefill(stage, 2, 30)
    output = stage.forward(Batch((row(2, 30), row(0, 1300))), None)
    assert output.skipping == {0}


@pytest.mark.parametrize("rows", range(1, 21))
def test_a_recorded_block_gone_back_into_anywhere_is_a_plain_one(make_tiny: Any, rows: int) -> None:
    stage, plain, record = pair(make_tiny)
    block = Segment(0, 60, tuple(TOKENS[60 : 60 + rows]), Wanted.ALL)
    for s in (stage, plain):
        prefill(s, 0, 60)
    exact = round_up(rows) == rows  # other counts are other matrix products: rounding differs
    for keep in {0, 1, rows // 2, rows}:
        logits, expected = (run(s, block, rewindable=True) for s in (stage, plain))
        torch.testing.assert_close(logits, expected, atol=0 if exact else 1e-4, rtol=0 if exact else 1e-4)
        for s in (stage, plain):
            s.rewind(0, 60 + keep)
        for a, b in zip(states(stage, 0), states(plain, 0), strict=True):
            torch.testing.assert_close(a, b, atol=0 if exact else 1e-4, rtol=0 if exact else 1e-4)
        if keep == rows:
            break
        for s in (stage, plain):
            s.rewind(0, 60)
    assert record.replayed > 0
    after = 60 + rows
    if exact:
        assert torch.equal(run(stage, row(0, after)), run(plain, row(0, after)))


def test_sparse_blocks_over_page_edges_are_recorded_and_rewound_as_plain_ones(make_tiny: Any) -> None:
    stage, plain, record = pair(make_tiny, pages=8, host_pages=200, kv_mode="sparse", rewind_rows=16)
    for s in (stage, plain):
        prefill(s, 0, 1300)
    at, blocks = 1300, 0
    for keep in (16, 3, 16, 7, 16, 16, 1, 16, 16, 5, 16):
        block = Segment(0, at, tuple(TOKENS[at : at + 16]), Wanted.ALL)
        assert torch.equal(*(run(s, block, rewindable=True) for s in (stage, plain)))
        at, blocks = at + keep, blocks + 1
        for s in (stage, plain):
            s.rewind(0, at)
        assert same(states(stage, 0), states(plain, 0))
    assert record.replayed == blocks + sum(keep < 16 for keep in (3, 7, 1, 5)), "blocks, and going back into them"
    assert at // PAGE == 1300 // PAGE + 2, "two edges"
    assert torch.equal(run(stage, row(0, at)), run(plain, row(0, at)))


def test_a_longer_block_than_ever_keeps_what_others_can_go_back_into(make_tiny: Any) -> None:
    stage, plain, record = pair(make_tiny, rewind_rows=4)
    for s in (stage, plain):
        run(s, Segment(0, 0, tuple(TOKENS[:4]), Wanted.ALL), rewindable=True)
        run(s, Segment(1, 0, tuple(TOKENS[:16]), Wanted.ALL), rewindable=True)
        s.rewind(0, 2)
        s.rewind(1, 9)
        run(s, Segment(1, 9, tuple(TOKENS[9:25]), Wanted.ALL), rewindable=True)
        s.rewind(1, 12)
        run(s, Segment(0, 2, tuple(TOKENS[2:6]), Wanted.ALL), rewindable=True)
    for slot in (0, 1):
        assert same(states(stage, slot), states(plain, slot))
    assert record.recorded == 4, "blocks of 4 twice, for the second time over the new room; of 16; going back"


@pytest.mark.parametrize("length", [100, 16 * PAGE - 1, 16 * PAGE])  # the last one's next row needs a wider table
def test_the_step_behind_a_prompt_is_recorded_with_its_last_chunk(make_tiny: Any, length: int) -> None:
    stage, _, record = pair(make_tiny)
    run(stage, Segment(0, 0, tuple(TOKENS[:length]), Wanted.LAST))
    assert (record.recorded, record.replayed) == (1, 0)
    run(stage, row(0, length))
    assert (record.recorded, record.replayed) == (1, 1)


def test_later_stages_take_activations_into_recorded_steps(make_tiny: Any) -> None:
    tiny = make_tiny("dense")
    whole, front, back = tiny.stage(), tiny.stage(Span(0, 3)), tiny.stage(Span(3, 8), record=Reruns())
    for at in range(70):
        batch = Batch((row(0, at),))
        logits = back.forward(batch, front.forward(batch, None).hidden).logits
        assert torch.equal(logits, whole.forward(batch, None).logits)


def test_a_single_row_of_prefill_that_wants_no_logits_gets_none(make_tiny: Any) -> None:
    stage, _, record = pair(make_tiny)
    assert stage.forward(Batch((Segment(0, 0, (5,)),)), None).logits is None
    both = Batch((Segment(0, 1, (6,)), row(1, 0)))
    logits = stage.forward(both, None).logits
    assert logits is not None
    assert len(logits) == 1
    assert record.replayed == 2


def test_tokens_drawn_ahead_enter_a_recorded_step(make_tiny: Any) -> None:
    stage, plain, _ = pair(make_tiny)
    for drawn, rows, sources, tokens in [
        ((7, 8, 9), (0, 1), (0, 1), (7, 8)),
        ((7, 8, 9), (1, 0), (2, 0), (7, 9)),
        ((-1, 8, 9), (0, 1), (0, 1), (0, 8)),  # where none could be drawn any will do that there is
        ((-1, 8, 9), (1, 0), (1, 0), (0, 8)),
    ]:
        for s in (stage, plain):
            s.open(0)
            s.open(1)
        ahead = Batch(tuple(Segment(slot, 0, (DRAWN,), Wanted.LAST) for slot in (0, 1)))
        told = Batch(tuple(Segment(slot, 0, (tokens[slot],), Wanted.LAST) for slot in (0, 1)))
        expected = plain.forward(told, None).logits
        assert expected is not None
        for s in (stage, plain):
            s.open(0)
            s.open(1)
            logits = s.forward(ahead, None, Ahead(torch.tensor(drawn), rows, sources)).logits
            assert logits is not None
            assert torch.equal(logits, expected)


def test_a_layout_lists_the_attended_pages_and_counts_rows_by_them() -> None:
    # 10 pages, of which 4 are attended, and the open one; rows [650, 653) are verified in a step of four
    batch = Batch((Segment(2, 650, (5, 6, 7), Wanted.ALL),), rewindable=True)
    seat = Seat(np.array([3, 1, 4, 0, 9], dtype=np.int32), skipped=6, noted=1, table=2)
    form = Form.of(batch, [seat])
    padded = form.padded()
    assert form == Form((3,), 3, 5, True, True)
    assert padded == Form((4, 0), 4, 16, True, True)
    layout = Layout(padded, CPU, scratch_slot=8, scratch_page=99)
    layout.fill(batch, [seat], torch.full((padded.size,), -7, dtype=torch.int32))
    ragged = layout.ragged
    assert layout.tokens.tolist() == [5, 6, 7, 0]
    assert ragged.starts.tolist() == [0, 3, 4]
    assert ragged.slots.tolist() == [2, 8]
    assert ragged.row_positions.tolist() == [650, 651, 652, 0]
    assert ragged.row_places.tolist() == [266, 267, 268, 0], "the fifth page of the table holds places 256 to 319"
    assert ragged.row_segments.tolist() == [0, 0, 0, 1]
    assert ragged.tables[0, :5].tolist() == [3, 1, 4, 0, 9]
    assert int(ragged.tables[1, 0]) == 99
    assert ragged.noted is not None
    assert ragged.noted.tolist() == [[1, 0], [2, 8]]


def test_prefill_and_blocks_of_several_sequences_are_not_recorded() -> None:
    seats = [Seat(np.zeros(1, dtype=np.int32), 0, None, i) for i in range(2)]
    chunk, single = Segment(0, 0, (1, 2, 3)), Segment(1, 5, (4,))
    assert Form.of(Batch((chunk,)), seats[:1]).padded() is None
    assert Form.of(Batch((chunk, single)), seats).padded() is None
    assert Form.of(Batch((chunk, single), rewindable=True), seats).padded() is None

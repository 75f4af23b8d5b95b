"""Recorded steps on the CPU: static buffers, padding and tables as on a GPU; to replay is to run the step again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from rekindle.batch import PENDING, Batch, Segment, Wanted
from rekindle.pool import SegmentPages
from rekindle.spec import PAGE, Span
from rekindle.stages import LocalStage
from rekindle.stages.layout import (
    LONGEST_CHUNK,
    SHARED,
    GraphShape,
    Layout,
    chunk_shape,
    recorded_shapes,
    round_up,
    round_width,
)
from rekindle.stages.types import PendingTokens

TOKENS = np.random.default_rng(9).integers(0, 320, 2048).tolist()
CPU = torch.device("cpu")


class Reruns:
    """Records by keeping the step; counts what was recorded and how often it was replayed, a chunk in sections once."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(self, step: Callable[[], None], warm: Callable[[], None] | None = None) -> Callable[[], None]:
        further = isinstance(step, partial) and step.args[0] > 0  # the number of a section
        self.recorded += not further
        (warm or step)()

        def replay() -> None:
            self.replayed += not further
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
    return [tensor for state in stage._state.layers.values() for tensor in state.cleared(slot)]


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
    prompts = [s.capture(0) for s in (stage, plain)]
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
        for s, parts in zip((stage, plain), prompts, strict=True):
            s.restore(0, 60, parts)
    assert record.replayed > 0
    after = 60 + rows
    if exact:
        assert torch.equal(run(stage, row(0, after)), run(plain, row(0, after)))


def test_sparse_blocks_are_recorded_but_over_page_edges_and_rewound_as_plain_ones(make_tiny: Any) -> None:
    stage, plain, record = pair(make_tiny, pages=8, host_pages=200, kv_mode="sparse", rewind_rows=16)
    for s in (stage, plain):
        prefill(s, 0, 1300)
    at, inside = 1300, 0
    for keep in (16, 3, 16, 7, 16, 16, 1, 16, 16, 5, 16):
        block = Segment(0, at, tuple(TOKENS[at : at + 16]), Wanted.ALL)
        assert torch.equal(*(run(s, block, rewindable=True) for s in (stage, plain)))
        inside += at // PAGE == (at + 15) // PAGE
        at += keep
        for s in (stage, plain):
            s.rewind(0, at)
        assert same(states(stage, 0), states(plain, 0))
    assert 0 < inside < 11
    assert record.replayed == inside + 11, "blocks, and settling each"
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
        s.rewind(0, 6)
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
        ahead = Batch(tuple(Segment(slot, 0, (PENDING,), Wanted.LAST) for slot in (0, 1)))
        told = Batch(tuple(Segment(slot, 0, (tokens[slot],), Wanted.LAST) for slot in (0, 1)))
        expected = plain.forward(told, None).logits
        assert expected is not None
        for s in (stage, plain):
            s.open(0)
            s.open(1)
            logits = s.forward(ahead, None, PendingTokens(torch.tensor(drawn), rows, sources)).logits
            assert logits is not None
            assert torch.equal(logits, expected)


def test_a_layout_lists_the_attended_pages_and_counts_rows_by_them() -> None:
    # 10 pages, of which 4 are attended, and the open one; rows [650, 653) are verified in a step of four
    batch = Batch((Segment(2, 650, (5, 6, 7), Wanted.ALL),), rewindable=True)
    places = np.array([[3, 1, 4, 0, 9], [4, 2, 0, 5, 9]], dtype=np.int32)  # two groups of layers, each with its choice
    its_pages = SegmentPages(places, skipped=6, noted=1, table=2)
    form = GraphShape.of(batch, [its_pages])
    padded = form.padded()
    assert form == GraphShape((3,), 3, 5, True, True, groups=2)
    assert padded == GraphShape((4, 0), 4, 16, True, True, groups=2)
    layout = Layout(padded, CPU, scratch_slot=8, scratch_page=99)
    layout.fill(batch, [its_pages], torch.full((padded.size,), -7, dtype=torch.int32))
    ragged = layout.ragged
    assert layout.tokens.tolist() == [5, 6, 7, 0]
    assert ragged.starts.tolist() == [0, 3, 4]
    assert ragged.slots.tolist() == [2, 8]
    assert ragged.row_positions.tolist() == [650, 651, 652, 0]
    assert ragged.row_places.tolist() == [266, 267, 268, 0], "the fifth page of the table holds places 256 to 319"
    assert ragged.row_segments.tolist() == [0, 0, 0, 1]
    for group, its_places in enumerate(places.tolist()):
        assert ragged.of_group(group).tables[0, :5].tolist() == its_places
        assert int(ragged.of_group(group).tables[1, 0]) == 99
    assert ragged.noted is not None
    assert ragged.noted.tolist() == [[1, 0], [2, 8]]


def test_prefill_of_several_sequences_is_not_recorded_and_their_blocks_are() -> None:
    both = [SegmentPages(np.zeros((1, 1), dtype=np.int32), 0, None, i) for i in range(2)]
    chunk, single = Segment(0, 0, (1, 2, 3)), Segment(1, 5, (4,))
    assert GraphShape.of(Batch((chunk,)), both[:1]).padded() is None
    assert GraphShape.of(Batch((chunk, single)), both).padded() is None
    blocks = GraphShape.of(Batch((chunk, single), rewindable=True), both).padded()
    assert blocks is not None and (blocks.lengths, blocks.rows) == ((4, 4, 0), 4)
    long = GraphShape.of(Batch((Segment(0, 0, (1,) * 17), single), rewindable=True), both)
    assert long.padded() is None


@pytest.mark.parametrize("widths", [(2, 2), (1, 4), (5, 1, 3), (16, 16, 16), (16, 1, 1), (7, 6), (4, 9, 2)])
def test_recorded_blocks_of_several_sequences_gone_back_into_anywhere_are_plain_ones(
    make_tiny: Any, widths: tuple[int, ...]
) -> None:
    """Of different widths, in one step; each goes back by itself, and no padding reaches a slot."""
    stage, plain, record = pair(make_tiny, slots=4, rewind_rows=16)
    starts = [60, 130, 5][: len(widths)]
    for s in (stage, plain):
        for slot, start in enumerate(starts):
            prefill(s, slot, start)
        prefill(s, 3, 40)
    prompts = [[s.capture(slot) for slot in range(len(widths))] for s in (stage, plain)]
    untouched = [tensor.clone() for tensor in states(stage, 3)]
    pieces = list(zip(range(len(widths)), starts, widths, strict=True))
    batch = [Segment(slot, at, tuple(TOKENS[at : at + rows]), Wanted.ALL) for slot, at, rows in pieces]
    for back in range(3):
        logits, expected = (run(s, *batch, rewindable=True) for s in (stage, plain))
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        for slot, at, rows in pieces:
            keep = min(rows, 1 + (slot + back) % rows)
            for s in (stage, plain):
                s.rewind(slot, at + keep)
            for a, b in zip(states(stage, slot), states(plain, slot), strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
            for s, parts in zip((stage, plain), prompts, strict=True):
                s.restore(slot, at, parts[slot])
    assert stage.work()["step:recorded"] == 3 and record.replayed > 3
    assert same(states(stage, 3), untouched)


def test_padding_behind_blocks_always_fits_the_log() -> None:
    """Every padded row is in a segment no longer than the longest block."""
    for sequences in range(2, 13):
        for rows in range(1, 17):
            lengths = tuple(1 + (3 * i + rows) % rows for i in range(sequences))
            shape = GraphShape(lengths, sum(lengths), 1, rewindable=True, notes=False).padded()
            assert shape is not None and shape.lengths[0] >= max(lengths)
            for batch in (None, Batch(tuple(Segment(i, 0, (1,) * n) for i, n in enumerate(lengths)), rewindable=True)):
                layout = Layout(shape, CPU, 20, 99)
                its_pages = [SegmentPages(np.zeros((1, 1), dtype=np.int32), 0, None, 0)] * (
                    len(lengths) if batch else 0
                )
                layout.fill(batch, its_pages, torch.zeros(shape.size, dtype=torch.int32))
                laid = layout.ragged.starts.diff().tolist()
                assert max(laid) <= shape.lengths[0] and sum(laid) == shape.rows


@pytest.mark.parametrize("widest", [1, 3, 12, 40])
def test_padding_stays_inside_its_table_though_a_chunk_has_more_rows_than_a_sequence(widest: int) -> None:
    for shape in recorded_shapes(slots=4, widest=widest, chunk=2048, block=16):
        layout = Layout(shape, CPU, 4, 99)
        layout.fill(None, [], torch.full((shape.size,), -7, dtype=torch.int32))
        ragged = layout.ragged
        pages = ragged.row_places.long() // PAGE
        assert ragged.tables[ragged.row_segments.long(), pages].eq(99).all(), "every row finds the page of padding"


def test_the_first_step_of_its_kind_runs_through_all_layers_before_it_is_recorded(make_tiny: Any) -> None:
    """Memory that a layer makes when it first runs is not made while a step is recorded."""
    warmed: list[int] = []
    stage = make_tiny("dense").stage(slots=3, pages=32, table_width=32, record=lambda step, warm: (warm(), step)[1])
    run_layers = type(stage.model).run

    def noting(model: Any, x: Any, rows: Any, states: Any, layers: Any = None, taps: Any = ()) -> Any:
        warmed.append(len(model.layers if layers is None else layers))
        return run_layers(model, x, rows, states, layers, taps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(stage.model), "run", noting)
        stage.record_steps(64)
    whole, unlike = len(stage.model.layers), len(stage.model.unlike_layers)
    assert unlike < whole
    assert warmed.count(whole) == 2, "decode rows and chunks"
    assert set(warmed) == {whole, unlike}


# Chunks


def chunk(slot: int, start: int, stop: int, wanted: Wanted = Wanted.LAST) -> Segment:
    return Segment(slot, start, tuple(TOKENS[start:stop]), wanted)


@pytest.mark.parametrize("rows", [2, 3, 7, 8, 63, 64, 65, 95, 100, 191, 500, 512])
def test_a_recorded_chunk_leaves_the_state_of_a_plain_one(make_tiny: Any, rows: int) -> None:
    stage, plain, record = pair(make_tiny, table_width=32)
    for position in (0, rows):  # at the beginning, and behind itself
        segment = chunk(1, position, position + rows)
        torch.testing.assert_close(run(stage, segment), run(plain, segment), atol=1e-4, rtol=1e-4)
    assert record.replayed == 2
    for ours, theirs in zip(states(stage, 1), states(plain, 1), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    step = row(1, 2 * rows)
    torch.testing.assert_close(run(stage, step), run(plain, step), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [3, 63, 70, 97, 300])
def test_padding_of_a_chunk_touches_no_slot_and_no_page(make_tiny: Any, rows: int) -> None:
    stage, _, record = pair(make_tiny, table_width=32)
    for slot in (0, 2):
        prefill(stage, slot, 70)
    stage.pool.kv[0].zero_()
    before = [tensor.clone() for slot in (0, 2) for tensor in states(stage, slot)]
    run(stage, chunk(1, 0, rows))
    assert record.replayed == 3
    assert same(before, [*states(stage, 0), *states(stage, 2)])
    written = stage.pool.kv[0][: stage.pool.scratch_page].abs().sum((1, 3, 4)).nonzero().tolist()
    places = [page.place for page in stage._tables[1].pages]
    assert sorted(written) == sorted([places[i // PAGE], i % PAGE] for i in range(rows)), "page, and row inside it"


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_recorded_chunk_behind_a_restore_has_the_bits_of_the_run_that_went_on(make_tiny: Any, kind: str) -> None:
    stage = make_tiny(kind).stage(slots=3, pages=32, record=Reruns(), table_width=32)
    run(stage, chunk(0, 0, 150))
    parts = stage.capture(0)
    straight = run(stage, chunk(0, 150, 250))
    run(stage, chunk(2, 0, 333))  # somebody else runs in between, and leaves other padding behind
    stage.restore(1, 150, parts)
    assert torch.equal(run(stage, chunk(1, 150, 250)), straight)
    assert same(states(stage, 0), states(stage, 1))
    cold = make_tiny(kind).stage(slots=3, pages=32, record=Reruns(), table_width=32)
    run(cold, chunk(2, 0, 150))
    assert torch.equal(run(cold, chunk(2, 150, 250)), straight)


@pytest.mark.parametrize("wanted", [Wanted.NONE, Wanted.ALL, Wanted.SCORED])
def test_a_recorded_chunk_gives_the_rows_that_are_wanted(make_tiny: Any, wanted: Wanted) -> None:
    stage, plain, record = pair(make_tiny, table_width=32)
    ours, theirs = (s.forward(Batch((chunk(0, 0, 50, wanted),)), None) for s in (stage, plain))
    assert record.replayed == 1
    for a, b in ((ours.logits, theirs.logits), (ours.scores, theirs.scores)):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_later_stages_take_chunks_into_recorded_steps_and_hand_on_what_no_later_step_touches(make_tiny: Any) -> None:
    tiny = make_tiny("dense")
    options = {"record": Reruns(), "table_width": 32}
    front, back = tiny.stage(Span(0, 3), **options), tiny.stage(Span(3, 8), **options)
    first, second = (Batch((chunk(slot, 0, 100),)) for slot in (0, 1))
    hidden = front.forward(first, None).hidden
    assert hidden is not None
    kept = hidden.clone()
    front.forward(Batch((Segment(1, 0, tuple(TOKENS[500:600]), Wanted.LAST),)), None)
    assert torch.equal(hidden, kept)
    whole = tiny.stage(**options)
    assert torch.equal(back.forward(first, hidden).logits, whole.forward(second, None).logits)


def test_chunks_of_several_prompts_share_a_recorded_step_and_leave_what_each_leaves_alone(make_tiny: Any) -> None:
    stage, plain, record = pair(make_tiny, table_width=32, slots=5, pages=64)
    for at, lengths in ((0, (70, 33)), (0, (1, 64, 129)), (0, (9, 200, 40, 7))):
        stop = [at + length for length in lengths]
        together = run(stage, *(chunk(slot, at, end) for slot, end in enumerate(stop)))
        alone = torch.cat([run(plain, chunk(slot, at, end)) for slot, end in enumerate(stop)])
        torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)
        for slot, end in enumerate(stop):
            torch.testing.assert_close(states(stage, slot), states(plain, slot), atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(run(stage, row(slot, end)), run(plain, row(slot, end)), atol=1e-4, rtol=1e-4)
            stage.close(slot)
            plain.close(slot)
    assert record.replayed == 3 + 9, "every one of them was recorded"


def test_what_requests_need_is_recorded_before_they_come(make_tiny: Any) -> None:
    stage, _, record = pair(make_tiny, table_width=40, pages=64)
    prefill(stage, 1, 70)
    before = [tensor.clone() for tensor in states(stage, 1)]
    recorded, count = record.recorded, stage.record_steps(512)
    assert count == record.recorded == len(recorded_shapes(3, 40, 512)) > recorded
    assert same(before, states(stage, 1)), "over padding alone"
    stage.close(1)
    for rows in (1, 2, 40, 511):
        stage.open(0)
        run(stage, chunk(0, 0, rows))
    for step in range(2 * PAGE):  # over page edges, with others beside it
        run(stage, row(0, 511 + step), *(row(slot, step) for slot in (1, 2)))
    stage.open(0)
    for at in range(0, 1900, 380):  # a long one, whose table takes every width
        run(stage, chunk(0, at, at + 380))
    run(stage, row(0, 1900))
    assert record.recorded == count, "nothing is recorded amid requests"


def test_chunks_that_memory_does_not_suffice_to_record_run_unrecorded(
    make_tiny: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stage, plain, record = pair(make_tiny, table_width=32)
    made = stage._recording.steps._make  # type: ignore[union-attr]

    def short_of_memory(form: GraphShape, taps: tuple[int, ...]) -> Any:
        if form.is_chunk and form.rows > 64:
            raise torch.cuda.OutOfMemoryError("no room")
        return made(form, taps)

    stage._recording.steps._make = short_of_memory  # type: ignore[method-assign, union-attr]
    count = stage.record_steps(512)
    assert 0 < count == record.recorded < len(recorded_shapes(3, 32, 512))
    assert "chunks of 128 rows and more are not recorded, and start slower: no room" in caplog.text
    for start, stop in ((0, 60), (60, 160)):  # one that is recorded, one that is not
        segment = chunk(1, start, stop)
        torch.testing.assert_close(run(stage, segment), run(plain, segment), atol=1e-4, rtol=1e-4)
    assert record.replayed == 1


def test_only_what_is_short_known_and_near_is_a_recorded_chunk() -> None:
    def form(rows: int, width: int, **changes: bool) -> GraphShape:
        return GraphShape((rows,), rows, width, **{"rewindable": False, "notes": False, **changes})

    assert form(70, 3).padded(640) == chunk_shape(128, 640)
    assert form(LONGEST_CHUNK, 640).padded(640) == chunk_shape(LONGEST_CHUNK, 640)
    assert form(LONGEST_CHUNK + 1, 640).padded(640) is None
    assert form(70, 641).padded(640) is None
    assert form(70, 3).padded() is None
    for change in ("notes", "far", "coming"):
        assert form(70, 3, **{change: True}).padded(640) is None
    assert [round_width(pages, 640) for pages in (1, 16, 17, 65, 257, 640, 641)] == [16, 16, 64, 640, 640, 640, 1024]
    assert [round_width(pages, 640, 8) for pages in (1, 16, 17)] == [16, 16, 640]
    assert [round_width(pages, 640, 12) for pages in (1, 16, 17)] == [640, 640, 640]


@pytest.mark.parametrize(("slots", "widest", "chunk"), [(1, 1, 64), (3, 40, 512), (16, 640, 2048), (32, 4096, 100)])
def test_every_step_that_can_come_is_among_those_recorded_ahead(slots: int, widest: int, chunk: int) -> None:
    ahead = set(recorded_shapes(slots, widest, chunk))
    for pages in {1, min(17, widest), min(65, widest), widest}:
        for rows in range(1, slots + 1):
            assert GraphShape((1,) * rows, rows, pages, False, False).padded(widest) in ahead
        for rows in (2, 3, chunk // 2 + 1, chunk):
            assert GraphShape((rows,), rows, pages, False, False).padded(widest) in ahead
        for sharers in range(2, min(slots, 4) + 1):
            for rows in (2, min(SHARED, chunk // sharers)):
                assert GraphShape((rows,) * sharers, rows * sharers, pages, False, False).padded(widest) in ahead

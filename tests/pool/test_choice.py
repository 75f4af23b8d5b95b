"""Which pages a sparse sequence attends: a pure function of its state."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rekindle.pool.choice import LEAD, SINK, TAIL, Noted, Queries, choose, deciding_row
from rekindle.spec import PAGE


@given(sealed=st.integers(0, 60), room=st.integers(0, 60), seed=st.integers(0, 99))
def test_sink_and_tail_are_always_chosen_and_everything_that_fits(sealed: int, room: int, seed: int) -> None:
    scores = torch.rand(sealed, generator=torch.Generator().manual_seed(seed)).tolist()
    for by in (scores, None):
        chosen = choose(sealed, room, by)
        assert list(chosen) == sorted(set(chosen))
        assert {*range(min(SINK, sealed)), *range(max(0, sealed - TAIL), sealed)} <= set(chosen)
        assert len(chosen) == min(sealed, max(room, min(sealed, SINK + TAIL)))


def test_the_best_scores_win_and_without_scores_the_latest() -> None:
    scores = [0.0, 0.9, 0.1, 0.8, 0.2, 0.3, 0.0, 0.0, 0.0, 0.0]
    assert choose(10, 7, scores) == (0, 1, 3, 6, 7, 8, 9)
    assert choose(10, 7, None) == (0, 4, 5, 6, 7, 8, 9)
    assert choose(10, 10, scores) == tuple(range(10))


def test_the_deciding_row_is_the_last_of_a_chunk_and_lies_before_the_end_of_a_page() -> None:
    # prefill [100, 612); decode at 54, 55, 56; verify [50, 66), [60, 76), [100, 164)
    assert (PAGE, LEAD) == (64, 8)
    assert deciding_row(100, 612, rewindable=False) == 511
    assert [deciding_row(p, p + 1, rewindable=False) for p in (54, 55, 56)] == [None, 0, None]
    assert deciding_row(50, 66, rewindable=True) == 5
    assert deciding_row(60, 76, rewindable=True) is None
    assert deciding_row(100, 164, rewindable=True) == 19


@given(position=st.integers(0, 300), rows=st.lists(st.integers(1, PAGE), min_size=1, max_size=12))
def test_rows_in_blocks_leave_the_queries_that_single_rows_leave(position: int, rows: list[int]) -> None:
    def run(queries: Queries, start: int, end: int) -> Queries:
        row = deciding_row(start, end, rewindable=True)
        noted = None if row is None else Noted(start + row, torch.tensor(float(start + row)))
        return queries.behind_rows(start, end, noted)

    blocks = single = Queries(torch.tensor(-1.0))
    for count in rows:
        blocks = run(blocks, position, position + count)
        for at in range(position, position + count):
            single = run(single, at, at + 1)
        position += count
        assert (blocks.now, blocks.next) == (single.now, single.next)

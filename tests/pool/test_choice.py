"""Which pages a sparse sequence attends: a pure function of its state."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rekindle.buffers import SINK_PAGES, TAIL_PAGES
from rekindle.pool.choice import LEAD, NotedQuery, Queries, choose, deciding_rows
from rekindle.spec import PAGE


@given(sealed=st.integers(0, 60), room=st.integers(0, 60), seed=st.integers(0, 99))
def test_sink_and_tail_are_always_chosen_and_everything_that_fits(sealed: int, room: int, seed: int) -> None:
    scores = torch.rand(sealed, generator=torch.Generator().manual_seed(seed)).tolist()
    for by in (scores, None):
        chosen = choose(sealed, room, by)
        assert list(chosen) == sorted(set(chosen))
        assert {*range(min(SINK_PAGES, sealed)), *range(max(0, sealed - TAIL_PAGES), sealed)} <= set(chosen)
        assert len(chosen) == min(sealed, max(room, min(sealed, SINK_PAGES + TAIL_PAGES)))


def test_the_best_scores_win_and_without_scores_the_latest() -> None:
    scores = [0.0, 0.9, 0.1, 0.8, 0.2, 0.3, 0.0, 0.0, 0.0, 0.0]
    assert choose(10, 7, scores) == (0, 1, 3, 6, 7, 8, 9)
    assert choose(10, 7, None) == (0, 4, 5, 6, 7, 8, 9)
    assert choose(10, 10, scores) == tuple(range(10))


def test_the_deciding_rows_lie_before_the_end_of_each_page_behind_which_pages_are_left_out() -> None:
    # room for 2 sealed pages: rows of page 3 are the first to leave any out, and page 2 decides for them.
    assert (PAGE, LEAD) == (64, 8)
    assert [deciding_rows(p, p + 1, 2) for p in (119, 182, 183, 184, 247)] == [[], [], [0], [], [0]]
    assert [100 + row for row in deciding_rows(100, 612, 2)] == [183, 247, 311, 375, 439, 503, 567]
    assert deciding_rows(184, 247, 2) == []
    assert deciding_rows(184, 248, 2) == [63]


@given(st.integers(0, 300), st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=12), st.integers(0, 6))
def test_rows_in_segments_leave_the_queries_that_single_rows_leave(position: int, rows: list[int], room: int) -> None:
    def run(queries: Queries, start: int, end: int) -> Queries:
        noted = [NotedQuery(start + row, torch.tensor(float(start + row))) for row in deciding_rows(start, end, room)]
        return queries.after_rows(start, end, noted)

    segments = single = Queries(torch.tensor(-1.0))
    for count in rows:
        segments = run(segments, position, position + count)
        for at in range(position, position + count):
            single = run(single, at, at + 1)
        position += count
        assert (segments.now, segments.next) == (single.now, single.next)

"""Sparse mode: an approximation by nature, but the same one for the same pool, hit or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.feeding import logits_after

from rekindle.batch import Batch, Segment, Wanted
from rekindle.layers.paged import QUERY
from rekindle.shards.parts import export_parts, import_parts
from rekindle.snapshots.types import TAIL
from rekindle.spec import PAGE
from rekindle.stages import LocalStage

TOKENS = np.random.default_rng(8).integers(0, 320, 4 * 1024).tolist()


def feed(stage: LocalStage, slot: int, start: int, stop: int, step: int = 128) -> list[torch.Tensor]:
    return logits_after(stage, TOKENS, slot, start, stop, step)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(params=["dense", "moe"])
def tiny(request: Any, make_tiny: Any) -> Any:
    return make_tiny(request.param)


def sparse(tiny: Any, places: int = 8, **more: Any) -> LocalStage:
    stage: LocalStage = tiny.stage(**{"slots": 2, "pages": places, "host_pages": 200, "kv_mode": "sparse", **more})
    return stage


@pytest.mark.parametrize("policy", ["qk", "lru"])
def test_with_a_pool_as_large_as_the_sequence_sparse_is_full_kv_bit_for_bit(tiny: Any, policy: str) -> None:
    stage, full = sparse(tiny, 16, policy=policy), tiny.stage(slots=2, pages=64)
    for s in (stage, full):
        feed(s, 0, 0, 960 - 70)
    assert same(feed(stage, 0, 890, 1024, step=1), feed(full, 0, 890, 1024, step=1)), "16 pages in 16 places"
    assert stage.paging().skipped == 0
    over = Batch((Segment(0, 1024, (5,), Wanted.LAST),))
    assert stage.forward(over, None).skipping == {0}
    assert full.forward(over, None).skipping == set()


@pytest.mark.parametrize("policy", ["qk", "lru"])
@pytest.mark.parametrize(
    ("prefill", "position"),
    [(1300, 1300), (1280, 1280), (1300, 1330), (1300, 1335), (1300, 1336), (1300, 1343), (1300, 1344), (1300, 1400)],
    ids=[
        "after a chunk",
        "on a page edge",
        "in decode",
        "before the row that decides",
        "behind the row that decides",
        "before an edge",
        "decode on an edge",
        "decode behind an edge",
    ],
)
def test_a_hit_chooses_the_pages_that_the_straight_run_had(
    make_tiny: Any, policy: str, prefill: int, position: int
) -> None:
    tiny = make_tiny("dense")
    straight, other = sparse(tiny, policy=policy), sparse(tiny, policy=policy)
    feed(straight, 0, 0, prefill)
    if position > prefill:
        feed(straight, 0, prefill, position, step=1)
    parts = straight.capture(0)
    other.restore(1, position, parts)
    feed(other, 0, 0, 500)  # somebody else's pages come between
    for start, stop, step in [(position, position + 80, 1), (position + 80, position + 400, 128)]:
        assert same(feed(straight, 0, start, stop, step), feed(other, 1, start, stop, step))
    assert straight._tables[0].chosen == other._tables[1].chosen
    assert straight.paging().skipped > 0


def test_others_in_the_pool_do_not_change_what_is_attended(make_tiny: Any) -> None:
    tiny = make_tiny("dense")
    alone, shared = sparse(tiny), sparse(tiny)
    feed(shared, 1, 0, 900)
    for at in range(0, 1280, 128):
        assert same(feed(alone, 0, at, at + 128), feed(shared, 0, at, at + 128))
        feed(shared, 1, 900 + at // 128, 901 + at // 128, step=1)
    assert shared.paging().away_attended > 0, "what does not fit the pool is attended where it lies"
    shared.close(0)
    shared.close(1)
    shared.check()


def test_rewinding_over_a_page_edge_brings_back_the_choice(make_tiny: Any) -> None:
    tiny = make_tiny("dense")
    # The row 1335 decides for the page that begins at 1344; blocks begin before it and behind it.
    for start, keep in [(1340, 3), (1340, 6), (1340, 12), (1330, 3), (1330, 5), (1330, 6), (1330, 14), (1330, 16)]:
        stage, straight = sparse(tiny), sparse(tiny)
        for s in (stage, straight):
            feed(s, 0, 0, 1300)
            feed(s, 0, 1300, start, step=1)
        stage.forward(Batch((Segment(0, start, tuple(TOKENS[start : start + 18])),), rewindable=True), None)
        stage.rewind(0, start + keep)
        feed(straight, 0, start, start + keep, step=1)
        ours, theirs = (s._tables[0].queries.stacked() for s in (stage, straight))
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
        for s in (stage, straight):
            feed(s, 0, start + keep, start + keep + 20, step=1)
        assert stage._tables[0].chosen == straight._tables[0].chosen


def test_the_query_travels_over_a_link_and_to_disk(make_tiny: Any, tmp_path: Any) -> None:
    from rekindle.prompt import BoundaryKind
    from rekindle.snapshots.disk import DiskStore
    from rekindle.snapshots.types import Snapshot, Stretch

    stage = sparse(make_tiny("dense"))
    feed(stage, 0, 0, 640)
    feed(stage, 0, 640, 700, step=1)  # behind the row that decides: there are two queries
    parts = stage.capture(0)
    exported = export_parts(parts, {})
    tokens = np.asarray(TOKENS[:700], dtype=np.int32)
    store = DiskStore(tmp_path, "ab" * 32, 1 << 30)
    record = store.save(Snapshot(tokens, tuple(parts), None, 128, (Stretch(700, "prefill"),)), BoundaryKind.MESSAGE)
    loaded = store.load(record.id)
    for arrived in (import_parts(exported.entries, exported.tensors, {}), loaded.parts):
        for a, b in zip(parts, arrived, strict=True):
            assert list(a.tensors) == list(b.tensors) == ([TAIL, QUERY] if a.is_paged else ["state", "window"])
            if a.is_paged:
                assert a.tensors[QUERY].shape == (2, 4, 32)
                assert torch.equal(a.tensors[QUERY], b.tensors[QUERY])


def test_exact_snapshots_carry_no_query(make_tiny: Any) -> None:
    stage = make_tiny("dense").stage(slots=1, pages=7, host_pages=20)
    feed(stage, 0, 0, 12 * PAGE)
    assert not any(QUERY in part.tensors for part in stage.capture(0))

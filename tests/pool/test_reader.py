"""Reading a pool by hand: planted keys, no model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rekindle.batch import Segment
from rekindle.errors import PoolFull
from rekindle.kernels.attention import store_kv
from rekindle.kernels.ragged import Ragged
from rekindle.pool import KvMode, PagePool, PageTable, Policy, PoolReader
from rekindle.pool.choice import LEAD, choose
from rekindle.pool.segments import LATER
from rekindle.spec import PAGE

LAYERS, KV_HEADS, HEADS, DIM = 2, 2, 4, 64
CPU = torch.device("cpu")


class HandLayer:
    """One sequence whose queries, keys and values are given instead of computed."""

    def __init__(self, places: int, host_pages: int, mode: KvMode, policy: Policy = "qk") -> None:
        layers = LAYERS if mode == "exact" else 1  # in sparse mode a layer has a pool of its own
        self.pool = PagePool(places, layers, KV_HEADS, DIM, torch.float32, CPU, host_pages)
        self.reader = PoolReader(self.pool, mode, policy)
        self.table: PageTable = self.pool.new_table()

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [rows, HEADS, DIM], k and v [rows, KV_HEADS, DIM], the same in all layers; the last layer's output."""
        position, rows = self.table.position, len(q)
        self.reader.prepare([Segment(0, position, (0,) * rows)], [self.table], rewindable=False)
        (pages,) = self.reader.segment_pages()
        positions = torch.arange(position, position + rows, dtype=torch.int32)
        ragged = Ragged(
            starts=torch.tensor([0, rows], dtype=torch.int32),
            slots=torch.tensor([0], dtype=torch.int32),
            row_positions=positions,
            row_places=positions - pages.skipped * PAGE,
            row_segments=torch.zeros(rows, dtype=torch.int32),
            tables=torch.from_numpy(pages.places),
            lengths=(rows,),
            noted=None if pages.noted is None else torch.tensor([[pages.noted], [pages.table]]),
        )
        for layer in range(len(self.pool.kv)):
            store_kv(self.pool.kv[layer], k, v, ragged)
            out = self.reader.attend(layer, q, ragged, DIM**-0.5).view(q.shape)
        self.table.position += rows
        self.reader.advance()
        return out


def haystack(pages: int, needles: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random keys and values; in the middle of every needle page eight rows share a direction and a value."""
    draw = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, pages * PAGE, KV_HEADS, DIM, generator=draw)
    directions = torch.nn.functional.normalize(torch.randn(len(needles), DIM, generator=draw), dim=-1)
    values = torch.randn(len(needles), DIM, generator=draw)
    for page, direction, value in zip(needles, directions, values, strict=True):
        rows = slice(page * PAGE + 20, page * PAGE + 28)
        k[rows], v[rows] = direction * 8, value * 3
    return k, v, directions, values


def recalled(places: int, policy: Policy) -> int:
    """How many of the needles are found on the page behind the one whose rows ask for them."""
    pages, needles = 40, list(range(2, 34, 2))
    k, v, directions, values = haystack(pages, needles)
    layer = HandLayer(places, 200, "sparse", policy)
    idle = torch.randn(pages * PAGE, HEADS, DIM, generator=torch.Generator().manual_seed(4))
    for at in range(0, pages * PAGE, 256):
        layer.run(idle[at : at + 256], k[at : at + 256], v[at : at + 256])
    found = 0
    for direction, value in zip(directions, values, strict=True):
        ask = direction.expand(PAGE, HEADS, DIM) * 60
        small = torch.randn(PAGE, KV_HEADS, DIM) * 0.1
        layer.run(ask, small, small)  # the question, a chunk
        answer = layer.run(ask, small, small)[0]
        found += int(torch.cosine_similarity(answer, value.expand(HEADS, DIM), dim=-1).min() > 0.9)
    layer.pool.check()
    return found


def test_needles_outside_the_tail_are_found_by_their_keys_and_not_by_recency() -> None:
    by_keys, by_recency, by_all = recalled(9, "qk"), recalled(9, "lru"), recalled(100, "qk")
    print(f"needles found of 16 in 40 pages: qk {by_keys} and lru {by_recency} with 9 pages, {by_all} with all")
    assert by_keys == by_all == 16
    assert by_recency == 0


def test_sparse_reads_no_page_that_is_away() -> None:
    k, v, _, _ = haystack(40, [])
    layer = HandLayer(9, 100, "sparse")
    for at in range(0, 40 * PAGE, PAGE):
        layer.run(torch.randn(PAGE, HEADS, DIM), k[at : at + PAGE], v[at : at + PAGE])
    before = layer.pool.counts
    layer.run(torch.randn(1, HEADS, DIM), k[:1], v[:1])
    for _ in range(PAGE - 2):
        layer.run(torch.randn(1, HEADS, DIM), k[:1], v[:1])
    after = layer.pool.counts
    assert after.away_attended == before.away_attended
    assert after.choices == before.choices + 1, "once per page of decode"
    assert len(layer.table.chosen or ()) == 8


@pytest.mark.parametrize("mode", ["exact", "sparse"])
def test_whatever_pages_are_attended_the_result_is_attention_over_them(mode: KvMode) -> None:
    k, v, _, _ = haystack(40, [])
    layer = HandLayer(9, 100, mode)
    for at in range(0, 40 * PAGE, 4 * PAGE):
        layer.run(torch.randn(4 * PAGE, HEADS, DIM), k[at : at + 4 * PAGE], v[at : at + 4 * PAGE])
    q, own_k, own_v = torch.randn(1, HEADS, DIM), k[:1], v[:1]
    out = layer.run(q, own_k, own_v)[0]
    seen = layer.table.chosen if mode == "sparse" else range(40)
    assert seen is not None
    assert len(seen) == (8 if mode == "sparse" else 40)
    rows = torch.cat([torch.arange(i * PAGE, (i + 1) * PAGE) for i in seen])
    keys, values = torch.cat([k[rows], own_k]), torch.cat([v[rows], own_v])
    for head in range(HEADS):
        weights = (keys[:, head // 2] @ q[0, head] * DIM**-0.5).softmax(0)
        torch.testing.assert_close(out[head], weights @ values[:, head // 2], atol=1e-5, rtol=1e-4)


def test_pages_beyond_pool_and_host_are_refused_with_both_numbers() -> None:
    pool = PagePool(4, LAYERS, KV_HEADS, DIM, torch.float32, CPU, host_pages=3)
    table = pool.new_table()
    with pytest.raises(PoolFull, match="8 pages are needed, 7 of 7 are free"):
        pool.extend(table, 8 * PAGE)
    assert pool.free == 7
    pool.check()


def fill(layer: HandLayer, pages: int, chunk: int) -> None:
    k, v, _, _ = haystack(pages, [])
    for at in range(0, pages * PAGE, chunk):
        layer.run(torch.randn(chunk, HEADS, DIM), k[at : at + chunk], v[at : at + chunk])


@pytest.mark.parametrize("mode", ["exact", "sparse"])
def test_where_the_pool_is_short_a_page_is_copied_when_it_is_sealed_or_in_decode_a_few_rows_later(mode: KvMode) -> None:
    short, roomy = HandLayer(9, 100, mode), HandLayer(50, 100, mode)
    for layer in (short, roomy):
        fill(layer, 40, 4 * PAGE)
        fill(layer, 1, 1)  # a page in single rows
    assert all(page.copies is not None for page in short.table.pages[12:40]), "those sealed since the first one left"
    assert short.table.pages[40].copies is None, "at the edge of a page the host has other things to do"
    for _ in range(LATER):
        for layer in (short, roomy):
            layer.run(torch.randn(1, HEADS, DIM), *torch.randn(2, 1, KV_HEADS, DIM))
    assert short.table.pages[40].copies is not None
    assert all(page.copies is None for page in roomy.table.pages), "nobody will leave"


def test_in_decode_pages_are_scored_once_per_page_and_some_rows_before_they_are_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = HandLayer(9, 100, "sparse")
    fill(layer, 40, 4 * PAGE)
    fill(layer, 1, 1)
    scored = list[int]()
    score = layer.reader._score
    monkeypatch.setattr(layer.reader, "_score", lambda *of: scored.append(layer.table.position % PAGE) or score(*of))
    before = layer.pool.counts.choices
    fill(layer, 2, 1)
    assert scored == [PAGE - LEAD] * 2, "behind the row that decides, and not again when its page is chosen for"
    assert layer.pool.counts.choices == before + 2


def test_at_the_edge_of_a_page_the_next_pages_are_known_already(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = HandLayer(9, 100, "sparse")
    fill(layer, 40, 4 * PAGE)
    chosen_at = list[int]()

    def chosen(sealed: int, room: int, scores: np.ndarray | None) -> tuple[int, ...]:
        chosen_at.append(layer.table.position % PAGE)
        return choose(sealed, room, scores)

    monkeypatch.setattr("rekindle.pool.choice.choose", chosen)
    monkeypatch.setattr("rekindle.pool.reader.choose", chosen)
    fill(layer, 2, 1)
    assert chosen_at == [0, PAGE - LEAD, PAGE - LEAD], "behind the prompt; then as soon as the scores are here"


def test_pages_that_leave_together_are_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = HandLayer(9, 100, "exact")
    fill(layer, 8, 4 * PAGE)
    asked = list[int]()
    take = layer.pool.copies.take_pages
    monkeypatch.setattr(
        layer.pool.copies, "take_pages", lambda kv, places: asked.append(len(places)) or take(kv, places)
    )
    layer.reader.prepare([Segment(0, 8 * PAGE, (0,) * (4 * PAGE))], [layer.table], rewindable=False)
    assert asked == [3]
    assert layer.pool.counts.page_outs == 3


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_remembered_places_are_those_of_a_fresh_look(data: st.DataObject) -> None:
    pool = PagePool(9, 1, KV_HEADS, DIM, torch.float32, CPU, host_pages=30)
    reader = PoolReader(pool, "sparse", "lru")
    tables = [pool.new_table() for _ in range(3)]
    for _ in range(data.draw(st.integers(1, 25))):
        table = data.draw(st.sampled_from(tables))
        act = data.draw(st.sampled_from(["run", "run", "run", "cut", "clear", "share"]))
        if act == "run":
            rows = data.draw(st.integers(1, 150))
            if table.missing(table.position + rows) <= pool.free:
                reader.prepare([Segment(0, table.position, (0,) * rows)], [table], rewindable=False)
                table.position += rows
                reader.advance()
        elif act == "cut" and table.position and pool.free:
            pool.truncate(table, data.draw(st.integers(0, table.position)))
        elif act == "share" and table.position and len(table.pages) <= pool.free:
            other = tables[(table.number + 1) % 3]
            copies = pool.export(table.pages[: table.sealed])
            pool.clear(other)
            other.pages.extend(pool.adopt(copy) for copy in copies)
            other.position = len(other.pages) * PAGE
            reader.take_up(other, None)
        elif act == "clear":
            pool.clear(table)
        for each in tables:
            fresh = [each.pages[i].place for i in each.attended()]
            assert pool.list_pages(each).places.tolist() == [
                pool.scratch_page if place is None else place for place in fresh
            ]

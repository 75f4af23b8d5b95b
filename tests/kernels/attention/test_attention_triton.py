"""The Triton attention computes the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rekindle.kernels.attention import naive, triton
from rekindle.kernels.attention.rows import row_size
from rekindle.spec import PAGE


@pytest.fixture(autouse=True)
def _small_device(monkeypatch):
    """Splits for a device of a few multiprocessors: the interpreter pays for every program."""
    monkeypatch.setattr(triton, "processors", lambda _: 6)


def _case(make_ragged, segments, heads, kv_heads, dim, dtype=torch.float32):
    """Segments as (position, length) over scattered pages; what nobody wrote is NaN."""
    needs = [-(-(position + length) // PAGE) for position, length in segments]
    pages = torch.randperm(sum(needs) + 2).tolist()
    tables = [[pages.pop() for _ in range(need)] for need in needs]
    kv = torch.full((sum(needs) + 2, 2, PAGE, kv_heads, dim), torch.nan, dtype=dtype)
    for table, (position, length) in zip(tables, segments, strict=True):
        n = position + length
        k, v = torch.randn(n, kv_heads, dim).to(dtype), torch.randn(n, kv_heads, dim).to(dtype)
        triton.store_kv(kv, k, v, make_ragged([(0, 0, n)], [table]))
    rows = sum(length for _, length in segments)
    both = torch.randn(rows, heads, 2 * dim).to(dtype)  # [q | gate] per head
    ragged = make_ragged([(i, position, length) for i, (position, length) in enumerate(segments)], tables)
    return both[..., :dim], both[..., dim:], kv, ragged


CASES = [
    [(0, 1)],
    [(64, 1)],
    [(400, 1)],
    [(0, 65)],
    [(63, 2), (0, 1), (130, 5)],
    [(100, 70), (5, 1), (300, 1)],
]


@pytest.mark.parametrize("segments", CASES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
def test_attention_agrees(make_ragged, segments, heads, kv_heads):
    torch.manual_seed(len(segments) + heads)
    q, gate, kv, ragged = _case(make_ragged, segments, heads, kv_heads, 16)
    expected = naive.attend(q, kv, ragged, 0.25)
    torch.testing.assert_close(triton.attend(q, kv, ragged, 0.25), expected, atol=1e-5, rtol=1e-4)
    gated = triton.attend_gated(q, kv, ragged, 0.25, gate)
    torch.testing.assert_close(gated, naive.sigmoid_gate(expected, gate), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("rows", "most"), [(5, 8), (8, 8), (20, 24)])
def test_a_recorded_block_attends_as_a_plain_one_and_its_padding_is_finite(make_ragged, rows, most):
    torch.manual_seed(rows)
    q, gate, kv, ragged = _case(make_ragged, [(130, rows), (0, 1)], 4, 2, 16)
    block = _case_rows(ragged, rows, most)
    queries = torch.cat([q[:rows], torch.randn(most - rows, 4, 16)])
    gates = torch.cat([gate[:rows], torch.randn(most - rows, 4, 16)])
    kv[ragged.tables[1, 0]] = 1.0  # padding may read all of its page
    got = triton.attend_gated(queries, kv, block, 0.25, gates)
    expected = naive.sigmoid_gate(naive.attend(q, kv, ragged, 0.25), gate)
    torch.testing.assert_close(got[:rows], expected[:rows], atol=1e-5, rtol=1e-4)
    assert got.isfinite().all()


def _case_rows(ragged, rows, most):
    """The first segment as a block of at most so many rows, the second as padding that takes the rest."""
    more = torch.arange(most - rows, dtype=torch.int32)
    places = torch.cat([ragged.row_places[:rows], more])
    return replace(
        ragged,
        starts=torch.tensor([0, rows, most], dtype=torch.int32),
        row_positions=places,
        row_places=places,
        row_segments=torch.cat([torch.zeros(rows), torch.ones(most - rows)]).int(),
        lengths=(most, 0),
    )


@pytest.mark.parametrize("processors", [6, 32])
@pytest.mark.parametrize("segments", [[(900, 1)], [(70, 12)], [(0, 70)], [(640, 3), (5, 1), (63, 1)]])
def test_half_precision_tiles_agree_with_and_without_a_program_per_page(make_ragged, monkeypatch, segments, processors):
    torch.manual_seed(7)
    monkeypatch.setattr(triton, "processors", lambda _: processors)
    q, _, kv, ragged = _case(make_ragged, segments, 4, 1, 16, torch.float16)
    expected = naive.attend(q, kv, ragged, 0.25)
    torch.testing.assert_close(triton.attend(q, kv, ragged, 0.25), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("segments", [[(900, 1)], [(70, 12)], [(100, 70), (5, 1)]])
def test_float32_queries_over_narrower_pages_lose_nothing(make_ragged, segments):
    torch.manual_seed(9)
    _, _, kv, ragged = _case(make_ragged, segments, 4, 2, 16, torch.float16)
    q, gate = torch.randn(2, sum(length for _, length in segments), 4, 16) * 3
    expected = naive.attend(q, kv, ragged, 0.25)
    torch.testing.assert_close(triton.attend(q, kv, ragged, 0.25), expected, atol=1e-5, rtol=1e-5)
    gated = triton.attend_gated(q, kv, ragged, 0.25, gate)
    torch.testing.assert_close(gated, naive.sigmoid_gate(expected, gate), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("segments", [[(70, 1)], [(63, 9), (0, 1)]])
def test_packed_rows_are_stored_and_read_as_defined(make_ragged, segments):
    torch.manual_seed(11)
    needs = [-(-(position + length) // PAGE) for position, length in segments]
    kv = torch.full((sum(needs), 2, PAGE, 2, row_size("q8", 64)), 255, dtype=torch.uint8)
    expected_kv, tables, first = kv.clone(), [], 0
    for (position, length), need in zip(segments, needs, strict=True):
        tables.append(list(range(first, first + need)))
        n, first = position + length, first + need
        k, v = 3 * torch.randn(n, 2, 64), torch.randn(n, 2, 64)
        k[0, 0, :32] = 0.0
        triton.store_kv(kv, k, v, make_ragged([(0, 0, n)], [tables[-1]]))
        naive.store_kv(expected_kv, k, v, make_ragged([(0, 0, n)], [tables[-1]]))
    assert torch.equal(kv, expected_kv)
    q = torch.randn(sum(length for _, length in segments), 4, 64)
    ragged = make_ragged([(i, position, length) for i, (position, length) in enumerate(segments)], tables)
    expected = naive.attend(q, kv, ragged, 0.125)
    torch.testing.assert_close(triton.attend(q, kv, ragged, 0.125), expected, atol=1e-5, rtol=1e-4)


def test_parts_over_any_pages_agree_and_merge_to_the_whole(make_ragged):
    torch.manual_seed(8)
    q, _, kv, ragged = _case(make_ragged, [(600, 3)], 4, 2, 16)
    table, rows = ragged.tables[0], ragged.row_positions
    parts = []
    for chosen in (torch.tensor([0, 3, 7, 9]), torch.tensor([1, 2, 4, 5, 6, 8])):
        got = triton.attend_partial(q, kv, table[chosen], chosen * PAGE, rows, 0.25)
        expected = naive.attend_partial(q, kv, table[chosen], chosen * PAGE, rows, 0.25)
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)
        parts.append(got)
    merged = naive.merge_partials(*zip(*parts, strict=True))
    torch.testing.assert_close(merged, naive.attend(q, kv, ragged, 0.25), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 40])
def test_pages_before_all_rows_are_seen_whole(make_ragged, rows):
    torch.manual_seed(12)
    q, _, kv, ragged = _case(make_ragged, [(600, rows)], 4, 2, 16)
    chosen = torch.tensor([7, 0, 3, 8, 2])  # their order says nothing
    listed = triton.attend_partial(q, kv, ragged.tables[0, chosen], chosen * PAGE, ragged.row_positions, 0.25)
    for attend_whole in (triton.attend_whole, naive.attend_whole):
        for got, expected in zip(attend_whole(q, kv, ragged.tables[0, chosen], 0.25), listed, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_a_part_no_row_may_see_has_no_weight(make_ragged):
    torch.manual_seed(9)
    q, _, kv, ragged = _case(make_ragged, [(100, 2)], 4, 2, 16)
    out, lse = triton.attend_partial(q, kv, ragged.tables[0, 1:], torch.tensor([64]), torch.tensor([10, 101]), 0.25)
    assert lse[0].eq(-torch.inf).all()
    assert out[0].eq(0).all()
    assert lse[1].isfinite().all()


def test_gates_agree():
    torch.manual_seed(10)
    both, o = torch.randn(3, 5, 24), torch.randn(3, 5, 12)
    torch.testing.assert_close(triton.sigmoid_gate(o, both[..., 12:]), naive.sigmoid_gate(o, both[..., 12:]))


@pytest.mark.usefixtures("small_card")
@pytest.mark.parametrize("segments", [[(200, 1)], [(70, 20), (5, 1)]])
def test_the_forms_of_smaller_cards_agree(make_ragged, segments):
    torch.manual_seed(13)
    q, gate, kv, ragged = _case(make_ragged, segments, 4, 1, 16, torch.float16)
    expected = naive.sigmoid_gate(naive.attend(q, kv, ragged, 0.25), gate)
    torch.testing.assert_close(triton.attend_gated(q, kv, ragged, 0.25, gate), expected, atol=2e-3, rtol=2e-3)
    wide = q.float()
    expected = naive.attend(wide, kv, ragged, 0.25)
    torch.testing.assert_close(triton.attend(wide, kv, ragged, 0.25), expected, atol=1e-5, rtol=1e-5)

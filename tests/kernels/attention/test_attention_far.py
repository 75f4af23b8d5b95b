"""Attention over pages that lie anywhere is attention over the same pages in the pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rekindle.kernels.attention import far, naive
from rekindle.kernels.attention.rows import KV_DTYPES, row_size
from rekindle.spec import PAGE


@pytest.fixture(autouse=True)
def _small_device(monkeypatch):
    """Fewer programs than pages, and tiles that do not hold all rows: the interpreter pays for every program."""
    monkeypatch.setattr(far, "filling", lambda *_: 12)
    monkeypatch.setattr(far, "is_roomy", lambda _: False)


def _case(make_ragged, segments, kv_type, heads=4, kv_heads=2, dim=32):
    """Pages in the pool, and the same bytes elsewhere for every second of them; what nobody wrote is NaN."""
    needs = [-(-(position + length) // PAGE) for position, length in segments]
    order = torch.randperm(sum(needs) + 1).tolist()
    tables = [[order.pop() for _ in range(need)] for need in needs]
    dtype, row = KV_DTYPES[kv_type], row_size(kv_type, dim)
    kv = torch.full((sum(needs) + 1, 2, PAGE, kv_heads, row), 255 if kv_type == "q8" else torch.nan, dtype=dtype)
    for table, (position, length) in zip(tables, segments, strict=True):
        n = position + length
        naive.store_kv(kv, *torch.randn(2, n, kv_heads, dim), make_ragged([(0, 0, n)], [table]))
    q, gate = torch.randn(2, sum(length for _, length in segments), heads, dim)
    ragged = make_ragged([(i, position, length) for i, (position, length) in enumerate(segments)], tables)
    elsewhere = [page.clone() for page in kv]
    pool = torch.full_like(kv, 255 if kv_type == "q8" else torch.nan)
    pool[::2] = kv[::2]
    page_addresses = torch.tensor([(elsewhere[i] if i % 2 else pool[i]).data_ptr() for i in range(len(kv))])
    return q, gate, kv, pool, page_addresses, elsewhere, ragged


@pytest.mark.parametrize("kv_type", ["f32", "q8"])
@pytest.mark.parametrize("segments", [[(0, 1)], [(64, 1)], [(63, 1), (700, 1), (5, 1)], [(630, 12), (100, 3), (0, 1)]])
def test_far_pages_are_attended_as_if_they_were_in_the_pool(make_ragged, segments, kv_type):
    torch.manual_seed(len(segments))
    q, gate, kv, pool, page_addresses, _held, ragged = _case(make_ragged, segments, kv_type)
    expected = naive.attend(q, kv, ragged, 0.25)
    assert torch.equal(naive.attend_far(q, pool, page_addresses, ragged, 0.25, None), expected.flatten(1))
    got = far.attend_far(q, pool, page_addresses, ragged, 0.25, None)
    torch.testing.assert_close(got, expected.flatten(1), atol=1e-5, rtol=1e-4)
    gated = far.attend_far(q, pool, page_addresses, ragged, 0.25, gate)
    torch.testing.assert_close(gated, naive.sigmoid_gate(expected, gate), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rows", [5, 8])
def test_a_recorded_block_attends_as_a_plain_one(make_ragged, rows):
    most = 8
    q, gate, kv, pool, page_addresses, _held, ragged = _case(
        make_ragged, [(130, rows), (0, max(1, most - rows))], "f32"
    )
    q, gate = q[:most], gate[:most]
    block = replace(ragged, starts=torch.tensor([0, rows, most]).int(), lengths=(most, 0))
    expected = naive.sigmoid_gate(naive.attend(q[:rows], kv, make_one(ragged, rows), 0.25), gate[:rows])
    got = far.attend_far(q, pool, page_addresses, block, 0.25, gate)
    torch.testing.assert_close(got[:rows], expected, atol=1e-5, rtol=1e-4)


def make_one(ragged, rows):
    """Only the first segment."""
    return replace(
        ragged,
        starts=torch.tensor([0, rows]).int(),
        slots=ragged.slots[:1],
        row_positions=ragged.row_positions[:rows],
        row_places=ragged.row_places[:rows],
        row_segments=ragged.row_segments[:rows],
        tables=ragged.tables[:1],
        lengths=(rows,),
    )

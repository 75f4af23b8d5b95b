"""Laws of paged attention, on the CPU form."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rekindle.kernels import attention
from rekindle.spec import PAGE


def _kv(pages, kv_heads, dim):
    return torch.full((pages, 2, PAGE, kv_heads, dim), torch.nan)  # what nobody wrote must not be read


def _filled(make_ragged, kv, k, v, table):
    """Store a whole sequence [n, kv_heads, dim] through the given pages."""
    attention.store_kv(kv, k, v, make_ragged([(0, 0, k.shape[0])], [table]))


@pytest.mark.parametrize(("position", "length"), [(0, 1), (0, 65), (63, 2), (64, 1), (130, 70), (1023, 3), (2100, 1)])
def test_attention_equals_dense_attention_over_the_written_positions(make_ragged, position, length):
    torch.manual_seed(position + length)
    n = position + length
    pages = -(-n // PAGE)
    q, k, v = torch.randn(length, 6, 16), torch.randn(n, 2, 16), torch.randn(n, 2, 16)
    table = torch.randperm(pages + 3)[:pages].tolist()
    kv = _kv(pages + 3, 2, 16)
    _filled(make_ragged, kv, k, v, table)
    out = attention.attend(q, kv, make_ragged([(0, position, length)], [table]), 0.25)
    mask = torch.arange(n) <= torch.arange(position, n)[:, None]
    expected = scaled_dot_product_attention(
        q.transpose(0, 1), k.repeat_interleave(3, 1).transpose(0, 1), v.repeat_interleave(3, 1).transpose(0, 1),
        attn_mask=mask, scale=0.25,
    )  # fmt: skip
    torch.testing.assert_close(out, expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_neither_pages_nor_neighbours_touch_the_bits_of_a_segment(make_ragged):
    torch.manual_seed(1)
    k, v = torch.randn(300, 2, 16), torch.randn(300, 2, 16)
    q = torch.randn(40, 4, 16)
    kv = _kv(20, 2, 16)
    for table in ([0, 1, 2, 3, 4], [17, 13, 9, 8, 12]):
        _filled(make_ragged, kv, k, v, table)
    alone = attention.attend(q, kv, make_ragged([(0, 260, 40)], [[0, 1, 2, 3, 4]]), 0.25)
    scattered = attention.attend(q, kv, make_ragged([(0, 260, 40)], [[17, 13, 9, 8, 12]]), 0.25)
    both = make_ragged([(3, 100, 1), (0, 260, 40)], [[0, 1], [17, 13, 9, 8, 12]])
    beside = attention.attend(torch.cat((torch.randn(1, 4, 16), q)), kv, both, 0.25)[1:]
    assert torch.equal(alone, scattered)
    assert torch.equal(alone, beside)


def test_parts_over_the_groups_of_pages_merge_to_the_bits_of_the_whole(make_ragged):
    torch.manual_seed(2)
    n = attention.GROUP * PAGE + 200
    pages = -(-n // PAGE)
    k, v, q = torch.randn(n, 1, 8), torch.randn(n, 1, 8), torch.randn(5, 2, 8)
    kv = _kv(pages, 1, 8)
    _filled(make_ragged, kv, k, v, range(pages))
    whole = attention.attend(q, kv, make_ragged([(0, n - 5, 5)]), 0.3)
    groups = torch.arange(pages).split(attention.GROUP)
    elsewhere = [kv[group].clone() for group in groups]  # as if each group lay in other memory
    rows = torch.arange(n - 5, n)
    parts = [
        attention.attend_partial(q, part, torch.arange(len(group)), group * PAGE, rows, 0.3)
        for part, group in zip(elsewhere, groups, strict=True)
    ]
    assert torch.equal(whole, attention.merge_partials(*zip(*parts, strict=True)))


def test_a_part_no_row_may_see_adds_nothing(make_ragged):
    torch.manual_seed(3)
    k, v, q = torch.randn(128, 1, 8), torch.randn(128, 1, 8), torch.randn(2, 2, 8)
    kv = _kv(2, 1, 8)
    _filled(make_ragged, kv, k, v, range(2))
    rows = torch.tensor([10, 90])  # the first row sees nothing of the second page
    parts = [attention.attend_partial(q, kv, torch.tensor([i]), torch.tensor([i * PAGE]), rows, 1.0) for i in (0, 1)]
    assert parts[1][1][0].eq(-torch.inf).all()
    merged = attention.merge_partials(*zip(*parts, strict=True))
    assert torch.equal(merged[0], parts[0][0][0])


def test_the_gate_may_be_a_strided_view():
    torch.manual_seed(4)
    both = torch.randn(3, 4, 16)  # [q | gate] per head
    o = torch.randn(3, 4, 8)
    expected = (o * torch.sigmoid(both[..., 8:])).reshape(3, 32)
    torch.testing.assert_close(attention.sigmoid_gate(o, both[..., 8:]), expected)

"""The Triton argmax and draw compute the definition."""

from __future__ import annotations

import pytest
import torch
from support.broken_rows import broken_rows

from rekindle.kernels.sampling import naive, triton


def test_argmax_agrees_and_breaks_ties_downwards():
    torch.manual_seed(0)
    logits = torch.randn(4, triton.PART * 2 + 77)
    logits[1, [5, 6, triton.PART + 3]] = 9.0
    logits[2, [triton.PART * 2 + 76]] = 9.0
    logits[3] = -torch.inf
    logits[3, 4] = -3.0
    assert triton.argmax(logits).tolist() == logits.argmax(-1).tolist()
    assert triton.argmax(logits)[1:].tolist() == [5, triton.PART * 2 + 76, 4]


@pytest.fixture(autouse=True)
def _small_runs(monkeypatch):
    """Several runs and parts of a small vocabulary, and more than one round of selection."""
    monkeypatch.setattr(triton, "RUN", 64)
    monkeypatch.setattr(triton, "FINAL", 32)
    monkeypatch.setattr(triton, "OPEN_PART", 64)


def test_columns_that_a_view_leaves_out_are_never_drawn():
    torch.manual_seed(7)
    whole = torch.randn(4, 192)
    whole[:, 181:] = 50.0
    logits = whole[:, :181]
    assert triton.argmax(logits).tolist() == logits.argmax(-1).tolist()
    for top_k, draw in ((torch.randint(1, 17, (4,)), triton.draw_narrow), (torch.zeros(4), triton.draw_open)):
        settings = _settings(4, top_k)
        assert draw(logits, settings).tolist() == draw(logits.contiguous(), settings).tolist()
        assert max(draw(logits, settings).tolist()) < 181


def _settings(rows, top_k):
    return torch.stack(
        (
            torch.rand(rows) * 2 + 0.05,
            top_k.float(),
            torch.rand(rows).where(torch.rand(rows) > 0.3, 1.0),
            (torch.rand(rows) - 0.5).clamp(min=0).where(torch.rand(rows) > 0.5, 0.0) / 4,
            torch.rand(rows),
        )
    )


def _defined(logits, settings):
    values, tokens = logits.sort(dim=-1, descending=True, stable=True)
    return naive.draw(values, tokens, settings, logits.shape[1]).tolist()


@pytest.mark.parametrize("coarse", [False, True])  # coarse logits, as a bfloat16 head gives them: many are equal
def test_draws_among_the_best_agree(coarse):
    torch.manual_seed(1)
    logits = 3 * torch.randn(4, 200)
    if coarse:
        logits = logits.round()
    settings = _settings(4, torch.randint(1, 17, (4,)))
    settings[0, ::3] = 0.0
    assert triton.draw_narrow(logits, settings).tolist() == _defined(logits, settings)


@pytest.mark.parametrize("coarse", [False, True])
def test_draws_among_all_agree(coarse):
    torch.manual_seed(2)
    logits = 4 * torch.randn(4, 200)
    if coarse:
        logits = logits.round()
    settings = _settings(4, torch.zeros(4))
    settings[2, :3] = torch.tensor([0.0, 0.6, 0.999])
    assert triton.draw_open(logits, settings).tolist() == _defined(logits, settings)


def test_masked_logits_are_never_drawn():
    torch.manual_seed(3)
    logits = torch.full((4, 150), -torch.inf)
    logits[:, [7, 80, 149]] = torch.randn(4, 3)
    for top_k, draw in ((5, triton.draw_narrow), (0, triton.draw_open)):
        settings = torch.stack(
            [torch.full((4,), x) for x in (1.0, top_k, 0.95, 0.0)] + [torch.linspace(0, 1 - 2**-23, 4)]
        )
        assert set(draw(logits, settings).tolist()) <= {7, 80, 149}


def test_rows_of_every_kind_are_drawn_as_if_alone():
    torch.manual_seed(4)
    logits = 3 * torch.randn(5, 150)
    settings = _settings(5, torch.tensor([0, 5, 140, 0, 7]))
    settings[0, 4] = 0.0
    together = triton.sample(logits, settings).tolist()
    assert together == [triton.sample(logits[i : i + 1], settings[:, i : i + 1])[0].item() for i in range(5)]
    assert together == _defined(logits, settings)


@pytest.mark.parametrize("width", [5, 200])
def test_a_nan_of_either_sign_stands_first_on_every_device(width):
    """A GPU sorts by bits, where one NaN is above all numbers and another below."""
    values, _ = naive.highest(broken_rows(200), width)
    assert values[1:5, 0].tolist() == [torch.inf] * 4


def test_logits_that_are_no_numbers_give_no_token_as_defined():
    logits = broken_rows(triton.PART + 77)
    assert triton.argmax(logits).tolist() == naive.argmax(logits).tolist() == [logits[0].argmax().item()] + [-1] * 5
    logits = broken_rows(200)
    for temperature, top_k in ((0.0, 0), (0.8, 0), (0.8, 5), (0.8, 150)):
        settings = torch.stack([torch.full((6,), x) for x in (temperature, top_k, 0.9, 0.01, 0.4)])
        drawn = triton.sample(logits, settings).tolist()
        assert drawn == _defined(logits, settings)
        assert drawn[1:] == [-1] * 5


@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [2], [3, 0]], ids=["every row", "one row", "some, in any order"])
@pytest.mark.parametrize("words", [3, 2, 5], ids=["as wide as the vocabulary", "narrower", "wider"])
def test_masks_agree(rows, words):
    torch.manual_seed(8)
    logits = torch.randn(4, 128)[:, :90]
    logits[2, 7] = torch.nan
    masks = torch.randint(-(2**31), 2**31, (len(rows), words), dtype=torch.int32)
    found, expected = triton.keep_allowed(logits, masks, rows), naive.keep_allowed(logits, masks, rows)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert expected[2, 7].isnan()


def test_penalties_agree_over_several_parts_and_rows_of_a_view():
    torch.manual_seed(3)
    vocab = triton.PART + 300
    logits = torch.randn(3, vocab + 5)[:, :vocab]
    counts = torch.randint(0, 4, (2, vocab), dtype=torch.int32) * (torch.rand(2, vocab) < 0.1)
    counts[:, ::7] |= naive.IN_PROMPT
    penalties = [
        naive.Penalty(counts[0].int(), [5, 5, vocab - 1], 0.5, 0.25, 1.3),
        None,
        naive.Penalty(counts[1].int(), [], -0.5, 0.125, 0.8),
    ]
    by_definition = [row.cpu() for row in naive.penalise(logits.cpu(), [_on_cpu(penalty) for penalty in penalties])]
    for row, wanted in zip(triton.penalise(logits, penalties), by_definition, strict=True):
        torch.testing.assert_close(row.cpu(), wanted, rtol=1e-6, atol=1e-6)


def _on_cpu(penalty: naive.Penalty | None) -> naive.Penalty | None:
    return None if penalty is None else penalty._replace(counts=penalty.counts.cpu())


def test_what_was_drawn_is_counted_where_it_lies():
    counts = torch.zeros(2, 40, dtype=torch.int32)
    triton.count_drawn(torch.tensor([7, 3, -1]), [counts[0], None, counts[1]])
    triton.count_drawn(torch.tensor([7, 39]), [counts[0], counts[1]])
    assert counts.nonzero().tolist() == [[0, 7], [1, 39]] and counts[0, 7] == 2


def test_a_mask_may_take_the_memory_of_its_logits():
    logits = torch.randn(2, 70)
    mask = torch.full((1, 3), 5, dtype=torch.int32, device="cpu")
    wanted = triton.keep_allowed(logits, mask, [1])
    assert triton.keep_allowed(logits, mask, [1], own=True) is logits and torch.equal(logits, wanted)

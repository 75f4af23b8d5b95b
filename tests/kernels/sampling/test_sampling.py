"""Laws of sampling."""

from __future__ import annotations

import math

import pytest
import torch
from support.broken_rows import broken_rows

from rekindle.kernels import sampling
from rekindle.kernels.sampling import naive


def _sample(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.5):
    rows = logits.shape[0]
    filled = [torch.full((rows,), x) for x in (temperature, top_k, top_p, min_p)]
    uniforms = uniform if isinstance(uniform, torch.Tensor) else torch.full((rows,), uniform)
    return sampling.sample(logits, *filled, uniforms)


def _support(logits, **settings):
    """Tokens that any uniform number can draw."""
    uniforms = torch.linspace(0, 1 - 1e-6, 400)
    return set(_sample(logits.expand(400, -1), uniform=uniforms, **settings).tolist())


def test_zero_temperature_takes_the_lowest_of_the_highest():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 5.0, 5.0]])
    assert _sample(logits, temperature=0.0).tolist() == [1, 0]


def test_greedy_rows_stay_greedy_among_drawn_ones():
    logits = torch.tensor([[0.0, 2.0, 2.0], [0.0, 2.0, 2.0]])
    off = torch.zeros(2)
    drawn = sampling.sample(
        logits, torch.tensor([0.0, 1.0]), torch.zeros(2, dtype=torch.int64), torch.ones(2), off, torch.full((2,), 0.99)
    )
    assert drawn.tolist() == [1, 2]


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    uniforms = (torch.arange(800) + 0.5) / 800
    drawn = _sample(logits.expand(800, -1), uniform=uniforms)
    assert torch.bincount(drawn).tolist() == [400, 200, 100, 100]


@pytest.mark.parametrize("vocab", [4, 300, 64 * 16])  # also where runs of the vocabulary are searched side by side
def test_each_filter_keeps_what_it_promises(vocab):
    probabilities = torch.tensor([0.1, 0.5, 0.25, 0.15])
    logits = torch.full((1, vocab), -100.0)
    logits[0, :4] = probabilities.log()
    assert _support(logits, top_k=2) == {1, 2}
    assert _support(logits, top_p=0.6) == {1, 2}
    assert _support(logits, top_p=0.49) == {1}
    assert _support(logits, min_p=0.29) == {1, 2, 3}
    assert _support(logits, top_k=3, top_p=0.5, min_p=0.4) == {1}
    assert _support(logits, top_p=0.0) == {1}


def test_a_draw_depends_on_its_own_row_alone():
    torch.manual_seed(0)
    logits, uniforms = torch.randn(5, 200), torch.rand(5)
    settings = (
        torch.tensor([0.7, 0.0, 1.0, 1.3, 0.9]),
        torch.tensor([20, 5, 0, 3, 150]),
        torch.rand(5),
        torch.rand(5) / 9,
    )
    together = sampling.sample(logits, *settings, uniforms)
    for i in range(5):
        alone = sampling.sample(logits[i : i + 1], *(x[i : i + 1] for x in settings), uniforms[i : i + 1])
        assert together[i] == alone[0]


def _counts(prompt: list[int], answer: list[int], vocab: int) -> torch.Tensor:
    counts = torch.zeros(vocab, dtype=torch.int32)
    counts[prompt] = sampling.IN_PROMPT
    sampling.count_tokens(counts, answer)
    return counts


def test_penalties_count_what_they_say():
    logits = torch.tensor([[2.0, -2.0, 2.0, 1.0], [2.0, -2.0, 2.0, 1.0]])
    counts = _counts([0, 1], [2], 4)
    out = sampling.penalise(logits, [sampling.Penalty(counts, [2], 0.5, 0.25, 2.0), None])
    assert out.tolist() == [[1.0, -4.0, 1.0 - 0.5 - 0.5, 1.0], [2.0, -2.0, 2.0, 1.0]]
    assert counts.tolist() == _counts([0, 1], [2], 4).tolist(), "drafted tokens are not counted for good"
    assert torch.equal(sampling.penalise(logits, [sampling.Penalty(counts, [2], 0.0, 0.0, 1.0)] * 2), logits)


def test_what_was_drawn_is_counted_in_the_rows_that_count():
    first, last = _counts([1], [], 4), _counts([], [3], 4)
    sampling.count_drawn(torch.tensor([1, 2, -1]), [first, None, last])
    assert first.tolist() == _counts([1], [1], 4).tolist()
    assert last.tolist() == _counts([], [3], 4).tolist(), "-1 is no token"


def test_bias_is_added_where_it_was_asked():
    biased = sampling.add_bias(torch.zeros(2, 3), torch.tensor([1, 1]), torch.tensor([2, 0]), torch.tensor([4.0, -1.0]))
    assert biased.tolist() == [[0.0, 0.0, 0.0], [-1.0, 0.0, 4.0]]


def test_log_probabilities_are_those_of_the_softmax():
    probabilities = torch.tensor([[0.1, 0.6, 0.3]])
    result = sampling.log_softmax_at(probabilities.log() + 7.0, torch.tensor([2]), 2)
    assert math.isclose(result.chosen[0], math.log(0.3), abs_tol=1e-5)
    torch.testing.assert_close(result.top.exp(), torch.tensor([[0.6, 0.3]]))
    assert result.top_tokens.tolist() == [[1, 2]]


def test_ties_at_the_edge_of_top_k_do_not_depend_on_the_batch():
    torch.manual_seed(2)
    logits = torch.randint(0, 3, (2, 64 * 16)).float()  # hundreds of equal logits
    uniforms = torch.tensor([0.9, 0.9])
    ones, off = torch.ones(2), torch.zeros(2)
    for other in (3, 7, 130, 0):  # the other row's top_k decides how many candidates are selected, and how
        drawn = sampling.sample(logits, ones, torch.tensor([5, other]), ones, off, uniforms)
        assert drawn[0] == (logits[0] == 2).nonzero()[4, 0]


def test_a_uniform_number_near_one_takes_the_last_that_stayed():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.5]])
    assert _sample(logits, top_k=3, uniform=1 - 2**-24).tolist() == [2]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("top_k", [0, 5, 150])
def test_no_token_is_drawn_from_logits_that_are_no_numbers(temperature, top_k):
    drawn = _sample(broken_rows(64 * 16), temperature=temperature, top_k=top_k, top_p=0.9)
    assert drawn[0] >= 0
    assert drawn[1:].tolist() == [-1] * 5


def test_a_greedy_row_of_no_numbers_beside_drawn_ones_gives_no_token():
    logits = broken_rows(300)
    temperature = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    off = torch.zeros(6)
    drawn = sampling.sample(logits, temperature, off, torch.ones(6), off, torch.full((6,), 0.5))
    assert drawn[0] >= 0
    assert drawn[1:].tolist() == [-1] * 5


def test_a_mask_leaves_what_its_bits_allow_and_other_rows_as_they_are():
    logits = torch.arange(3 * 70.0).view(3, 70)
    allowed = {0, 31, 32, 63, 64}
    words = [sum(1 << token % 32 for token in allowed if token // 32 == word) for word in range(3)]
    masks = torch.tensor([words], dtype=torch.int64).to(torch.int32)
    masked = sampling.keep_allowed(logits, masks, [1])
    assert torch.equal(masked[[0, 2]], logits[[0, 2]])
    assert set(masked[1].isfinite().nonzero()[:, 0].tolist()) == allowed
    assert torch.equal(masked[1, sorted(allowed)], logits[1, sorted(allowed)])
    narrow = sampling.keep_allowed(logits, masks[:, :1], [0])
    assert set(narrow[0].isfinite().nonzero()[:, 0].tolist()) == {0, 31}, "beyond the mask nothing is allowed"


@pytest.mark.parametrize("vocab", [7, 1000, 49_152])
@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
def test_a_row_without_top_k_draws_on_a_cpu_what_the_sorted_vocabulary_gives(vocab, spread):
    """But where the number falls on the edge of a token, as the sum of all weights is rounded otherwise."""
    dice = torch.Generator().manual_seed(vocab)
    rows = 60
    logits = spread * torch.randn(rows, vocab, generator=dice)
    logits[::7, 1::3] = -math.inf
    logits[5, 2], logits[6, 3] = math.nan, math.inf
    top_p = torch.tensor([0.0, 0.3, 0.95, 0.999, 1.0]).repeat(rows // 5)
    min_p = torch.tensor([0.0, 0.05, 0.3, 1.0]).repeat(rows // 4)
    warm = torch.tensor([0.0, 0.7, 1.0, 1.9, 1.0, 0.3]).repeat(rows // 6)
    settings = torch.stack([warm, torch.zeros(rows), top_p, min_p, torch.rand(rows, generator=dice)])
    drawn = sampling.cpu.draw_unbounded(logits, settings)
    whole = naive.draw(*naive.highest(logits, vocab), settings, vocab)
    nearby = [settings.clone() for _ in range(2)]
    for moved, by in zip(nearby, (-1e-4, 1e-4), strict=True):
        moved[4] = (moved[4] + by).clamp(0, 1 - 2**-23)
    edges = [naive.draw(*naive.highest(logits, vocab), moved, vocab) for moved in nearby]
    same = (drawn == whole) | (drawn == edges[0]) | (drawn == edges[1])
    assert same.all() and (drawn == whole).float().mean() > 0.95
    assert drawn[5] == drawn[6] == -1


def test_a_row_without_top_k_draws_the_same_beside_rows_that_have_one():
    logits, uniforms = torch.randn(4, 5000), torch.rand(4)
    top_k, others = torch.tensor([0, 20, 0, 300]), (torch.ones(4), torch.full((4,), 0.9), torch.zeros(4))
    together = sampling.sample(logits, others[0], top_k, *others[1:], uniforms)
    alone = [
        sampling.sample(logits[i : i + 1], *(x[i : i + 1] for x in (others[0], top_k, *others[1:], uniforms)))
        for i in range(4)
    ]
    assert together.tolist() == [int(each) for each in alone]

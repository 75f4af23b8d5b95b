"""Prompt lookup proposes what followed before, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rekindle.speculative.lookup import SHORTEST, PromptLookup


def test_what_followed_the_same_tokens_is_proposed() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
    assert lookup.propose(3) == (4, 5, 6)


def test_the_place_that_agrees_furthest_back_counts() -> None:
    lookup = PromptLookup([7, 1, 2, 3, 40, 8, 1, 2, 3, 50, 7, 1, 2, 3])
    assert lookup.propose(1) == (40,)
    lookup = PromptLookup([7, 1, 2, 3, 40, 8, 1, 2, 3, 50, 9, 1, 2, 3])
    assert lookup.propose(1) == (50,), "of equals the newest"


def test_new_text_and_short_text_propose_nothing() -> None:
    assert PromptLookup([1, 2, 3, 4]).propose(4) == ()
    assert PromptLookup([1, 1]).propose(4) == ()
    assert PromptLookup().propose(4) == ()


def test_text_that_repeats_itself_goes_on() -> None:
    assert PromptLookup([5, 6, 5, 6, 5, 6]).propose(5) == (5, 6, 5, 6, 5)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 8), st.integers(0, 60))
def test_a_proposal_is_what_followed_an_equal_run(tokens: list[int], most: int, cut: int) -> None:
    lookup = PromptLookup(tokens[:cut])
    lookup.extend(tokens[cut:])
    assert lookup.propose(most) == PromptLookup(tokens).propose(most)
    proposal = lookup.propose(most)
    if proposal:
        run = tokens[-SHORTEST:]
        text = [*tokens, *proposal]
        starts = [i for i in range(len(tokens) - SHORTEST) if tokens[i : i + SHORTEST] == run]
        assert any(text[i + SHORTEST : i + SHORTEST + most] == list(proposal) for i in starts)
    elif len(tokens) > SHORTEST:
        run = tokens[-SHORTEST:]
        assert all(tokens[i : i + SHORTEST] != run for i in range(len(tokens) - SHORTEST))

"""Blocks grow while the target agrees; what does not pay is tried less and less often."""

from __future__ import annotations

import pytest

from rekindle.speculative.width import FIRST, MOST, MOST_REST, ROW, Width

BLOCKS = {  # share of every block that is accepted: widths of the blocks, and the rests between them
    "all": (1.0, [4, 8, 15, 15, 15], [0, 0, 0, 0, 0]),
    "half": (0.5, [4, 3, 2, 2, 2], [0, 0, 0, 0, 0]),
    "none": (0.0, [4, 2, 1, 1, 1, 1, 1, 1], [1, 2, 4, 8, 16, 32, 32, 32]),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_widths_and_rests(name: str) -> None:
    share, widths, rests = BLOCKS[name]
    width, length = Width(), 100
    for expected, rest in zip(widths, rests, strict=True):
        block = width.at(length)
        assert block == expected
        accepted = int(share * block)
        length += accepted + 1
        width.note(length, block, accepted)
        for _ in range(rest):
            assert width.at(length) == 0
            length += 1
        assert width.at(length) > 0


def test_blocks_settle_at_one_more_than_is_accepted() -> None:
    """A drafter that is right three times in a row."""
    width, blocks = Width(), []
    for step in range(6):
        blocks.append(width.at(10 * step))
        width.note(10 * step + 4, blocks[-1], min(3, blocks[-1]))
    assert blocks == [4] * 6


def test_one_block_that_pays_ends_the_long_rests() -> None:
    width = Width()
    for _ in range(9):
        width.note(0, 4, 0)
    assert width.at(MOST_REST - 1) == 0 and width.at(MOST_REST) == 1
    width.note(40, 1, 1)
    assert width.at(40) == 2
    width.note(41, 2, 0)
    assert (width.at(41), width.at(42)) == (0, 1)


def test_a_block_cut_short_by_the_end_of_the_answer_keeps_the_width() -> None:
    width = Width()
    width.note(0, 4, 4)
    width.note(9, 1, 1)
    assert width.at(10) == 8


def test_drafts_that_are_never_right_cost_at_most_three_hundredths() -> None:
    width, length, cost = Width(), 0, 0.0
    while length < 256:
        block = width.at(length)
        cost += 1 + ROW * block
        length += 1
        if block:
            width.note(length, block, 0)
    assert cost / 256 < 1.03
    assert FIRST < MOST

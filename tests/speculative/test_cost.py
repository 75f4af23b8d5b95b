"""Measured times decide how wide blocks are: what never works costs next to nothing, what works is used."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from rekindle.speculative.cost import BLOCKS, FIRST_PLAIN, Costs, GpuCosts
from rekindle.speculative.width import GRACE, MOST, SHARE, DrafterWidth, Purse, Width


class PaperMachine:
    """Steps that take base + row · rows seconds, and a drafter that takes `drafting` for a block, or, if it chains, for
    a token; it measures itself."""

    def __init__(self, base: float, row: float, drafting: float, chained: bool = False) -> None:
        self.base, self.row, self.drafting, self.chained = base, row, drafting, chained
        self.costs, self.purse, self.seconds = Costs(chained), Purse(), 0.0

    def answer(self, tokens: int, agrees: Callable[[int], int]) -> float:
        """Seconds of an answer; agrees: accepted tokens of a block so wide."""
        width = DrafterWidth(partial(self.costs.extra, with_pass=True), self.purse, lambda: self.costs.knows_plain)
        length, began = 0, self.seconds
        while length < tokens:
            block = min(width.at(length), tokens - length - 1)
            if block > 0:
                drafting = self.drafting * (block if self.chained else 1)
                self.seconds += drafting
                self.costs.note_pass([block], drafting)
            taken = self.step(1 + max(block, 0))
            self.seconds += taken
            self.costs.note_step(1, 1 + max(block, 0), taken)
            accepted = agrees(block) if block > 0 else 0
            length += 1 + accepted
            if block > 0:
                width.note(length, block, accepted)
        return self.seconds - began

    def step(self, rows: int) -> float:
        return self.base + self.row * rows

    def plain(self, tokens: int) -> float:
        return tokens * (self.base + self.row)


MACHINES = {
    "rows are nearly free": (1.0, 0.02, 0.1),
    "a CPU": (0.75, 0.25, 0.2),
    "cold experts: every row costs": (0.3, 0.7, 0.3),
    "a heavy drafter": (0.75, 0.25, 3.0),
    "a chain": (0.9, 0.1, 0.1, True),
    "a heavy chain": (0.75, 0.25, 0.5, True),
}
Numbers = tuple[float, ...]


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
def test_a_drafter_that_is_never_right_costs_at_most_three_hundredths(machine: Numbers) -> None:
    paper = PaperMachine(*machine)
    spent = sum(paper.answer(256, lambda block: 0) for _ in range(4))
    assert spent <= 1.03 * paper.plain(4 * 256)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES.keys())
def test_a_drafter_that_is_always_right_is_used_where_that_pays(machine: Numbers) -> None:
    paper = PaperMachine(*machine)
    base, row = paper.base, paper.row
    paper.answer(512, lambda block: block)
    drafting = [paper.drafting * (w if paper.chained else min(w, 1)) for w in range(MOST + 1)]
    best = min((base + row * (1 + w) + drafting[w]) / (1 + w) for w in range(MOST + 1))
    assert paper.answer(512, lambda block: block) <= max(1.1 * 512 * best, 1.03 * 512 * (base + row)) + 2


@pytest.mark.parametrize("right", [0.5, 0.8])
def test_a_drafter_that_is_right_now_and_then_is_never_slower_than_none(right: float) -> None:
    dice = random.Random(3)

    def agrees(block: int) -> int:
        return next((i for i in range(block) if dice.random() >= right), block)

    for machine in MACHINES.values():
        paper = PaperMachine(*machine)
        assert sum(paper.answer(256, agrees) for _ in range(8)) <= 1.03 * paper.plain(8 * 256)


def test_the_cost_of_a_row_is_found_out() -> None:
    costs, dice = Costs(), random.Random(1)
    for _ in range(200):
        rows = dice.choice([1, 1, 5, 9, 16])
        costs.note_step(1, rows, (0.9 + 0.1 * rows) * dice.uniform(0.95, 1.05))
    costs.note_pass([4, 9], 0.6)
    assert costs.extra(1, with_pass=False) == pytest.approx(0.1, rel=0.3)
    assert costs.extra(10, with_pass=False) == pytest.approx(1.0, rel=0.3)
    assert costs.extra(10, with_pass=True) == pytest.approx(1.3, rel=0.3)
    chain = Costs(chained=True)
    for _ in range(50):
        chain.note_step(1, 1, 1.0)
        chain.note_step(1, 5, 1.4)
    chain.note_pass([4, 2], 0.6)
    assert chain.extra(10, with_pass=True) == pytest.approx(10 * (0.1 + 0.1), rel=0.1)


def test_the_more_sequences_the_more_a_block_has_to_bring() -> None:
    """A plain step of eight gives eight tokens in the time of 0.75 + 8 · 0.25."""
    costs = Costs()
    costs.sequences = 8
    assert costs.extra(4, with_pass=False) == pytest.approx(8 * 4 * 0.25 / 2.75)
    for _ in range(50):
        costs.note_step(8, 8, 2.75)
    assert costs.extra(4, with_pass=False) == pytest.approx(8 * 4 * 0.25 / 2.75)
    assert Width(partial(costs.extra, with_pass=True), Purse()).at(0) == 0, "even one accepted token would not pay"


def test_one_purse_is_for_all_sequences() -> None:
    purse = Purse()
    widths = [Width(lambda width: 1.0 * width / 2, purse) for _ in range(20)]
    lost = 0.0
    for width in widths:
        block = width.at(0)
        if block:
            width.note(1, block, 0)
            lost += block / 2
    assert 0 < lost <= GRACE
    assert not Width(lambda width: 1.0 * width / 2, purse).at(0)
    patient = Width(lambda width: 1.0 * width / 2, purse)
    patient.at(0)
    assert patient.at(int(1 / SHARE)) > 0, "a share of every token goes into it"


GPUS = {  # base, row, pass, and what a block takes longer because it is one, as measured on an H200
    "27B": (1.0, 0.02, 0.5, 0.55),
    "35B-A3B": (0.85, 0.15, 1.4, 0.65),
    "another card": (1.0, 0.1, 0.2, 0.0),
}


class PaperGpu(PaperMachine):
    def __init__(self, base: float, row: float, drafting: float, jump: float) -> None:
        super().__init__(base, row, drafting)
        self.costs, self.jump = GpuCosts(), jump

    def step(self, rows: int) -> float:
        return super().step(rows) + self.jump * (rows > 1)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS.keys())
def test_on_gpus_too_what_never_works_costs_little_and_what_works_is_used(gpu: Numbers) -> None:
    never, always = PaperGpu(*gpu), PaperGpu(*gpu)
    assert sum(never.answer(256, lambda block: 0) for _ in range(4)) <= 1.03 * never.plain(4 * 256)
    always.answer(512, lambda block: block)
    best = (always.step(MOST + 1) + always.drafting) / (MOST + 1)
    assert always.answer(512, lambda block: block) <= 1.1 * 512 * best + 2


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS.keys())
@pytest.mark.parametrize("accepted", [1, 2])
def test_what_works_a_little_is_compared_with_plain_steps_however_well_it_begins(gpu: Numbers, accepted: int) -> None:
    """Every block brings some tokens, so that none is followed by a rest in which plain steps would be measured."""
    paper = PaperGpu(*gpu)
    assert sum(paper.answer(256, lambda block: min(block, accepted)) for _ in range(4)) <= 1.03 * paper.plain(4 * 256)


# What a step takes by its recorded rows, beside one of one row, and a pass: an H200, docs/bench.md.
STEPS = {
    "27B": ({1: 1.0, 2: 1.24, 4: 1.3, 8: 1.37, 12: 1.85, 16: 1.87}, 0.36),
    "35B-A3B": ({1: 1.0, 2: 1.55, 4: 1.9, 8: 2.46, 12: 3.2, 16: 3.8}, 0.85),
}


class StepsOfAGpu(PaperMachine):
    """Recorded steps, whose padding costs as much as rows; from nine rows on others are taken, which cost more."""

    def __init__(self, steps: dict[int, float], drafting: float) -> None:
        super().__init__(0.0, 1.0, drafting)
        self.costs, self.steps = GpuCosts(rounded=self.rounded), steps

    def rounded(self, rows: int) -> int:
        return min(size for size in self.steps if size >= rows)

    def step(self, rows: int) -> float:
        return self.steps[self.rounded(rows)]

    def best(self, accepted: Callable[[int], float]) -> float:
        """Seconds of a token, at the best width."""
        widths = range(1, MOST + 1)
        return min(1.0, *((self.step(1 + width) + self.drafting) / (1 + accepted(width)) for width in widths))


@pytest.mark.parametrize("model", STEPS)
@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4, 5, 7, 9, 11, 13])
def test_blocks_are_as_wide_as_gives_the_most_tokens_in_a_time(model: str, accepted: int) -> None:
    """The drafter is right so many times in a row. Width 8 of 27B's blocks would fill a step of 12 rows for one token
    more than a step of 8 has room for."""
    paper = StepsOfAGpu(*STEPS[model])
    paper.answer(256, lambda block: min(block, accepted))
    spent = paper.answer(512, lambda block: min(block, accepted))
    assert spent <= 1.05 * 512 * paper.best(lambda width: min(width, accepted))


@pytest.mark.parametrize("model", STEPS)
@pytest.mark.parametrize("right", [0.3, 0.6, 0.8, 0.9, 0.97])
def test_the_same_where_a_drafter_is_right_now_and_then(model: str, right: float) -> None:
    paper, dice = StepsOfAGpu(*STEPS[model]), random.Random(5)

    def agrees(block: int) -> int:
        return next((i for i in range(block) if dice.random() >= right), block)

    spent = sum(paper.answer(512, agrees) for _ in range(8))
    best = paper.best(lambda width: sum(right**place for place in range(1, width + 1)))
    assert spent <= 1.08 * 8 * 512 * best


def test_a_width_that_stalled_once_is_taken_again() -> None:
    """All blocks are the widest, until one takes as long as ten: then others are, and nothing new is known of it."""
    paper = StepsOfAGpu(*STEPS["27B"])
    paper.answer(2048, lambda block: block)
    before = paper.answer(2048, lambda block: block)
    step, stalled = paper.step, list[int]()

    def once(rows: int) -> float:
        stalled.append(rows)
        return 10.0 if len(stalled) == 40 else step(rows)

    paper.step = once  # type: ignore[method-assign]
    paper.answer(4096, lambda block: block)
    assert paper.answer(2048, lambda block: block) <= 1.05 * before


def test_a_drafter_that_becomes_right_is_found_out() -> None:
    """After a long answer without one accepted token."""
    paper = StepsOfAGpu(*STEPS["27B"])
    assert paper.answer(1024, lambda block: 0) <= 1.02 * 1024
    assert paper.answer(512, lambda block: block) <= 0.5 * 512


def test_contexts_grow_so_plain_steps_are_measured_again_and_again() -> None:
    costs = Costs()
    for _ in range(FIRST_PLAIN):
        assert not costs.knows_plain
        costs.note_step(1, 1, 1.0)
    for _ in range(BLOCKS):
        assert costs.knows_plain
        costs.note_step(1, 4, 1.5)
    assert not costs.knows_plain
    costs.note_step(1, 1, 2.0)
    assert costs.knows_plain


def test_on_gpus_a_block_usually_costs_what_it_does_on_an_h200() -> None:
    costs = GpuCosts()
    assert costs.extra(15, with_pass=False) == pytest.approx(0.98, abs=0.01), "16 rows of the 27B"
    assert costs.extra(1, with_pass=False) == pytest.approx(0.62, abs=0.01), "2 rows"
    for _ in range(50):
        costs.note_step(1, 1, 2.0)
        costs.note_step(1, 8, 5.0)
    assert costs.extra(7, with_pass=False) == pytest.approx(1.5, rel=0.05)
    costs.sequences = 8
    assert costs.extra(3, with_pass=False) > 1, "a row more for each of eight delays all of them"


@pytest.mark.parametrize("kind", [Costs, GpuCosts])
@pytest.mark.parametrize("sequences", [1, 2])
def test_no_slow_block_or_pass_is_the_last_one(kind: type[Costs], sequences: int) -> None:
    """A machine may stall, a step be recorded or a kernel compiled: that says nothing about the next block."""
    costs = kind()
    costs.sequences = sequences
    for _ in range(20):
        costs.note_step(sequences, sequences, 0.006)
    usual = costs.extra(3, with_pass=True)
    for _ in range(8):
        costs.note_step(sequences, 4 * sequences, 1.0)
        costs.note_pass([3] * sequences, 1.0)
    assert costs.extra(3, with_pass=True) > 3
    for _ in range(6000):
        costs.note_step(sequences, sequences, 0.006)
    assert costs.extra(3, with_pass=True) < usual + 1


def test_what_was_not_verified_costs_no_row_on_a_gpu_either() -> None:
    assert GpuCosts().extra(0, with_pass=False) == Costs().extra(0, with_pass=False) == 0


def test_blocks_of_one_sequence_say_nothing_about_those_of_several() -> None:
    costs = GpuCosts()
    for _ in range(50):
        costs.note_step(1, 1, 1.0)
        costs.note_step(1, 8, 1.1)  # a card on which a block costs next to nothing
    costs.sequences = 4
    assert costs.extra(3, with_pass=False) > 0.2

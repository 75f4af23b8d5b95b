"""Chunks and decode steps that take turns, as on GPUs, or share batches: who runs next, where chunks end; no bit
depends on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from support.answers import arriving_together
from support.snapshot_lab import Answer, Lab, RecordingCache, random_tokens, same_bits

from rekindle.batch import Batch, Segment, Wanted
from rekindle.engine.flight import Flight, Flights
from rekindle.engine.pace import HALVED, LEAST, Pace
from rekindle.engine.results import Collector
from rekindle.engine.scheduler import Scheduler, Step
from rekindle.engine.sequence import Sequence
from rekindle.engine.shared_pace import SharedPace
from rekindle.engine.state import Decoding, InSlot, Prefilling
from rekindle.engine.types import Request, Sampling
from rekindle.prompt import Prompt
from rekindle.spec import Span
from rekindle.stages import Pipeline
from rekindle.stages.layout import SHARERS
from rekindle.stages.types import StageOutput

# The pace


def test_a_chunk_that_took_too_long_beside_answers_is_halved_down_to_the_least() -> None:
    pace = Pace(0.008, grid=2048)
    pace.note_step(0.003)
    for rows in (512, 256, 128, 64, 64):
        assert pace.rows() == rows
        pace.note_chunk(rows, rows / 10_000)
    assert pace.rows() == LEAST


def test_where_a_step_takes_most_of_the_target_a_chunk_may_take_as_long_as_a_step() -> None:
    pace = Pace(0.050, grid=2048)
    pace.note_step(0.045)
    pace.note_chunk(512, 0.048)
    assert pace.rows() == 256, "of 27 ms, though 5 are left"


def test_chunks_are_not_made_smaller_where_that_does_not_make_them_shorter() -> None:
    pace = Pace(0.050, grid=2048)
    pace.note_chunk(512, 0.062)
    assert pace.rows() == 256
    pace.note_chunk(256, 0.055)
    for _ in range(3):
        assert pace.rows() == 512
        pace.note_chunk(512, 0.062)


def test_chunks_grow_while_twice_the_rows_are_likely_to_fit_and_never_beyond_the_grid() -> None:
    pace = Pace(0.100, grid=2048)
    for rows in (512, 1024, 2048, 2048):
        assert pace.rows() == rows
        pace.note_chunk(rows, 0.010)


def test_a_size_that_was_too_long_is_not_tried_again_at_once() -> None:
    pace = Pace(0.060, grid=2048)
    pace.note_chunk(512, 0.036)
    assert pace.rows() == 1024
    pace.note_chunk(1024, 0.070)
    for _ in range(20):
        assert pace.rows() == 512
        pace.note_chunk(512, 0.036)
    for _ in range(200):
        pace.note_chunk(512, 0.036)
    assert pace.rows() == 1024, "but some time later: the machine may have had other work then"


def test_what_whole_prompts_took_while_nobody_answered_is_known_when_somebody_does() -> None:
    pace = Pace(0.050, grid=2048)
    pace.note_chunk(2048, 0.067)
    pace.note_step(0.003)
    assert pace.rows() == 1024, "67 / 1.5 and a step fit"
    pace.note_chunk(512, 0.024)
    pace.note_chunk(1024, 0.048)
    assert pace.rows() == 512


def test_one_chunk_that_a_stall_made_long_spoils_no_size_for_good() -> None:
    pace = Pace(0.050, grid=2048)
    pace.note_chunk(512, 3.0)  # a kernel was compiled
    for _ in range(8):
        rows = pace.rows()
        pace.note_chunk(rows, 0.008 + rows * 28e-6)
    assert pace.rows() == 1024


@pytest.mark.parametrize("slower", [0.2, 2, 3, 5])
@pytest.mark.parametrize("known", [(2048,), (64, 128, 256, 512, 1024, 2048), (512, 2048)])
@pytest.mark.parametrize("target", [0.05, 0.1])
def test_where_all_chunks_take_longer_from_now_on_gaps_are_soon_back_below_the_target(
    slower: float, known: tuple[int, ...], target: float
) -> None:
    pace = Pace(target, grid=2048)
    for rows in known:
        pace.note_chunk(rows, 0.0097 + rows * 28e-6)
    gaps, chosen = list[float](), list[int]()
    for _ in range(400):
        chosen.append(pace.rows())
        gaps.append(slower * (0.0097 + chosen[-1] * 28e-6))
        pace.note_chunk(chosen[-1], gaps[-1])
    allowed = max(target, min(gaps) / HALVED)  # sizes that are hardly shorter are not taken
    assert sum(gap > allowed for gap in gaps[6:]) <= 4, "now and then a larger size is tried again"
    assert max(gaps[6:]) <= 2 * allowed
    fits = [rows for rows in (64, 128, 256, 512, 1024, 2048) if slower * (0.0097 + rows * 28e-6) <= target]
    assert max(set(chosen[6:]), key=chosen.count) >= max(fits, default=64) // 2


def test_chunks_that_cannot_pause_have_a_target_of_their_own() -> None:
    pace = Pace(0.016, 2048, shorter_gap=0.050)
    for rows, seconds in ((512, 0.024), (1024, 0.040), (2048, 0.067)):
        pace.note_chunk(rows, seconds)
    assert pace.rows() == 1024
    assert pace.sections(2048, 10) == 2


def test_on_a_slow_card_the_first_chunk_beside_an_answer_is_no_longer_than_where_nothing_is_known() -> None:
    pace = Pace(0.050, grid=2048)
    pace.note_chunk(2048, 2.0)
    assert pace.rows() == 512


def test_of_prompts_that_come_together_none_waits_long_for_the_sake_of_a_few_answers() -> None:
    pace = Pace(0.050, grid=2048)
    for rows, seconds in ((512, 0.024), (1024, 0.040), (2048, 0.067)):
        pace.note_chunk(rows, seconds)
    assert pace.rows(1) == 1024, "one prompt has the target"
    assert pace.rows(2) == pace.rows(28) == 2048
    slow = Pace(0.050, grid=2048)
    for rows in (64, 128, 256, 512, 1024, 2048):
        slow.note_chunk(rows, rows * 1e-3)
    assert slow.rows(1000) <= 128, "an answer does not stand still either"


def test_only_whole_chunks_say_how_long_they_take() -> None:
    pace = Pace(0.050, grid=2048)
    pace.note_chunk(100, 5.0)
    assert pace.rows() == 512


@pytest.mark.parametrize(("grid", "first"), [(2048, 512), (512, 512), (768, 384), (100, 100), (33, 33), (64, 64)])
def test_sizes_are_parts_of_the_grid(grid: int, first: int) -> None:
    pace = Pace(0.050, grid)
    assert pace.rows() == first
    pace.note_chunk(first, 1e9)
    assert grid % pace.rows() == 0


def test_of_a_chunk_that_pauses_as_many_sections_run_at_a_time_as_the_target_allows() -> None:
    pace = Pace(0.020, grid=2048)
    assert pace.sections(2048, 10) == 1, "nothing is known"
    pace.note_step(0.003)
    pace.note_chunk(2048, 0.0068, share=0.1)
    assert [pace.sections(2048, 10, waiting) for waiting in (1, 2, 3, 4, 30)] == [2, 5, 8, 10, 10]
    assert pace.sections(1024, 10) == 3, "a shorter one takes less time"
    pace.note_chunk(1500, 0.006, share=0.1)
    assert pace.sections(1500, 10) == 2, "of whatever length"
    pace.note_chunk(2048, 0.0068, share=0.1)
    pace.note_step(0.030)
    assert pace.sections(2048, 10) == 4, "at least for as long as a step: the prompt takes twice its time at most"


def test_a_step_that_was_over_before_the_host_looked_lets_in_no_more_of_a_chunk() -> None:
    """Nobody knows when it was over: the host had captures to finish."""
    pace = Pace(0.020, grid=2048)
    pace.note_chunk(2048, 0.068)
    pace.note_step(0.030, at_most=True)
    assert pace.sections(2048, 10) == 4, "nothing better is known"
    pace.note_step(0.003)
    pace.note_step(0.030, at_most=True)
    assert pace.sections(2048, 10) == 2
    for _ in range(20):
        pace.note_step(0.030, at_most=True)
    assert pace.sections(2048, 10) == 4, "but steps may have become longer, and the host be late each time"


def test_a_chunk_that_was_over_before_the_host_looked_counts_as_hardly_longer_than_the_last() -> None:
    pace, alike = Pace(0.060, grid=2048), Pace(0.060, grid=2048)
    for each, late in ((pace, 0.500), (alike, 0.068)):
        each.note_step(0.003)
        each.note_chunk(2048, 0.068)
        each.note_chunk(2048, late, at_most=late > 0.1)
    assert alike.sections(2048, 10) > pace.sections(2048, 10) > alike.sections(2048, 10) / 2 > 2
    for _ in range(20):
        pace.note_chunk(2048, 0.500, at_most=True)
    assert pace.sections(2048, 10) == 1, "but chunks may have become longer"


class Over:
    """An event of the device: whether it had passed before anybody waited."""

    def __init__(self, over: bool) -> None:
        self.query, self.synchronize = (lambda: over), (lambda: None)


def test_a_host_that_comes_late_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of 3 ms, launched 1 ms after each other. The host sees the first in time, the others 20 ms later, at
    once: of the second it knows that it took no longer, of the third nothing. One launched later is timed again."""
    now, noted = [0.0], list[tuple[float, bool]]()
    monkeypatch.setattr("rekindle.engine.results.time.monotonic", lambda: now[0])
    monkeypatch.setattr(Pace, "note_step", lambda self, seconds, at_most: noted.append((round(seconds, 3), at_most)))
    collector = Collector.__new__(Collector)
    collector._pace, collector._costs, collector._behind = Pace(0.02, 2048), None, None
    collector._last_back, collector._was_over = 0.0, False
    collector._flights, collector._holding = Flights(), ()
    for began, looked, over in ((0.0, 0.003, False), (0.001, 0.023, True), (0.002, 0.0231, True), (0.03, 0.033, False)):
        done: Future[StageOutput] = Future()
        done.set_result(StageOutput(None, None))
        flight = Flight(Batch(()), (), done, launched=began)
        flight.began, flight._passed = began, Over(over)  # type: ignore[assignment]
        now[0] = looked
        collector._collect(flight)
    assert noted == [(0.003, False), (0.02, True), (0.003, False)]


@pytest.mark.parametrize("asked", [False, True])
def test_of_a_step_that_cannot_be_asked_nobody_believes_that_it_is_over(asked: bool) -> None:
    """On a CPU, and on several stages before the last one has it."""
    flight = Flight(Batch(()), (), Future())
    assert flight.is_over is None
    flight._passed = Over(asked)  # type: ignore[assignment]
    assert flight.is_over is asked


# Whose turn it is


def sequence(slot: int, length: int, state: type[InSlot]) -> Sequence:
    tokens = random_tokens(length, slot)
    request = Request(f"r{slot}", Prompt(tokens), Sampling(temperature=0), 9, frozenset(), sink=lambda event: None)
    made = Sequence(request, list(tokens), 9, prefill_end=length, state=state(slot))
    if made.decoding:
        made.stand_at(length)
        made.tokens.append(1)
    return made


def lengths(batch: Batch) -> list[int]:
    return [len(segment) for segment in batch.segments]


def run(scheduler: Scheduler, decoding: list[Sequence], steps: int) -> list[list[int]]:
    """Rows of every segment of so many batches, each settled before the next."""
    seen = []
    for _ in range(steps):
        chosen = scheduler.next_batch(decoding, lambda sequence, end: True)
        if chosen is None:
            break
        batch, owners = chosen.batch, chosen.owners
        seen.append(lengths(batch))
        for segment, owner in zip(batch.segments, owners, strict=True):
            owner.position = segment.end
            if owner.decoding:
                owner.tokens.append(1)
            elif not owner.prefill_left:
                scheduler.remove(owner)
    return seen


def test_prompts_that_no_client_waits_for_make_no_crowd() -> None:
    scheduler = Scheduler(2048, depth=1, async_steps=0, pace=Pace(0.05, 2048))
    waiting = [sequence(slot, 40, Prefilling) for slot in range(max(SHARERS))]
    for each in waiting:
        scheduler.add(each)
    assert scheduler.is_crowded and scheduler.takes_no_more
    request = waiting[0].request
    waiting[0].request = replace(request, background=True)
    assert not (scheduler.is_crowded or scheduler.takes_no_more)
    waiting[0].request, waiting[3].cancelled = request, True
    assert not (scheduler.is_crowded or scheduler.takes_no_more)


def test_chunks_and_rows_take_turns_and_are_never_in_one_batch() -> None:
    scheduler = Scheduler(2048, depth=1, async_steps=0, pace=Pace(0.05, 2048))
    answering = [sequence(slot, 10, Decoding) for slot in (0, 1)]
    for slot, length in ((2, 1200), (3, 40)):
        scheduler.add(sequence(slot, length, Prefilling))
    assert run(scheduler, answering, 9) == [[512], [1, 1], [40], [1, 1], [512], [1, 1], [176], [1, 1], [1, 1]]


def test_whole_chunks_run_while_nobody_answers() -> None:
    scheduler = Scheduler(2048, depth=1, async_steps=0, pace=Pace(0.05, 2048))
    scheduler.add(sequence(0, 5000, Prefilling))
    assert run(scheduler, [], 9) == [[2048], [2048], [904]]


def test_short_chunks_of_several_prompts_share_a_step() -> None:
    """Four at most, each of them whole; a long one is alone, and so is one whose bits or scores are looked at."""
    scheduler = Scheduler(2048, depth=1, async_steps=0, pace=Pace(0.05, 2048))
    for slot, length in enumerate((512, 2600, 500, 7, 40, 300)):
        scheduler.add(sequence(slot, length, Prefilling))
    scored = sequence(6, 30, Prefilling)
    scored.request = replace(scored.request, prompt_logprobs=1)
    scheduler.add(scored)
    assert run(scheduler, [], 9) == [[512, 500, 7, 40], [2048], [300], [30], [552]]


def test_more_than_four_share_a_step_that_they_fill() -> None:
    """With a grid of 4,096: eight of 512 rows, or five; short ones would leave too much of it to padding."""
    scheduler = Scheduler(4096, depth=1, async_steps=0, pace=Pace(0.05, 4096))
    for slot, length in enumerate((*(512,) * 8, *(512,) * 5, *(200,) * 6)):
        scheduler.add(sequence(slot, length, Prefilling))
    assert run(scheduler, [], 9) == [[512] * 8, [512] * 5 + [200] * 3, [200] * 3]
    few = Scheduler(4096, depth=1, async_steps=0, pace=Pace(0.05, 4096))
    for slot, length in enumerate((*(512,) * 4, *(60,) * 6)):
        few.add(sequence(slot, length, Prefilling))
    assert run(few, [], 9) == [[512] * 4, [60] * 4, [60], [60]]


def test_chunks_that_padding_would_outgrow_run_one_by_one() -> None:
    """The smallest shared step has 256 rows: so many take longer than a few, and than a chunk which the gap bounds."""
    scheduler = Scheduler(2048, depth=1, async_steps=0, pace=Pace(0.05, 2048))
    for slot, length in enumerate((6, 4, 90)):
        scheduler.add(sequence(slot, length, Prefilling))
    assert run(scheduler, [], 9) == [[6], [4], [90]]
    paced = Scheduler(2048, depth=1, async_steps=0, pace=Pace(0.05, 128))
    for slot in (1, 2):
        paced.add(sequence(slot, 60, Prefilling))
    assert run(paced, [sequence(0, 10, Decoding)], 3) == [[60], [1], [60]]


def test_beside_answers_they_share_what_one_of_them_may_have() -> None:
    scheduler = Scheduler(2048, depth=1, async_steps=0, pace=Pace(0.05, 2048))  # nothing was measured
    answering = [sequence(0, 10, Decoding)]
    for slot in range(1, 5):
        scheduler.add(sequence(slot, 200, Prefilling))
    assert run(scheduler, answering, 4) == [[200, 200], [1], [200, 200], [1]]


SECTIONS = 10  # of a chunk that pauses


class Enqueued(NamedTuple):
    step: Step
    at: float  # when it was handed over
    sections: int = SECTIONS  # of a chunk
    is_last: bool = True  # something comes of it


class PaperDevice:
    """Runs what a scheduler chooses, one step after the other; seconds follow from the rows alone, about as on an H200:
    512 rows take 24 ms, 2,048 take 67, a decode step takes 3."""

    def __init__(self, scheduler: Scheduler, pace: Pace) -> None:
        self._scheduler, self._pace = scheduler, pace
        self._flights = deque[Enqueued]()
        self._begun: tuple[Step, int] | None = None  # a chunk that pauses, and the sections of it that are left
        self.now = 0.0
        self.tokens: dict[int, list[float]] = {}  # by slot: when each came
        self.decoding: list[Sequence] = []

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            while len(self._flights) < self._scheduler.in_flight and self._launch():
                pass
            self._collect(self._flights.popleft())

    def _launch(self) -> bool:
        if self._begun is None:
            step = self._scheduler.next_batch(self.decoding, lambda sequence, end: True)
        else:
            step = self._scheduler.between_sections(self.decoding, lambda sequence, end: True)
        for segment, owner in zip(step.batch.segments, step.owners, strict=True) if step is not None else ():
            owner.advance(segment.end, alone=len(step.owners) == 1, grid=2048)
        if step is not None and step.pauses:
            self._begun = step, SECTIONS
        if self._begun is not None and (step is None or step.pauses):
            self._run_sections(*self._begun)
        elif step is not None:
            self._flights.append(Enqueued(step, self.now))
        return bool(self._begun or step)

    def _run_sections(self, chunk: Step, left: int) -> None:
        sections = min(left, self._scheduler.sections(chunk.batch, SECTIONS, self.decoding))
        self._begun = (chunk, left - sections) if left > sections else None
        self._flights.append(Enqueued(chunk, self.now, sections, is_last=left == sections))

    def _collect(self, enqueued: Enqueued) -> None:
        step, share, rows = enqueued.step, enqueued.sections / SECTIONS, enqueued.step.batch.rows
        chunk = rows > len(step.batch.segments)
        began, seconds = max(enqueued.at, self.now), share * (0.0097 + rows * 28e-6) if chunk else 0.003
        self.now = began + seconds
        (self._pace.note_chunk(rows, seconds, share) if chunk else self._pace.note_step(seconds))
        for segment, owner in zip(step.batch.segments, step.owners, strict=True) if enqueued.is_last else ():
            owner.come_back(segment.end)
            if owner.prefilling and owner.prefill_left:
                continue
            if owner.prefilling:
                self._scheduler.remove(owner)
                owner.state = Decoding(owner.slot)
                self.decoding.append(owner)
            owner.tokens.append(1)
            self.tokens.setdefault(owner.slot, []).append(self.now)


def paper_device(answers: int, prompts: Iterable[int], pauses: bool) -> tuple[PaperDevice, list[Sequence]]:
    """With so many sequences that answer, and prompts of these lengths that have come at once."""
    pace = Pace(0.02 if pauses else 0.05, 2048)
    scheduler = Scheduler(2048, depth=1, async_steps=1, pace=pace, can_pause=lambda rows: pauses)
    device = PaperDevice(scheduler, pace)
    device.decoding += [replace(sequence(slot, 10, Decoding), max_tokens=10**6) for slot in range(answers)]
    coming = [replace(sequence(answers + i, n, Prefilling), max_tokens=10**6) for i, n in enumerate(prompts)]
    for one in coming:
        scheduler.add(one)
    return device, coming


@pytest.mark.parametrize(("pauses", "most"), [(True, 0.02), (False, 0.05)])
def test_while_a_long_prompt_comes_in_no_gap_is_beyond_the_target_and_it_loses_a_fourth_at_most(
    pauses: bool, most: float
) -> None:
    device, (prompt,) = paper_device(4, [32768], pauses)
    device.run(lambda: not prompt.prefilling)
    gaps = [after - before for times in device.tokens.values() for before, after in pairwise(times)]
    assert max(gaps) <= most
    assert device.now <= 1.25 * 16 * (0.0097 + 2048 * 28e-6)


@pytest.mark.parametrize("pauses", [True, False])
def test_of_many_prompts_at_once_the_last_one_answers_when_nearly_all_rows_ran_in_whole_steps(pauses: bool) -> None:
    device, prompts = paper_device(0, [512] * 32, pauses)
    device.run(lambda: all(prompt.decoding for prompt in prompts))
    assert device.now <= 1.15 * 8 * (0.0097 + 2048 * 28e-6)


def test_chunks_that_share_batches_have_together_no_more_rows_than_the_target_allows_those_who_answer() -> None:
    scheduler = Scheduler(512, depth=1, async_steps=0, pace=SharedPace(0.25, 512))
    answering = [sequence(slot, 10, Decoding) for slot in (0, 1)]
    for slot, length in ((2, 100), (3, 40), (4, 20)):
        scheduler.add(sequence(slot, length, Prefilling))
    assert run(scheduler, answering, 5) == [[1, 1, 64], [1, 1, 40, 20], [1, 1, 36], [1, 1], [1, 1]]
    for slot in (5, 6):
        scheduler.add(sequence(slot, 600, Prefilling))
    answering[0].request = answering[1].request = replace(answering[0].request, background=True)
    assert run(scheduler, answering, 4) == [[1, 1, 512], [1, 1, 512], [1, 1, 88, 88], [1, 1]], "no client waits"


class PaperBatches:
    """One answer and a prompt of 4,096 tokens on a slow device, by the real scheduler. A batch takes as long as the
    rows of its chunks and some further rows, which nobody tells the pace."""

    def __init__(self, fixed: int, row: float, grid: int = 512) -> None:
        self.pace, self.fixed, self.row = SharedPace(0.25, grid), fixed, row
        self._scheduler = Scheduler(grid, depth=1, async_steps=0, pace=self.pace)
        self._answering = [sequence(0, 10, Decoding)]

    def seconds(self, rows: int) -> float:
        return self.row * (self.fixed + rows)

    def run_prompt(self, length: int = 4096) -> list[tuple[int, float]]:
        """The chunks that it came in by, after some steps without any: rows and seconds."""
        prompt, batches = sequence(1, length, Prefilling), list[tuple[int, float]]()
        for _ in range(3):
            self._one_batch()
        self._scheduler.add(prompt)
        while prompt.prefill_left:
            batches.append(self._one_batch())
        return batches

    def _one_batch(self) -> tuple[int, float]:
        ((row, *chunks),) = run(self._scheduler, self._answering, 1)
        assert row == 1, "whoever answers has a row in every batch"
        taken = self.seconds(sum(chunks))
        self.pace.note(sum(chunks), taken)
        return sum(chunks), taken


@pytest.mark.parametrize("row", [0.2e-3, 0.4e-3, 1.1e-3, 7e-3])
@pytest.mark.parametrize("fixed", [0, 20, 64, 200, 600])
def test_where_batches_are_shared_gaps_keep_to_the_target_or_the_prompt_to_twice_its_time(
    fixed: int, row: float
) -> None:
    """Both, where a device allows it: a size that fits the target and is at most twice as slow as whole chunks."""
    device = PaperBatches(fixed, row)
    device.run_prompt()  # by which it learns
    batches = device.run_prompt()
    sizes = (64, 128, 256, 512)
    quick = [size for size in sizes if (fixed + size) / size <= 2.001 * (fixed + 512) / 512]
    allowed = max(0.25, device.seconds(2 * quick[0]))  # what a batch costs beside its rows is known roughly
    assert sum(seconds > allowed for _, seconds in batches) <= 1, "the first one, while that was another machine's"
    whole = 8 * device.seconds(512)
    assert sum(seconds for _, seconds in batches) <= 2.5 * whole
    if device.seconds(512) <= 0.25:
        assert sum(seconds for _, seconds in batches) <= 1.3 * whole, "nothing is shorter than it has to be"


def test_one_batch_that_a_stall_made_long_is_soon_forgotten() -> None:
    device = PaperBatches(64, 0.4e-3)
    usual = [rows for rows, _ in device.run_prompt()][-1]
    device.pace.note(usual, 8.0)
    assert device.pace.rows() == LEAST
    assert [rows for rows, _ in device.run_prompt()][-1] == usual


def test_a_measurement_that_makes_rows_seem_free_keeps_chunks_long_for_some_time_only() -> None:
    pace = SharedPace(0.01, 512)
    for rows, seconds in ((0, 1.0), (512, 1.0 + 1e-9)):  # the machine had other work
        pace.note(rows, seconds)
    assert pace.rows() == 256, "half of a chunk, down to which a prompt never takes twice its time"
    for _ in range(400):
        pace.note(256, 0.1)
    assert pace.rows() == LEAST


def test_where_batches_become_slower_the_next_is_shorter() -> None:
    device = PaperBatches(64, 0.4e-3)
    before = device.run_prompt()[-1][0]
    device.row *= 2
    device.pace.note(before, device.seconds(before))
    assert device.seconds(device.pace.rows()) <= 0.25


def test_where_batches_are_shared_many_prompts_at_once_have_several_times_the_target() -> None:
    pace = SharedPace(0.1, 512)
    for rows in (64, 128, 256, 512, 256):
        pace.note(rows, (64 + rows) * 0.5e-3)
    assert [pace.rows(waiting) for waiting in (1, 2, 3, 4, 99)] == [128, 256, 512, 512, 512]


@pytest.mark.parametrize("grid", [2048, 512, 768, 100, 33, 64])
def test_sizes_of_shared_chunks_are_parts_of_the_grid_and_begin_with_the_least(grid: int) -> None:
    pace = SharedPace(0.25, grid)
    chosen = [pace.rows()]
    for _ in range(10):
        pace.note(chosen[-1], 1e-5)
        chosen.append(pace.rows())
    assert chosen == sorted(chosen) and chosen[-1] == grid
    assert all(later <= 2 * rows for rows, later in pairwise(chosen)), "one size beyond what was measured"
    assert all(grid % rows == 0 for rows in chosen)
    assert chosen[0] < 2 * LEAST


def test_what_a_shared_batch_took_counts_from_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that waits in line behind another batch has a gap as long. Rows: those of its chunks."""
    noted, now = list[tuple[int, float]](), [5.0]
    pace = SharedPace(0.25, 512)
    monkeypatch.setattr("rekindle.engine.results.time.monotonic", lambda: now[0])
    monkeypatch.setattr(pace, "note", lambda rows, seconds: noted.append((rows, round(seconds, 3))))
    collector = Collector.__new__(Collector)
    collector._pace, collector._costs, collector._behind = pace, None, None
    collector._last_back, collector._was_over = 4.9, False
    row, (chunk, other) = Segment(0, 9, (1,), Wanted.LAST), (Segment(slot, 64, (2,) * 64) for slot in (2, 3))
    for segments in ((row,), (chunk, other), (row, chunk)):
        owners = tuple(sequence(segment.slot, 999, Prefilling) for segment in segments)
        collector._note_pace(Flight(Batch(segments), owners, Future(), launched=4.7), was_over=False)
        now[0] += 0.1
    assert noted == [(0, 0.3), (128, 0.4), (64, 0.5)]


def test_rows_go_on_where_a_chunk_finds_no_pages() -> None:
    scheduler = Scheduler(64, depth=1, async_steps=0, pace=Pace(0.05, 64))
    answering = [sequence(0, 10, Decoding)]
    scheduler.add(sequence(1, 100, Prefilling))
    for _ in range(3):
        chosen = scheduler.next_batch(answering, lambda sequence, end: end < 60)
        assert chosen is not None
        assert lengths(chosen[0]) == [1]


# What comes of it


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize(("async_steps", "pauses"), [(0, False), (1, False), (0, True), (1, True)])
def test_every_state_has_the_bits_of_a_run_by_itself_with_the_edges_its_manifest_names(
    make_tiny: Any, monkeypatch: pytest.MonkeyPatch, kind: str, async_steps: int, pauses: bool
) -> None:
    monkeypatch.setattr(Pipeline, "can_pause", lambda self, rows: pauses)  # else chunks are shorter beside answers
    monkeypatch.setattr(Pace, "note_step", lambda self, seconds, at_most: None)  # a chunk may take as long as a step
    lab = Lab(make_tiny(kind))
    prompts = [random_tokens(count, seed) for seed, count in enumerate((300, 70, 520, 83))]
    alone = lab.engine(grid=256)
    expected = [Answer(alone, Prompt(prompt), max_tokens=40).tokens for prompt in prompts]
    alone.stop()
    tiny = 1e-9  # every chunk beside an answer is too long
    engine = lab.engine(grid=256, turns=True, max_gap=tiny, async_steps=async_steps)
    with arriving_together(engine):
        answers = [Answer(engine, Prompt(prompt), max_tokens=40) for prompt in prompts]
    assert [answer.tokens for answer in answers] == expected
    again = [Answer(engine, Prompt(prompt), max_tokens=40) for prompt in prompts]
    assert [answer.tokens for answer in again] == expected
    engine.stop()
    assert isinstance(engine.prefixes, RecordingCache)
    published = engine.prefixes.seen
    prefilled = [s for s in published if all(stretch.how in ("prefill", "batched") for stretch in s.stretches)]
    assert len(prefilled) >= len(prompts)
    assert any(stretch.how == "batched" for s in prefilled for stretch in s.stretches), "some shared a step"
    assert all(same_bits(snapshot, lab.cold(snapshot)) for snapshot in prefilled)
    cuts = {cut for snapshot in prefilled for stretch in snapshot.stretches for cut in stretch.cuts}
    shorter = any(cut % 256 and cut not in map(len, prompts) for cut in cuts)
    assert shorter is not pauses, "chunks are cut beside answers, or keep their length"


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("spans", [(), (Span(0, 4), Span(4, 8))], ids=["one stage", "two stages"])
def test_beside_answers_chunks_that_share_batches_are_shorter_and_have_the_bits_of_whole_ones(
    make_tiny: Any, kind: str, spans: tuple[Span, ...]
) -> None:
    lab = Lab(make_tiny(kind))
    prompts = [random_tokens(count, seed) for seed, count in enumerate((70, 600, 520))]
    whole = lab.engine(grid=256)
    expected = [Answer(whole, Prompt(prompt), max_tokens=40).tokens for prompt in prompts]
    whole.stop()
    engine = lab.engine(grid=256, max_gap=1e-9, spans=spans)
    answers = list[Answer]()

    def ask(count: int) -> None:
        if count == 3:
            answers.extend(Answer(engine, Prompt(prompt), max_tokens=40) for prompt in prompts[1:])

    first = Answer(engine, Prompt(prompts[0]), max_tokens=120, at_token=ask)
    assert first.finished
    assert [answer.tokens for answer in answers] == expected[1:]
    assert first.tokens[:40] == expected[0]
    engine.stop()
    assert isinstance(engine.prefixes, RecordingCache)
    long = [s for s in engine.prefixes.seen if s.position in (520, 600)]
    assert long and all(cut % LEAST == 0 or cut == s.position for s in long for e in s.stretches for cut in e.cuts)
    cuts = {cut for s in long for stretch in s.stretches for cut in stretch.cuts}
    assert any(cut % 256 and cut not in (520, 600) for cut in cuts), "chunks of fewer rows than the grid"
    assert all(same_bits(snapshot, lab.cold(snapshot)) for snapshot in long), "with the same edges"


def test_no_step_is_launched_on_top_of_a_block_whose_drafts_may_be_refused() -> None:
    scheduler = Scheduler(2048, depth=2, async_steps=1, pace=Pace(0.05, 2048), block_rows=2)
    drafting, other = (sequence(slot, 10, Decoding) for slot in (0, 1))
    drafting.in_flight, drafting.verifying = 1, True
    step = scheduler.next_batch([drafting, other], lambda sequence, end: True)
    assert step is not None
    assert step.owners == [other]


def test_blocks_of_a_batch_on_a_gpu_have_so_many_rows_together() -> None:
    scheduler = Scheduler(2048, depth=1, async_steps=1, block_rows=64)
    assert [scheduler._longest_draft(sequences) for sequences in (1, 4, 8, 32, 33)] == [15, 15, 7, 1, 0]
    assert Scheduler(2048, depth=1, async_steps=0)._longest_draft(99) == 15

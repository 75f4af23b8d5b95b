"""Chunks and decode steps that take turns, as on GPUs: who runs next, where chunks end; no bit depends on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.snapshot_lab import Answer, Lab, RecordingCache, random_tokens, same_bits

from rekindle.batch import Batch
from rekindle.engine.pace import LEAST, Pace
from rekindle.engine.scheduler import Scheduler
from rekindle.engine.sequence import Sequence
from rekindle.engine.state import Decoding, InSlot, Prefilling
from rekindle.engine.types import Request, Sampling
from rekindle.prompt import Prompt

# The pace


def test_a_chunk_that_took_too_long_beside_answers_is_halved_down_to_the_least() -> None:
    pace = Pace(0.050, grid=2048)
    pace.note_step(0.045)
    for rows in (512, 256, 128, 64, 64):
        assert pace.rows == rows
        pace.note_chunk(rows, rows / 10_000)
    assert pace.rows == LEAST


def test_chunks_are_not_made_smaller_where_that_does_not_make_them_shorter() -> None:
    pace = Pace(0.050, grid=2048)
    pace.note_chunk(512, 0.062)
    assert pace.rows == 256
    pace.note_chunk(256, 0.055)
    for _ in range(3):
        assert pace.rows == 512
        pace.note_chunk(512, 0.062)


def test_chunks_grow_while_twice_the_rows_are_likely_to_fit_and_never_beyond_the_grid() -> None:
    pace = Pace(0.100, grid=2048)
    for rows in (512, 1024, 2048, 2048):
        assert pace.rows == rows
        pace.note_chunk(rows, 0.010)


def test_a_size_that_was_too_long_is_not_tried_again_at_once() -> None:
    pace = Pace(0.060, grid=2048)
    pace.note_chunk(512, 0.036)
    assert pace.rows == 1024
    pace.note_chunk(1024, 0.070)
    assert pace.rows == 512
    for _ in range(3):
        pace.note_chunk(512, 0.036)
        assert pace.rows == 512


def test_only_whole_chunks_say_how_long_they_take() -> None:
    pace = Pace(0.050, grid=2048)
    pace.note_chunk(100, 5.0)
    assert pace.rows == 512


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
        batch, owners, _ = chosen
        seen.append(lengths(batch))
        for segment, owner in zip(batch.segments, owners, strict=True):
            owner.position = segment.end
            if owner.decoding:
                owner.tokens.append(1)
            elif not owner.prefill_left:
                scheduler.remove(owner)
    return seen


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
    scheduler = Scheduler(2048, depth=1, async_steps=0, pace=Pace(0.05, 2048))
    answering = [sequence(0, 10, Decoding)]
    for slot in range(1, 5):
        scheduler.add(sequence(slot, 200, Prefilling))
    assert run(scheduler, answering, 4) == [[200, 200], [1], [200, 200], [1]]


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
@pytest.mark.parametrize("async_steps", [0, 1])
def test_every_state_has_the_bits_of_a_run_by_itself_with_the_edges_its_manifest_names(
    make_tiny: Any, kind: str, async_steps: int
) -> None:
    lab = Lab(make_tiny(kind))
    prompts = [random_tokens(count, seed) for seed, count in enumerate((300, 70, 520, 83))]
    alone = lab.engine(grid=256)
    expected = [Answer(alone, Prompt(prompt), max_tokens=40).tokens for prompt in prompts]
    alone.stop()
    engine = lab.engine(grid=256, max_gap=1e-9, async_steps=async_steps)  # every chunk beside an answer is too long
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
    assert any(cut % 256 and cut not in map(len, prompts) for cut in cuts), "some chunks were cut beside answers"


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

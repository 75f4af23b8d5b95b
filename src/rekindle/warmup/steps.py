"""The step shapes of a stage: all of them, to list the kernels to be compiled ahead; and those that a stage records and
runs before its first request, so that nothing is compiled, loaded or recorded during one."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rekindle.batch import PENDING, Batch, Segment, Wanted
from rekindle.spec import PAGE
from rekindle.stages.layout import LONGEST_CHUNK, SHARERS, round_up
from rekindle.stages.local import LocalStage
from rekindle.stages.types import PendingTokens

# Rows of a chunk: on both sides of every number at which some kernel takes another form.
CHUNKS = (2048, 2, 4, 9, 16, 24, 48, 64, 128, 200, 512, 1000, 1024)
BLOCKS = (1, 2, 4, 8, 16, 24, 32)  # rows of a block to verify
LONG = 4096  # positions that a long sequence has before the rows that are run


def pages_needed(slots: int) -> int:
    """Pages of the pool that `run_step_shapes` needs: of one long sequence, and one for each other slot."""
    return (LONG + 2 * CHUNKS[0]) // PAGE + slots


def run_step_shapes(stage: LocalStage) -> Iterator[str]:
    """Run a step of every shape and yield its description. The shapes that a request needs first come first. No slot
    may be in use."""
    yield _chunk(stage, CHUNKS[0])
    yield _decode(stage, 1)
    yield _decode(stage, 1, LONG)
    for rows in CHUNKS[1:]:
        yield _chunk(stage, rows)
    yield _later_chunks(stage)
    for sharers, sizes in SHARERS.items():
        if sharers // 2 < stage.slots:
            yield from (_shared_chunks(stage, min(sharers, stage.slots), rows) for rows in sizes)
    for rows in range(2, stage.slots + 1):
        if rows == round_up(rows):
            yield _decode(stage, rows)
    yield from _blocks(stage, 0)
    yield from _blocks(stage, LONG)
    for beside in sorted({1, stage.slots - 1}) if stage.slots > 1 else ():
        yield _mixed(stage, beside)


def warm_up(stage: LocalStage, chunk: int) -> int:
    """Record the steps that requests will need, and run once what is not recorded: chunks of up to `chunk` rows, the
    copies of their state to the host and back, and a step ahead of the host. Returns how many steps were recorded. No
    slot may be in use."""
    recorded, room = stage.record_steps(chunk), stage.pages().total * PAGE
    if LONGEST_CHUNK < chunk <= room:
        _chunk(stage, chunk)
    rows = min(2 * PAGE + 1, room)
    _forward(stage, Segment(0, 0, (0,) * rows, Wanted.LAST))
    parts = stage.capture(0)
    stage.restore(0, rows, parts)
    if rows < room:
        # With a token that the host does not know: torch loads the kernel that puts it in when it is first asked.
        step = Batch((Segment(0, rows, (PENDING,), Wanted.LAST),))
        tokens = torch.zeros(1, dtype=torch.int64, device=stage.model.device)
        stage.forward(step, stage.blank(1), PendingTokens(tokens, (0,), (0,)) if stage.model.is_first else None)
    stage.close(0)
    return recorded


def _chunk(stage: LocalStage, rows: int) -> str:
    _forward(stage, Segment(0, 0, (0,) * rows, Wanted.LAST))
    stage.close(0)
    return f"a chunk of {rows} rows"


def _later_chunks(stage: LocalStage) -> str:
    """Chunks of a long sequence: attention is split over the pages before them."""
    position = 0
    for rows in (LONG, CHUNKS[0], 128, 16):
        _forward(stage, Segment(0, position, (0,) * rows, Wanted.LAST))
        position += rows
    stage.close(0)
    return f"chunks after {LONG} positions"


def _shared_chunks(stage: LocalStage, sharers: int, rows: int) -> str:
    _forward(stage, *(Segment(slot, 0, (0,) * (rows // sharers), Wanted.LAST) for slot in range(sharers)))
    _close(stage, sharers)
    return f"chunks of {sharers} prompts, {rows} rows together"


def _decode(stage: LocalStage, rows: int, position: int = 0) -> str:
    """One row each of `rows` sequences; the first of them is at `position`, the others at 0."""
    if position:
        _forward(stage, Segment(0, 0, (0,) * position))
    _forward(stage, *(Segment(slot, 0 if slot else position, (0,), Wanted.LAST) for slot in range(rows)))
    _close(stage, rows)
    return f"{rows} decode rows after {position}"


def _blocks(stage: LocalStage, position: int) -> Iterator[str]:
    if position:
        _forward(stage, Segment(0, 0, (0,) * position))
    for rows in BLOCKS:
        _forward(stage, Segment(0, position, (0,) * rows, Wanted.ALL), rewindable=True)
        stage.rewind(0, position)
        yield f"a block of {rows} rows after {position}"
    stage.close(0)


def _mixed(stage: LocalStage, rows: int) -> str:
    decodes = [Segment(slot, 0, (0,), Wanted.LAST) for slot in range(rows)]
    for chunk in (2, CHUNKS[0]):
        _forward(stage, *decodes, Segment(rows, 0, (0,) * chunk, Wanted.LAST))
        _close(stage, rows + 1)
    return f"{rows} decode rows beside a chunk"


def _close(stage: LocalStage, slots: int) -> None:
    for slot in range(slots):
        stage.close(slot)


def _forward(stage: LocalStage, *segments: Segment, rewindable: bool = False) -> None:
    batch = Batch(segments, rewindable)
    for segment in segments:
        if segment.position == 0:
            stage.open(segment.slot)
    stage.forward(batch, stage.blank(batch.rows))

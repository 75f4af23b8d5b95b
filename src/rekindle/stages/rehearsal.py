"""Every kind of step that a stage of a whole model runs, once: for whoever wants to know what kernels that takes."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.batch import Batch, Segment, Wanted
from rekindle.spec import PAGE
from rekindle.stages.layout import round_up
from rekindle.stages.local import LocalStage

# On both sides of every number of rows at which some kernel takes another form.
CHUNKS = (2048, 2, 4, 9, 16, 24, 48, 64, 128, 200, 512, 1000, 1024)
BLOCKS = (1, 2, 4, 8, 16, 24, 32)
BEHIND = 4096  # positions before what is run behind others


def pages_needed(slots: int) -> int:
    """Pages that the stage must have: a long sequence, or one page for every other."""
    return (BEHIND + 2 * CHUNKS[0]) // PAGE + slots


def rehearse(stage: LocalStage) -> Iterator[str]:
    """Runs a step and says what it was. What requests need first comes first; no slot may be in use."""
    yield _chunk(stage, CHUNKS[0])
    yield _decode(stage, 1)
    yield _decode(stage, 1, BEHIND)
    for rows in CHUNKS[1:]:
        yield _chunk(stage, rows)
    yield _chunks_behind_others(stage)
    for rows in range(2, stage.slots + 1):
        if rows == round_up(rows):
            yield _decode(stage, rows)
    yield from _blocks(stage, 0)
    yield from _blocks(stage, BEHIND)
    for beside in sorted({1, stage.slots - 1}) if stage.slots > 1 else ():
        yield _mixed(stage, beside)


def _chunk(stage: LocalStage, rows: int) -> str:
    _forward(stage, Segment(0, 0, (0,) * rows, Wanted.LAST))
    stage.close(0)
    return f"a chunk of {rows} rows"


def _chunks_behind_others(stage: LocalStage) -> str:
    """Attention is split over what is there already."""
    position = 0
    for rows in (BEHIND, CHUNKS[0], 128, 16):
        _forward(stage, Segment(0, position, (0,) * rows, Wanted.LAST))
        position += rows
    stage.close(0)
    return f"chunks behind {BEHIND} positions"


def _decode(stage: LocalStage, rows: int, behind: int = 0) -> str:
    """A row each of as many sequences; one of them may be long."""
    if behind:
        _forward(stage, Segment(0, 0, (0,) * behind))
    _forward(stage, *(Segment(slot, 0 if slot else behind, (0,), Wanted.LAST) for slot in range(rows)))
    _close(stage, rows)
    return f"{rows} decode rows behind {behind}"


def _blocks(stage: LocalStage, behind: int) -> Iterator[str]:
    if behind:
        _forward(stage, Segment(0, 0, (0,) * behind))
    for rows in BLOCKS:
        _forward(stage, Segment(0, behind, (0,) * rows, Wanted.ALL), rewindable=True)
        stage.rewind(0, behind)
        yield f"a block of {rows} rows behind {behind}"
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
    stage.forward(Batch(segments, rewindable), None)

"""Features are what leaves the tapped layers: of the rows that are wanted, from whichever stage has the layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.launches import Launches

from rekindle.batch import Batch, Segment, Wanted
from rekindle.spec import Span
from rekindle.stages import LocalStage, Pipeline

TAPS = (1, 3, 6)
TOKENS = tuple(np.random.default_rng(9).integers(0, 320, 200).tolist())


def reference(tiny: Any, tokens: tuple[int, ...]) -> list[torch.Tensor]:
    """Outputs of the tapped layers by transformers, [tokens, hidden] each."""
    with torch.inference_mode():
        states = tiny.reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return [states[tap + 1][0] for tap in TAPS]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-4 * theirs.abs().max())


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_features_are_the_hidden_states_after_the_tapped_layers(make_tiny: Any, kind: str) -> None:
    """Of the last rows of every segment that wants some; chunks, single rows and blocks alike."""
    tiny = make_tiny(kind)
    stage, wanted = tiny.stage(), reference(tiny, TOKENS[:90])
    for slot in (0, 1):
        stage.forward(Batch((Segment(slot, 0, TOKENS[:60]),)), None)
    segments = (
        Segment(0, 60, TOKENS[60:66], Wanted.ALL, features=6),
        Segment(2, 0, TOKENS[:40], Wanted.LAST, features=7),
        Segment(1, 60, TOKENS[60:61], Wanted.LAST),
    )
    output = stage.forward(Batch(segments, taps=TAPS), None)
    assert len(output.features) == 3
    for ours, theirs in zip(output.features, wanted, strict=True):
        assert close(ours, torch.cat((theirs[60:66], theirs[33:40])))
    assert stage.forward(Batch((Segment(0, 66, TOKENS[66:70]),)), None).features == ()


def test_a_stage_gives_those_of_its_own_layers_and_the_pipeline_joins_them(make_tiny: Any) -> None:
    tiny, taken = make_tiny("dense"), list[tuple[torch.Tensor, ...]]()
    stages = [tiny.stage(span) for span in (Span(0, 1), Span(1, 4), Span(4, 8))]

    class Reader:
        taps, reach = TAPS, 99

        def read(self, batch: Batch, features: tuple[torch.Tensor, ...], pending: object) -> None:
            taken.append(features)

    pipeline = Pipeline(stages, drafter=Reader())  # type: ignore[arg-type]
    output = pipeline.forward(Batch((Segment(0, 0, TOKENS[:50], Wanted.LAST, features=50),))).result()
    assert output.features == () and output.logits is not None
    assert all(close(a, b) for a, b in zip(taken[0], reference(tiny, TOKENS[:50]), strict=True))
    pipeline.stop()


@pytest.mark.parametrize("rows", [1, 5])
def test_a_recorded_step_gives_them_too(make_tiny: Any, rows: int) -> None:
    """In memory of their own: the next step does not change them."""
    tiny = make_tiny("dense")
    recorded = tiny.stage(table_width=32, record=lambda step, warm=None: (step(), step)[1])
    eager, outputs = tiny.stage(), []
    for stage in (recorded, eager):
        taken = list[torch.Tensor]()
        stage.forward(Batch((Segment(0, 0, TOKENS[:64]),)), None)
        for at in range(64, 64 + 2 * rows, rows):
            block = Segment(0, at, TOKENS[at : at + rows], Wanted.ALL, features=rows)
            taken += stage.forward(Batch((block,), rewindable=rows > 1, taps=TAPS), None).features
        outputs.append(taken)
    assert recorded.work()["step:recorded"] >= 2
    assert len(outputs[0]) == 2 * len(TAPS)
    assert all(close(a, b) for a, b in zip(*outputs, strict=True))


@pytest.mark.parametrize("sequences", [1, 3])
def test_features_of_all_taps_leave_a_recorded_step_in_one_launch(make_tiny: Any, sequences: int) -> None:
    """A plain step costs one small copy more than without a drafter, however many layers are tapped."""
    record = {"table_width": 32, "record": lambda step, warm=None: (step(), step)[1]}
    stage, counts = make_tiny("dense").stage(taps=TAPS, **record), []
    for slot in range(sequences):
        stage.forward(Batch((Segment(slot, 0, TOKENS[:9]),)), None)
    for at, features in ((9, 0), (10, 0), (11, 1)):  # the first records the step
        row = TOKENS[at : at + 1]
        segments = tuple(Segment(slot, at, row, Wanted.LAST, features=features) for slot in range(sequences))
        with Launches() as launches:
            output = stage.forward(Batch(segments, taps=TAPS if features else ()), None)
        counts.append(launches.total)
    assert counts[2] == counts[1] + 1
    assert [len(tap) for tap in output.features] == [sequences] * len(TAPS)


def test_a_recorded_step_of_a_cpu_gives_them_too(make_tiny: Any) -> None:
    """Single rows, with taps and without in turn; then blocks. The last of the taps is the last layer."""
    tiny, taps = make_tiny("dense"), (1, 7)
    stage, plain = tiny.stage(rewind_rows=4), tiny.stage(rewind_rows=4)
    plain._cpu_steps = None
    for each in (stage, plain):
        each.forward(Batch((Segment(0, 0, TOKENS[:60]),)), None)
    at = 60
    for rows, wanted in [(1, taps), (1, ()), (1, taps), (1, taps), (4, taps), (4, ()), (4, taps), (4, taps)]:
        segment = Segment(0, at, TOKENS[at : at + rows], Wanted.ALL, features=rows if wanted else 0)
        batch = Batch((segment,), rewindable=rows > 1, taps=wanted)
        ours, theirs = stage.forward(batch, None), plain.forward(batch, None)
        assert len(ours.features) == len(wanted)
        pairs = zip((ours.logits, *ours.features), (theirs.logits, *theirs.features), strict=True)
        assert all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)
        at += rows
    if stage._cpu_steps is not None:
        assert stage.work()["step:recorded"] == 8


def test_a_batch_that_runs_in_portions_gives_all_of_them(make_tiny: Any) -> None:
    tiny = make_tiny("dense")
    small: LocalStage = tiny.stage(pages=6, host_pages=32)
    segments = tuple(Segment(slot, 0, TOKENS[slot : slot + 100], Wanted.LAST, features=3 * slot) for slot in range(4))
    ours = small.forward(Batch(segments, taps=TAPS), None).features
    theirs = tiny.stage().forward(Batch(segments, taps=TAPS), None).features
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len(ours[0]) == 18

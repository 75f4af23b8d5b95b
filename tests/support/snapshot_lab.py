"""Engines over tiny models for the snapshot laws: they can be restarted, and everything they publish is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.build.drafts import DraftWeights, load_drafter
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import Sampling
from rekindle.prefix import HeldStates, PrefixCache, local_tiers
from rekindle.prefix.types import Entry
from rekindle.prompt import BoundaryKind, Prompt
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.types import DRAFTER_LAYER, TAIL, Snapshot
from rekindle.spec import Span
from rekindle.speculative.context import DrafterContext, RingContext
from rekindle.stages import LocalStage, Pipeline, Stage
from support import answers
from support.answers import GREEDY

VOCAB = 320
PLENTY = 1 << 28


def random_tokens(count: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, count).tolist())


class RecordingCache(PrefixCache):
    """Keeps a reference to every snapshot that was published, evicted or not."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: list[Snapshot] = []

    def publish(self, snapshot: Snapshot, kind: BoundaryKind, conversation: str | None = None) -> Entry:
        self.seen.append(snapshot)
        return super().publish(snapshot, kind, conversation)


class Lab:
    """Makes engines over one tiny model."""

    def __init__(self, tiny: Any, recorded: bool = False) -> None:
        """recorded: steps, and passes of a drafter, as a GPU's are; by running them again."""
        self._tiny = tiny
        self.recorded = recorded
        self._oracle = self.stage(slots=1)

    def stage(self, span: Span | None = None, slots: int = 4, pages: int = 64, **pool: Any) -> LocalStage:
        if self.recorded:
            pool = {"table_width": 32, "record": lambda step, warm=None: (step(), step)[1]} | pool
        stage: LocalStage = self._tiny.stage(span, slots=slots, pages=pages, **pool)
        return stage

    def engine(
        self, folder: Path | None = None, ram: int = PLENTY, spans: tuple[Span, ...] = (), **settings: Any
    ) -> Engine:
        """keeps: slots of ended sequences. stages: made before, instead of those of the spans."""
        slots, pages, sizes = settings.pop("slots", 4), settings.pop("pages", 64), settings.pop("sizes", None)
        pool, held = settings.pop("pool", {}), HeldStates(sizes, ram) if settings.pop("keeps", False) else None
        disk = DiskStore(folder, "f" * 64, PLENTY) if folder is not None else None
        stages = settings.pop("stages", ()) or [self.stage(span, slots, pages, **pool) for span in spans or (None,)]
        pipeline = Pipeline(stages, drafter=self.drafter(settings.pop("drafter", None), stages))
        return Engine(
            pipeline,
            RecordingCache(local_tiers(ram, disk), sizes, held),
            EngineSettings(**{"context": 2048, "grid": 64, **settings}),
        ).start()

    def drafter(self, file: DraftWeights | None, stages: Sequence[Stage]) -> RingContext | None:
        """For a pipeline of these stages."""
        if file is None:
            return None
        made = load_drafter(file, self._tiny.open(), stages, torch.float32, context=2048)
        if not self.recorded or not isinstance(made, DrafterContext):
            return made
        slots = min(stage.slots for stage in stages)
        return DrafterContext(made.model, file.fingerprint(), slots, 2048, record=lambda step: step)

    def never_stopped(self, snapshot: Snapshot) -> Snapshot:
        """The same tokens by the same steps in one slot, with no capture and no restore on the way."""
        return self.by_steps(snapshot, _steps(snapshot))

    def cold(self, snapshot: Snapshot) -> Snapshot:
        """The same tokens by prefill alone, chunks on the snapshot's grid and cut where it was cut."""
        cuts = sorted({cut for stretch in snapshot.stretches for cut in (*stretch.cuts, stretch.stop)})
        return self.by_steps(snapshot, chunks(0, snapshot.position, snapshot.grid, cuts))

    def by_steps(self, snapshot: Snapshot, steps: list[tuple[int, int]]) -> Snapshot:
        stage, tokens = self._oracle, snapshot.tokens.tolist()
        stage.open(0)
        logits = None
        for start, stop in steps:
            batch = Batch((Segment(0, start, tuple(tokens[start:stop]), Wanted.LAST),))
            logits = stage.forward(batch, None).logits
        assert logits is not None
        parts = tuple(stage.capture(0))
        stage.close(0)
        return Snapshot(snapshot.tokens, parts, logits[-1], snapshot.grid, ())


def chunks(start: int, stop: int, grid: int, cuts: Iterable[int]) -> list[tuple[int, int]]:
    """The definition, apart from the engine's own: every grid line and every cut in between is an edge."""
    inside = {edge for edge in (*range(0, stop, grid), *cuts) if start < edge < stop}
    return list(pairwise(sorted({start, *inside, stop})))


def _steps(snapshot: Snapshot) -> list[tuple[int, int]]:
    steps: list[tuple[int, int]] = []
    start = 0
    for stretch in snapshot.stretches:
        if stretch.how in ("decode", "verify"):
            steps += [(at, at + 1) for at in range(start, stretch.stop)]
        else:
            steps += chunks(start, stretch.stop, snapshot.grid, stretch.cuts)
        start = stretch.stop
    assert start == snapshot.position, f"the stretches reach {start} of {snapshot.position} tokens"
    return steps


def tensors(snapshot: Snapshot) -> list[torch.Tensor]:
    """All that decides an answer: K and V rows of every layer in one piece each, recurrent parts, logits."""
    found = []
    for part in snapshot.parts:
        if part.layer == DRAFTER_LAYER:
            continue
        if part.is_paged:
            found.append(torch.cat([*(page.data for page in part.pages), part.tensors[TAIL]], dim=1))
        else:
            found += part.tensors.values()
    assert snapshot.logits is not None
    return [*found, snapshot.logits]


def same_bits(a: Snapshot, b: Snapshot) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def logit_distance(a: Snapshot, b: Snapshot) -> float:
    assert a.logits is not None and b.logits is not None
    return float((a.logits - b.logits).abs().max())


def on_engine(engine: Engine, call: Callable[[], Any]) -> Any:
    """What the call returns, or raises, on the engine's thread."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    engine._inbox.put(run)
    return outcome.result(60)


def holds_nothing(engine: Engine) -> bool:
    """Whether no page is left once the kept slots are given up."""
    on_engine(engine, engine._endings.give_up_kept)
    return all(stage.pages().used == 0 for stage in engine.pipeline.stages)


def check_slots(engine: Engine) -> None:
    """No slot is lost or in two hands, free ones hold nothing, and the pools agree with their tables."""
    on_engine(engine, lambda: _check_slots(engine))


def _check_slots(engine: Engine) -> None:
    roster = engine._roster
    kept = [kept.slot for kept in roster.kept._kept]
    slots = [*roster.free_slots, *kept, *(sequence.slot for sequence in roster.running)]
    assert sorted(slots) == list(range(engine.pipeline.slots)), f"free, kept and taken are {slots}"
    assert engine.prefixes.held is None or engine.prefixes.held.count == len(kept)
    for stage in engine.pipeline.stages:
        if isinstance(stage, LocalStage):
            stage.check()
            assert not any(stage._tables[slot].pages for slot in roster.free_slots), "a free slot holds pages"


def wait_until(true: Callable[[], bool]) -> None:
    """For what happens in the background, of which no event tells."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "not within 60 s"
        time.sleep(0.005)


class Answer(answers.Answer):
    """Of four tokens, unless a test says otherwise; its tokens are those of a good end."""

    def __init__(self, engine: Engine, prompt: Prompt, sampling: Sampling = GREEDY, **fields: Any) -> None:
        super().__init__(engine, prompt, sampling, **{"max_tokens": 4, **fields})

    @property
    def tokens(self) -> list[int]:
        assert self.finished
        return super().tokens

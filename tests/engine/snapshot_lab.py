"""Engines over tiny models for the snapshot laws: they can be restarted, and everything they publish is recorded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling, Token
from rekindle.prefix import PrefixCache
from rekindle.prefix.types import Entry
from rekindle.prompt import BoundaryKind, Prompt
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.types import KvPart, Snapshot
from rekindle.spec import Span
from rekindle.stages import LocalStage, Pipeline

VOCAB = 320
PLENTY = 1 << 28
GREEDY = Sampling(temperature=0)


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

    def __init__(self, tiny: Any) -> None:
        self._tiny = tiny
        self._oracle = self.stage(slots=1)

    def stage(self, span: Span | None = None, slots: int = 4, pages: int = 64) -> LocalStage:
        stage: LocalStage = self._tiny.stage(span, slots=slots, pages=pages)
        return stage

    def engine(
        self, folder: Path | None = None, ram: int = PLENTY, spans: tuple[Span, ...] = (), **settings: Any
    ) -> Engine:
        slots, pages = settings.pop("slots", 4), settings.pop("pages", 64)
        disk = DiskStore(folder, "f" * 64, PLENTY) if folder is not None else None
        pipeline = Pipeline([self.stage(span, slots, pages) for span in spans or (None,)])
        return Engine(
            pipeline, RecordingCache(ram, disk), EngineSettings(**{"context": 2048, "grid": 64, **settings})
        ).start()

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
        if stretch.how == "decode":
            steps += [(at, at + 1) for at in range(start, stretch.stop)]
        else:
            steps += chunks(start, stretch.stop, snapshot.grid, stretch.cuts)
        start = stretch.stop
    assert start == snapshot.position, f"the stretches reach {start} of {snapshot.position} tokens"
    return steps


def tensors(snapshot: Snapshot) -> list[torch.Tensor]:
    """All it holds: K and V rows of every layer in one piece each, recurrent parts, logits."""
    found = []
    for part in snapshot.parts:
        if isinstance(part, KvPart):
            found.append(torch.cat([*(page.data for page in part.pages), part.tail], dim=1))
        else:
            found += [part.state, part.window]
    assert snapshot.logits is not None
    return [*found, snapshot.logits]


def same_bits(a: Snapshot, b: Snapshot) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def logit_distance(a: Snapshot, b: Snapshot) -> float:
    assert a.logits is not None and b.logits is not None
    return float((a.logits - b.logits).abs().max())


class Answer:
    """Collects the events of one request."""

    def __init__(self, engine: Engine, prompt: Prompt, sampling: Sampling = GREEDY, **fields: Any) -> None:
        self.events: list[Event] = []
        self._done = threading.Event()
        self.id = f"r{id(self)}"
        fields = {"max_tokens": 4, "stop_tokens": frozenset[int](), **fields}
        engine.submit(Request(self.id, prompt, sampling, sink=self._take, **fields))

    def _take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Finished | Failed):
            self._done.set()

    @property
    def finished(self) -> Finished:
        assert self._done.wait(60), f"no end after 60 s: {self.events[-3:]}"
        last = self.events[-1]
        assert isinstance(last, Finished), last
        return last

    @property
    def tokens(self) -> list[int]:
        assert self.finished
        return [event.token for event in self.events if isinstance(event, Token)]


def wait_until(true: Callable[[], bool]) -> None:
    """For what happens in the background, of which no event tells."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "not within 60 s"
        time.sleep(0.005)

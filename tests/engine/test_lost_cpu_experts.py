"""CPU threads for cold experts that stopped answering: an error, told to everyone, and nothing of it is kept."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from rekindle.batch import Batch
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling
from rekindle.errors import CpuExpertsLost
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import Boundary, BoundaryKind, Prompt
from rekindle.stages import LocalStage, Pipeline, StageOutput

PROMPTS = [
    Prompt(tuple((7 * i + 13 * j) % 320 for i in range(150 + 40 * j)), (Boundary(100, BoundaryKind.SYSTEM),))
    for j in range(3)
]


class Paper:
    """A local stage that loses its CPU threads in one forward: NaN, as the kernels give, and later calls raise."""

    def __init__(self, stage: LocalStage, healthy: int) -> None:
        self._stage = stage
        self._healthy = healthy
        self.forwards = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def work(self) -> Counter[str]:
        return self._stage.work()

    def poll_experts(self) -> None:
        if self.forwards > self._healthy:
            raise CpuExpertsLost("the threads did not answer")

    def forward(self, batch: Batch, *rest: Any) -> StageOutput:
        self.forwards += 1
        if self.forwards > self._healthy + 1:
            raise CpuExpertsLost("the threads did not answer")
        out = self._stage.forward(batch, *rest)
        is_lost = self.forwards == self._healthy + 1 and out.logits is not None
        return replace(out, logits=out.logits * float("nan")) if is_lost else out


def make(tiny: Any, healthy: int) -> tuple[Engine, Paper, PrefixCache]:
    stage, prefixes = Paper(tiny.stage(slots=3), healthy), PrefixCache(local_tiers(1 << 28))
    pipeline = Pipeline([stage])  # type: ignore[list-item]
    return Engine(pipeline, prefixes, EngineSettings(context=1024, grid=64)).start(), stage, prefixes


def ask(engine: Engine, prompts: list[Prompt]) -> list[Event]:
    """The last event of every request."""
    last: list[Event | None] = [None] * len(prompts)
    done = [threading.Event() for _ in prompts]

    def sink(i: int) -> Any:
        def take(event: Event) -> None:
            last[i] = event
            if isinstance(event, Finished | Failed):
                done[i].set()

        return take

    for i, prompt in enumerate(prompts):
        engine.submit(Request(f"{i}", prompt, Sampling(temperature=0), 20, frozenset(), sink=sink(i)))
    assert all(event.wait(60) for event in done), "a request hangs"
    return [event for event in last if event is not None]


def test_every_request_fails_with_its_message_and_none_is_tried_again(make_tiny: Any) -> None:
    engine, stage, _ = make(make_tiny("dense"), healthy=9)
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[1:2]):
        before = stage.forwards
        for event in ask(engine, prompts):
            assert isinstance(event, Failed)
            assert isinstance(event.error, CpuExpertsLost)
        if len(prompts) == 1:
            assert stage.forwards == before + 1, "it is told at once"
    engine.stop()
    stage.check()
    assert stage.pages().used == 0


@pytest.mark.parametrize(
    ("healthy", "published", "said"),  # chunks end at 64, 100, 128, 150; a token is drawn after the last
    [(1, [], "its logits are not finite"), (3, [100], "request 0 failed")],
)
def test_a_state_whose_logits_are_not_finite_is_never_published(
    make_tiny: Any,
    healthy: int,
    published: list[int],
    said: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[Any] = []
    engine, _, prefixes = make(make_tiny("dense"), healthy)
    publish = prefixes.publish
    monkeypatch.setattr(prefixes, "publish", lambda snapshot, *rest: kept.append(snapshot) or publish(snapshot, *rest))
    with caplog.at_level(logging.ERROR, "rekindle.engine"):
        ask(engine, PROMPTS[:1])
        engine.stop()
    assert [snapshot.position for snapshot in kept] == published
    assert said in caplog.text


def test_a_snapshot_that_cannot_be_published_is_lost_alone_and_the_engine_can_be_stopped(
    make_tiny: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _, prefixes = make(make_tiny("dense"), healthy=100)

    def publish(*_: Any) -> Any:
        raise OSError("the index is gone")

    monkeypatch.setattr(prefixes, "publish", publish)
    with caplog.at_level(logging.WARNING, "rekindle.engine"):
        (finished,) = ask(engine, PROMPTS[:1])
        engine.stop()
    assert isinstance(finished, Finished)
    assert "the index is gone" in caplog.text

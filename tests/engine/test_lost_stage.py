"""A stage that is lost: the turn goes on from the newest snapshot, or ends with a clear error. Never a hang."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import Event, Failed, Finished, FinishReason, Request, Sampling, Token
from rekindle.errors import StageLost
from rekindle.prefix import PrefixCache
from rekindle.prompt import Boundary, BoundaryKind, Prompt
from rekindle.spec import Span
from rekindle.stages import LocalStage, Pipeline


class Mortal:
    """A local stage that dies at a chosen call and, if it may, comes back with every slot empty."""

    def __init__(self, stage: LocalStage, dies_at: dict[str, int], returns: bool = True) -> None:
        self._stage = stage
        self._dies_at = dies_at
        self._returns = returns
        self.lost: str | None = None
        self.deaths = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stage, name)
        if name not in ("forward", "open", "close", "capture", "prepare_restore", "commit_restore", "rewind"):
            return value

        def call(*arguments: Any) -> Any:
            if self._dies_at.get(name) is not None:
                self._dies_at[name] -= 1
                if self._dies_at[name] < 0:
                    del self._dies_at[name]
                    self.lost = f"died in {name}"
                    self.deaths += 1
            if self.lost:
                raise StageLost(f"shard {self._stage.span}: {self.lost}")
            return value(*arguments)

        return call

    def recover(self) -> None:
        if not self._returns:
            raise StageLost("it does not come back")
        for slot in range(self._stage.slots):
            self._stage.close(slot)
        self.lost = None


class Answer:
    def __init__(self, engine: Engine, prompt: Prompt, count: int = 20) -> None:
        self.events: list[Event] = []
        self._done = threading.Event()
        engine.submit(Request(str(id(self)), prompt, Sampling(temperature=0), count, frozenset(), sink=self._take))

    def _take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Finished | Failed):
            self._done.set()

    def wait(self) -> list[int]:
        assert self._done.wait(60), "a request hangs"
        return [event.token for event in self.events if isinstance(event, Token)]


def make(tiny: Any, dies_at: dict[str, int], returns: bool = True) -> tuple[Engine, Mortal]:
    front = tiny.stage(Span(0, 5), slots=3)
    back = Mortal(tiny.stage(Span(5, 8), slots=3), dies_at, returns)
    pipeline = Pipeline([front, back])
    return Engine(pipeline, PrefixCache(1 << 28), EngineSettings(context=1024, grid=64)).start(), back


PROMPTS = [
    Prompt(tuple((7 * i + 13 * j) % 320 for i in range(150 + 40 * j)), (Boundary(100, BoundaryKind.SYSTEM),))
    for j in range(3)
]


@pytest.mark.parametrize("call", ["forward", "capture", "open", "prepare_restore", "commit_restore", "close"])
@pytest.mark.parametrize("after", [0, 3, 14])
def test_the_streams_go_on_without_a_repeated_or_lost_token(make_tiny: Any, call: str, after: int) -> None:
    tiny = make_tiny("moe")
    engine, _ = make(tiny, {})
    undisturbed = [Answer(engine, prompt).wait() for prompt in PROMPTS]
    engine.stop()
    engine, back = make(tiny, {call: after})
    first = [Answer(engine, prompt) for prompt in PROMPTS]
    assert [answer.wait() for answer in first] == undisturbed
    again = [Answer(engine, prompt) for prompt in PROMPTS]
    assert [answer.wait() for answer in again] == undisturbed
    assert all(isinstance(answer.events[-1], Finished) for answer in [*first, *again])
    engine.stop()
    if call == "forward":
        assert back.deaths == 1, "the test must have killed something"
    # What dies with its last call takes its pages with it; whoever is alive holds none.
    for stage in (engine.pipeline.stages[0], *([] if back.lost else [back._stage])):
        stage.check()
        assert stage.pages().used == 0


def test_a_stage_that_stays_away_fails_every_request_with_its_name(make_tiny: Any) -> None:
    engine, back = make(make_tiny("dense"), {"forward": 2}, returns=False)
    answers = [Answer(engine, prompt) for prompt in PROMPTS]
    for answer in answers:
        answer.wait()
        failed = answer.events[-1]
        assert isinstance(failed, Failed)
        assert "[5, 8)" in str(failed.error)
    back._returns = True
    assert len(Answer(engine, PROMPTS[0]).wait()) == 20, "it serves again once the stage is back"
    engine.stop()


@pytest.mark.parametrize("call", ["forward", "open"])
def test_a_refuge_that_breaks_fails_the_requests_and_not_the_engine(make_tiny: Any, call: str) -> None:
    tiny = make_tiny("dense")
    back = Mortal(tiny.stage(Span(5, 8), slots=3), {call: 0}, returns=False)

    def break_down(span: Span, why: Exception) -> LocalStage:
        raise MemoryError("the device is full")

    pipeline = Pipeline([tiny.stage(Span(0, 5), slots=3), back], break_down)
    engine = Engine(pipeline, PrefixCache(1 << 28), EngineSettings(context=1024, grid=64)).start()
    for _ in range(2):
        answer = Answer(engine, PROMPTS[0])
        answer.wait()
        failed = answer.events[-1]
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, StageLost)
        assert "the device is full" in str(failed.error)
    engine.stop()


def test_a_sequence_between_slot_and_line_is_answered_when_its_slot_cannot_be_closed(make_tiny: Any) -> None:
    tiny = make_tiny("dense")
    front, back = tiny.stage(Span(0, 5), slots=3), Mortal(tiny.stage(Span(5, 8), slots=3), {"forward": 1})
    pipeline = Pipeline([front, back])
    engine = Engine(pipeline, PrefixCache(1 << 28), EngineSettings(context=1024, grid=64)).start()
    close, recover = pipeline.close, back.recover

    def fail_once(slot: int) -> None:
        pipeline.close = close  # type: ignore[method-assign]
        raise RuntimeError("the device does not answer")

    def recover_and_fail() -> None:
        recover()
        pipeline.close = fail_once  # type: ignore[method-assign]

    back.recover = recover_and_fail  # type: ignore[method-assign]
    answer = Answer(engine, PROMPTS[0])
    answer.wait()
    assert isinstance(answer.events[-1], Failed)
    engine.stop()


def test_a_loss_that_no_stage_owns_up_to_fails_the_requests_instead_of_starting_over(make_tiny: Any) -> None:
    tiny = make_tiny("dense")
    stage = tiny.stage(slots=3)
    forwards = 0

    def forward(*arguments: Any) -> Any:
        nonlocal forwards
        forwards += 1
        raise StageLost("the CPU threads did not answer")

    stage.forward = forward
    engine = Engine(Pipeline([stage]), PrefixCache(1 << 28), EngineSettings(context=1024, grid=64)).start()
    answer = Answer(engine, PROMPTS[0])
    answer.wait()
    failed = answer.events[-1]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, StageLost)
    assert "the CPU threads did not answer" in str(failed.error)
    engine.stop()
    assert forwards == 1


def test_a_stage_that_is_lost_while_the_server_stops_is_not_brought_back(make_tiny: Any) -> None:
    engine, back = make(make_tiny("dense"), {})
    forwards, recoveries = 0, 0

    def forward(*arguments: Any) -> Any:
        nonlocal forwards
        forwards += 1
        if forwards == 6:
            engine.end_requests()
            back.lost = "died in forward"
            raise StageLost(back.lost)
        return back._stage.forward(*arguments)

    def recover() -> None:
        nonlocal recoveries
        recoveries += 1
        back.lost = None

    back.forward = forward  # type: ignore[attr-defined]
    back.recover = recover  # type: ignore[method-assign]
    answers = [Answer(engine, prompt, 50) for prompt in PROMPTS]
    for answer in answers:
        answer.wait()
        ended = answer.events[-1]
        assert isinstance(ended, Finished)
        assert ended.reason is FinishReason.CANCELLED
    engine.stop()
    assert forwards >= 6
    assert recoveries == 0
    assert engine.pipeline.stages[0].pages().used == 0

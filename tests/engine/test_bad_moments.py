"""Moments at which an engine could repeat a token, give one client another's error, or fall silent."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import Event, Failed, Finished, PromptLogprobs, Request, Sampling, Token
from rekindle.errors import BadLogits, CrewLost, StageLost
from rekindle.prefix import PrefixCache
from rekindle.prompt import Prompt
from rekindle.snapshots.types import KvPart
from rekindle.spec import Span
from rekindle.stages import Pipeline


class Answer:
    def __init__(self, engine: Engine, prompt: tuple[int, ...], count: int = 12, **fields: Any) -> None:
        self.events: list[Event] = []
        self._done = threading.Event()
        sampling = Sampling(temperature=0)
        engine.submit(Request(str(id(self)), Prompt(prompt), sampling, count, frozenset(), sink=self._take, **fields))

    def _take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Finished | Failed):
            self._done.set()

    def wait(self) -> list[int]:
        assert self._done.wait(60), "a request fell silent"
        return [event.token for event in self.events if isinstance(event, Token)]


class Faulty:
    """A stage whose chosen verb fails once, at its n-th call."""

    def __init__(self, stage: Any, verb: str, at: int, error: Exception) -> None:
        self._stage, self._verb, self._left, self._error = stage, verb, at, error

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stage, name)
        if name != self._verb:
            return value

        def call(*arguments: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                raise self._error
            return value(*arguments)

        return call


def engine_over(stage: Any, **settings: Any) -> Engine:
    fields = {"context": 2048, "grid": 64, **settings}
    return Engine(Pipeline([stage]), PrefixCache(1 << 28), EngineSettings(**fields)).start()


def prompt(seed: int, count: int = 60) -> tuple[int, ...]:
    return tuple((31 * i + 17 * seed) % 320 for i in range(count))


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_sequence_set_aside_in_the_middle_of_its_answer_repeats_no_token(make_tiny: Any, run_ahead: int) -> None:
    tiny = make_tiny("dense")
    engine = engine_over(tiny.stage(slots=2, pages=64))
    alone = [Answer(engine, prompt(i), 100).wait() for i in range(2)]
    engine.stop()
    engine = engine_over(tiny.stage(slots=2, pages=4), run_ahead=run_ahead)
    set_aside: list[int] = []
    original = engine._set_aside_youngest

    def noted() -> None:
        set_aside.extend(s.answer_length for s in engine._running)
        original()

    engine._set_aside_youngest = noted  # type: ignore[method-assign]
    answers = [Answer(engine, prompt(i), 100) for i in range(2)]
    assert [answer.wait() for answer in answers] == alone
    engine.stop()
    assert any(length > 1 for length in set_aside), "the test must have set aside a sequence that was answering"


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_failed_forward_fails_its_own_requests_with_its_own_error(make_tiny: Any, run_ahead: int) -> None:
    stage = Faulty(make_tiny("dense").stage(slots=1), "forward", 6, MemoryError("no memory for the scores"))
    engine = engine_over(stage, run_ahead=run_ahead)
    first, second = Answer(engine, prompt(1)), Answer(engine, prompt(2))
    first.wait()
    failed = first.events[-1]
    assert isinstance(failed, Failed)
    assert "no memory for the scores" in str(failed.error)
    assert len(second.wait()) == 12
    engine.stop()


def test_an_engine_that_cannot_close_a_slot_answers_everyone_and_says_that_it_is_broken(make_tiny: Any) -> None:
    # Opening a slot empties it inside the stage; the first close from outside is the one that ends the request.
    stage = Faulty(make_tiny("dense").stage(slots=1), "close", 1, RuntimeError("the device is gone"))
    engine = engine_over(stage)
    answer = Answer(engine, prompt(1))
    assert len(answer.wait()) == 12
    assert isinstance(answer.events[-1], Finished)
    with pytest.raises(StageLost, match="the device is gone"):
        Answer(engine, prompt(2))
    assert "the device is gone" in (engine.status().broken or "")
    engine.stop()


def test_a_snapshot_that_the_stages_refuse_is_a_miss_and_is_set_aside(make_tiny: Any) -> None:
    engine = engine_over(make_tiny("dense").stage(slots=1))
    expected = Answer(engine, prompt(1, 100)).wait()
    for entry in engine.prefixes.entries():
        assert entry.snapshot is not None
        bent = tuple(
            replace(part, tail=part.tail.double()) if isinstance(part, KvPart) else part
            for part in entry.snapshot.parts
        )
        object.__setattr__(entry.snapshot, "parts", bent)  # frozen, and held by the RAM tier
    again = Answer(engine, prompt(1, 100))
    assert again.wait() == expected
    finished = again.events[-1]
    assert isinstance(finished, Finished)
    assert finished.cache.restored == 0
    assert engine.prefixes.stats().set_aside > 0
    assert engine.prefixes.stats().hits == {}, "what was refused is no hit"
    engine.stop()


def test_prompt_scores_are_told_once_also_after_a_lost_stage(make_tiny: Any) -> None:
    tiny = make_tiny("dense")
    front, back = tiny.stage(Span(0, 4), slots=1), tiny.stage(Span(4, 8), slots=1)

    class Mortal(Faulty):
        lost: str | None = None

        def recover(self) -> None:
            for slot in range(self._stage.slots):
                self._stage.close(slot)
            self.lost = None

        def __getattr__(self, name: str) -> Any:
            call = super().__getattr__(name)
            if name != self._verb:
                return call

            def noted(*arguments: Any) -> Any:
                try:
                    return call(*arguments)
                except StageLost as error:
                    self.lost = str(error)
                    raise

            return noted

    pipeline = Pipeline([front, Mortal(back, "forward", 8, StageLost("gone"))])
    engine = Engine(pipeline, PrefixCache(1 << 28), EngineSettings(context=512, grid=64)).start()
    answer = Answer(engine, prompt(3, 150), prompt_logprobs=1)
    assert len(answer.wait()) == 12
    told = [event for event in answer.events if isinstance(event, PromptLogprobs)]
    assert len(told) == 1
    assert [row.token for row in told[0].rows if row is not None] == list(prompt(3, 150)[1:])
    engine.stop()


def test_background_work_never_shares_a_batch_with_an_answer(make_tiny: Any) -> None:
    stage = make_tiny("dense").stage(slots=2)
    engine = engine_over(stage)
    mixed: list[bool] = []
    forward = engine.pipeline.forward

    def noted(batch: Any, ahead: Any = None) -> Any:
        background = {s.slot for s in engine._running if s.background}
        slots = {segment.slot for segment in batch.segments}
        mixed.append(bool(slots & background) and bool(slots - background))
        return forward(batch, ahead)

    engine.pipeline.forward = noted  # type: ignore[method-assign]
    prepared = Answer(engine, prompt(5, 900), 0, background=True)
    asked = Answer(engine, prompt(6), 60)
    assert len(asked.wait()) == 60
    prepared.wait()
    engine.stop()
    assert not any(mixed)


class Dazed:
    """A stage whose logits are no numbers from its n-th forward on, for as long as it is dazed."""

    def __init__(self, stage: Any, after: int) -> None:
        self._stage, self._left, self.dazed = stage, after, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def forward(self, *arguments: Any) -> Any:
        output = self._stage.forward(*arguments)
        self._left -= 1
        if self.dazed and self._left < 0 and output.logits is not None:
            return replace(output, logits=torch.full_like(output.logits, torch.nan))
        return output


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("after", [0, 3])  # the prompt's own forward; one in the middle of the answer
def test_logits_that_are_no_numbers_end_the_answer_with_an_error_and_leave_nothing_behind(
    make_tiny: Any, after: int, run_ahead: int
) -> None:
    healthy = engine_over(make_tiny("dense").stage(slots=1))
    expected = Answer(healthy, prompt(1)).wait()
    healthy.stop()
    stage = Dazed(make_tiny("dense").stage(slots=1), after)
    engine = engine_over(stage, run_ahead=run_ahead)
    broken = Answer(engine, prompt(1))
    assert broken.wait() == expected[:after], "no token that nobody has drawn"
    failed = broken.events[-1]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, BadLogits)
    assert f"after {60 + after} tokens" in str(failed.error)
    stage.dazed = False
    assert Answer(engine, prompt(1)).wait() == expected, "what was broken is not restored"
    engine.stop()


@pytest.mark.parametrize("fields", [{}, {"prompt_logprobs": 1}], ids=["prepared", "scored"])
@pytest.mark.parametrize("after", [0, 2])  # the first chunk; the last of three
def test_broken_logits_from_which_nothing_is_drawn_fail_the_request_too(
    make_tiny: Any, fields: dict[str, int], after: int
) -> None:
    stage = Dazed(make_tiny("dense").stage(slots=1), after)
    engine = engine_over(stage)
    broken = Answer(engine, prompt(1, 150), 0, **fields)
    broken.wait()
    failed = broken.events[-1]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, BadLogits)
    assert not any(isinstance(event, Finished | PromptLogprobs) for event in broken.events)
    stage.dazed = False
    again = Answer(engine, prompt(1, 150), 0, **fields)
    again.wait()
    finished = again.events[-1]
    assert isinstance(finished, Finished)
    assert finished.cache.restored == 0, "what was broken is not restored"
    engine.stop()


def test_one_row_of_a_prompt_without_numbers_fails_who_wants_it_scored(make_tiny: Any) -> None:
    """The last row of the chunk, from which a token could be drawn, is sound."""
    stage = make_tiny("dense").stage(slots=1)
    engine = engine_over(stage)
    forward = stage.forward

    def daze(*arguments: Any) -> Any:
        output = forward(*arguments)
        scores = output.scores.clone()
        scores[7] = torch.nan
        return replace(output, scores=scores)

    stage.forward = daze
    broken = Answer(engine, prompt(1), 0, prompt_logprobs=1)
    broken.wait()
    engine.stop()
    assert isinstance(broken.events[-1], Failed)
    assert isinstance(broken.events[-1].error, BadLogits)
    assert not any(isinstance(event, PromptLogprobs) for event in broken.events)


class Noting(Dazed):
    """Notes who calls it, and knows why its logits are broken."""

    def __init__(self, stage: Any, after: int) -> None:
        super().__init__(stage, after)
        self.ran: set[threading.Thread] = set()
        self.settled: set[threading.Thread] = set()

    def forward(self, *arguments: Any) -> Any:
        self.ran.add(threading.current_thread())
        return super().forward(*arguments)

    def settle(self) -> None:
        self.settled.add(threading.current_thread())
        raise CrewLost("the threads are gone")


def test_a_stage_is_asked_for_what_it_knows_in_its_own_line_so_never_beside_a_forward(make_tiny: Any) -> None:
    tiny = make_tiny("dense")
    front, back = (Noting(tiny.stage(span, slots=1), 0) for span in (Span(0, 4), Span(4, 8)))
    engine = Engine(Pipeline([front, back]), PrefixCache(1 << 28), EngineSettings(context=512, grid=64)).start()
    answer = Answer(engine, prompt(1))
    answer.wait()
    engine.stop()
    failed = answer.events[-1]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, CrewLost), "what a stage knows is told instead of a guess"
    assert front.settled == front.ran
    assert back.settled == back.ran


class Shard(Dazed):
    """A stage in another process: it has the verbs of a stage, and tells nothing of its work."""

    def __getattr__(self, name: str) -> Any:
        if name in ("work", "settle"):
            raise AttributeError(name)
        return super().__getattr__(name)


@pytest.mark.parametrize("kind", [Dazed, Shard])
def test_broken_logits_point_to_the_log_of_a_stage_that_cannot_be_asked(make_tiny: Any, kind: type[Dazed]) -> None:
    tiny = make_tiny("dense")
    pipeline = Pipeline([tiny.stage(Span(0, 4), slots=1), kind(tiny.stage(Span(4, 8), slots=1), 0)])
    engine = Engine(pipeline, PrefixCache(1 << 28), EngineSettings(context=512, grid=64)).start()
    answer = Answer(engine, prompt(1))
    answer.wait()
    engine.stop()
    failed = answer.events[-1]
    assert isinstance(failed, Failed)
    assert ("the shard of layers [4, 8), see its log" in str(failed.error)) == (kind is Shard)

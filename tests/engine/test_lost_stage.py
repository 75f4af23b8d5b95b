"""A stage that is lost: the turn goes on from the newest snapshot, or ends with a clear error. Never a hang."""

from __future__ import annotations

from typing import Any

import pytest
from support.answers import Answer, arriving_together
from support.mortal import Mortal

from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.sequence import Sequence
from rekindle.engine.to_host import DrawnTokens
from rekindle.engine.types import Failed, Finished, FinishReason, Started
from rekindle.errors import StageLost
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import Boundary, BoundaryKind, Prompt
from rekindle.spec import Span
from rekindle.stages import LocalStage, Pipeline


def make(tiny: Any, dies_at: dict[str, int], returns: bool = True) -> tuple[Engine, Mortal]:
    front = tiny.stage(Span(0, 5), slots=3)
    back = Mortal(tiny.stage(Span(5, 8), slots=3), dies_at, returns)
    pipeline = Pipeline([front, back])
    return Engine(pipeline, PrefixCache(local_tiers(1 << 28)), EngineSettings(context=1024, grid=64)).start(), back


PROMPTS = [
    Prompt(tuple((7 * i + 13 * j) % 320 for i in range(150 + 40 * j)), (Boundary(100, BoundaryKind.SYSTEM),))
    for j in range(3)
]


@pytest.mark.parametrize("call", ["forward", "capture", "open", "prepare_restore", "commit_restore", "close"])
@pytest.mark.parametrize("after", [0, 3, 14])
def test_the_streams_go_on_without_a_repeated_or_lost_token(make_tiny: Any, call: str, after: int) -> None:
    tiny = make_tiny("moe")
    engine, _ = make(tiny, {})
    undisturbed = [Answer(engine, prompt, max_tokens=20).tokens for prompt in PROMPTS]
    engine.stop()
    engine, back = make(tiny, {call: after})
    first = [Answer(engine, prompt, max_tokens=20) for prompt in PROMPTS]
    assert [answer.tokens for answer in first] == undisturbed
    again = [Answer(engine, prompt, max_tokens=20) for prompt in PROMPTS]
    assert [answer.tokens for answer in again] == undisturbed
    assert all(isinstance(answer.events[-1], Finished) for answer in [*first, *again])
    engine.stop()
    if call == "forward":
        assert back.deaths == 1, "the test must have killed something"
    # What dies with its last call takes its pages with it; whoever is alive holds none.
    for stage in (engine.pipeline.stages[0], *([] if back.lost else [back._stage])):
        stage.check()
        assert stage.pages().used == 0


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("which", [1, 2, 3])
def test_answers_whose_last_token_is_out_end_there_whatever_is_lost_then(
    make_tiny: Any, which: int, returns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three answers end in one step, and the stage is lost as one of them is captured."""
    back = Mortal(make_tiny("dense").stage(Span(0, 8), slots=3), {}, returns)
    settings = EngineSettings(context=1024, grid=64)
    engine = Engine(Pipeline([back]), PrefixCache(local_tiers(1 << 28)), settings).start()
    left, capture = [which], engine._publisher.capture

    def lose(sequence: Sequence, position: int, kind: BoundaryKind, will_be_kept: bool = False) -> None:
        left[0] -= kind is BoundaryKind.ANSWER
        if kind is BoundaryKind.ANSWER and left[0] == 0:
            back.lost = "died"
            raise StageLost("died")
        capture(sequence, position, kind, will_be_kept)

    monkeypatch.setattr(engine._publisher, "capture", lose)
    ended = [list[int](), list[int](), list[int]()]
    stops = [lambda token, seen=seen: seen.append(token) or len(seen) == 6 for seen in ended]
    prompts = [Prompt(tuple((7 * i + 13 * j) % 320 for i in range(20))) for j in range(3)]  # of one batch
    with arriving_together(engine):
        answers = [Answer(engine, prompts[j], max_tokens=50, stop_when=stops[j]) for j in range(3)]
    for answer, seen in zip(answers, ended, strict=True):
        assert isinstance(answer.last, Finished)
        assert answer.last.reason is FinishReason.STOP
        assert answer.tokens == seen and len(seen) == 6
    assert left[0] <= 0, "the stage was lost"
    engine.stop()


def test_first_tokens_on_their_way_when_a_stage_is_lost_are_drawn_again(
    make_tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts that were restored whole just before."""
    monkeypatch.setattr(DrawnTokens, "arrived", False)
    engine, back = make(make_tiny("dense"), {})
    undisturbed = [Answer(engine, prompt, max_tokens=20).tokens for prompt in PROMPTS]
    back._dies_at["commit_restore"] = 2
    with arriving_together(engine):
        again = [Answer(engine, prompt, max_tokens=20) for prompt in PROMPTS]
    assert [answer.tokens for answer in again] == undisturbed
    assert back.deaths == 1
    for answer in again:
        assert [isinstance(event, Started) for event in answer.events] == [True] + [False] * 21
    assert engine.status().waiting == 0
    engine.stop()


def test_a_stage_that_stays_away_fails_every_request_with_its_name(make_tiny: Any) -> None:
    engine, back = make(make_tiny("dense"), {"forward": 2}, returns=False)
    answers = [Answer(engine, prompt, max_tokens=20) for prompt in PROMPTS]
    for answer in answers:
        answer.wait()
        failed = answer.events[-1]
        assert isinstance(failed, Failed)
        assert "[5, 8)" in str(failed.error)
    back._returns = True
    assert len(Answer(engine, PROMPTS[0], max_tokens=20).tokens) == 20, "it serves again once the stage is back"
    engine.stop()


@pytest.mark.parametrize("call", ["forward", "open"])
def test_a_replacement_that_breaks_fails_the_requests_and_not_the_engine(make_tiny: Any, call: str) -> None:
    tiny = make_tiny("dense")
    back = Mortal(tiny.stage(Span(5, 8), slots=3), {call: 0}, returns=False)

    def break_down(span: Span, why: Exception) -> LocalStage:
        raise MemoryError("the device is full")

    pipeline = Pipeline([tiny.stage(Span(0, 5), slots=3), back], break_down)
    engine = Engine(pipeline, PrefixCache(local_tiers(1 << 28)), EngineSettings(context=1024, grid=64)).start()
    for _ in range(2):
        answer = Answer(engine, PROMPTS[0], max_tokens=20)
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
    engine = Engine(pipeline, PrefixCache(local_tiers(1 << 28)), EngineSettings(context=1024, grid=64)).start()
    close, recover = pipeline.close, back.recover

    def fail_once(slot: int) -> None:
        pipeline.close = close  # type: ignore[method-assign]
        raise RuntimeError("the device does not answer")

    def recover_and_fail() -> None:
        recover()
        pipeline.close = fail_once  # type: ignore[method-assign]

    back.recover = recover_and_fail  # type: ignore[method-assign]
    answer = Answer(engine, PROMPTS[0], max_tokens=20)
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
    engine = Engine(Pipeline([stage]), PrefixCache(local_tiers(1 << 28)), EngineSettings(context=1024, grid=64)).start()
    answer = Answer(engine, PROMPTS[0], max_tokens=20)
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
    answers = [Answer(engine, prompt, max_tokens=50) for prompt in PROMPTS]
    for answer in answers:
        answer.wait()
        ended = answer.events[-1]
        assert isinstance(ended, Finished)
        assert ended.reason is FinishReason.CANCELLED
    engine.stop()
    assert forwards >= 6
    assert recoveries == 0
    assert engine.pipeline.stages[0].pages().used == 0

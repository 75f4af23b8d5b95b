"""Moments at which an engine could repeat a token, give one client another's error, or fall silent."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.answers import Answer
from support.faulty import Faulty

from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import Failed, Finished, PromptLogprobs, Sampling
from rekindle.errors import BadLogits, CpuExpertsLost, StageLost
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.snapshots.types import TAIL
from rekindle.spec import Span
from rekindle.stages import Pipeline


def engine_over(stage: Any, **settings: Any) -> Engine:
    fields = {"context": 2048, "grid": 64, **settings}
    return Engine(Pipeline([stage]), PrefixCache(local_tiers(1 << 28)), EngineSettings(**fields)).start()


def prompt(seed: int, count: int = 60) -> tuple[int, ...]:
    return tuple((31 * i + 17 * seed) % 320 for i in range(count))


@pytest.mark.parametrize("async_steps", [0, 1])
def test_a_sequence_preempted_in_the_middle_of_its_answer_repeats_no_token(make_tiny: Any, async_steps: int) -> None:
    tiny = make_tiny("dense")
    engine = engine_over(tiny.stage(slots=2, pages=64))
    alone = [Answer(engine, prompt(i), max_tokens=100).tokens for i in range(2)]
    engine.stop()
    engine = engine_over(tiny.stage(slots=2, pages=4), async_steps=async_steps)
    preempted: list[int] = []
    original = engine._launcher.preempt_youngest

    def noted() -> None:
        preempted.extend(s.answer_length for s in engine._roster.running)
        original()

    engine._launcher.preempt_youngest = noted  # type: ignore[method-assign]
    answers = [Answer(engine, prompt(i), max_tokens=100) for i in range(2)]
    assert [answer.tokens for answer in answers] == alone
    engine.stop()
    assert any(length > 1 for length in preempted), "the test must have preempted a sequence that was answering"


@pytest.mark.parametrize("async_steps", [0, 1])
def test_a_failed_forward_fails_its_own_requests_with_its_own_error(make_tiny: Any, async_steps: int) -> None:
    stage = Faulty(make_tiny("dense").stage(slots=1), "forward", 6, MemoryError("no memory for the scores"))
    engine = engine_over(stage, async_steps=async_steps)
    first, second = Answer(engine, prompt(1)), Answer(engine, prompt(2))
    first.wait()
    failed = first.events[-1]
    assert isinstance(failed, Failed)
    assert "no memory for the scores" in str(failed.error)
    assert len(second.tokens) == 12
    engine.stop()


def test_an_engine_that_cannot_close_a_slot_answers_everyone_and_says_that_it_is_broken(make_tiny: Any) -> None:
    # Opening a slot empties it inside the stage; the first close from outside is the one that ends the request.
    stage = Faulty(make_tiny("dense").stage(slots=1), "close", 1, RuntimeError("the device is gone"))
    engine = engine_over(stage)
    answer = Answer(engine, prompt(1))
    assert len(answer.tokens) == 12
    assert isinstance(answer.events[-1], Finished)
    with pytest.raises(StageLost, match="the device is gone"):
        Answer(engine, prompt(2))
    assert "the device is gone" in (engine.status().broken or "")
    engine.stop()


def test_a_snapshot_that_the_stages_refuse_is_a_miss_and_is_set_aside(make_tiny: Any) -> None:
    engine = engine_over(make_tiny("dense").stage(slots=1))
    expected = Answer(engine, prompt(1, 100)).tokens
    for entry in engine.prefixes.entries():
        snapshot = engine.prefixes.at_hand(entry)
        assert snapshot is not None
        bent = tuple(
            replace(part, tensors={TAIL: part.tensors[TAIL].double()}) if part.is_paged else part
            for part in snapshot.parts
        )
        object.__setattr__(snapshot, "parts", bent)  # frozen, and held by the RAM tier
    again = Answer(engine, prompt(1, 100))
    assert again.tokens == expected
    finished = again.events[-1]
    assert isinstance(finished, Finished)
    assert finished.cache.restored == 0
    assert engine.prefixes.stats().quarantined > 0
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
    engine = Engine(pipeline, PrefixCache(local_tiers(1 << 28)), EngineSettings(context=512, grid=64)).start()
    answer = Answer(engine, prompt(3, 150), prompt_logprobs=1)
    assert len(answer.tokens) == 12
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
        background = {s.slot for s in engine._roster.running if s.background}
        slots = {segment.slot for segment in batch.segments}
        mixed.append(bool(slots & background) and bool(slots - background))
        return forward(batch, ahead)

    engine.pipeline.forward = noted  # type: ignore[method-assign]
    prepared = Answer(engine, prompt(5, 900), max_tokens=0, background=True)
    asked = Answer(engine, prompt(6), max_tokens=60)
    assert len(asked.tokens) == 60
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


@pytest.mark.parametrize("async_steps", [0, 1])
@pytest.mark.parametrize("after", [0, 3])  # the prompt's own forward; one in the middle of the answer
def test_logits_that_are_no_numbers_end_the_answer_with_an_error_and_leave_nothing_behind(
    make_tiny: Any, after: int, async_steps: int
) -> None:
    healthy = engine_over(make_tiny("dense").stage(slots=1))
    expected = Answer(healthy, prompt(1)).tokens
    healthy.stop()
    stage = Dazed(make_tiny("dense").stage(slots=1), after)
    engine = engine_over(stage, async_steps=async_steps)
    broken = Answer(engine, prompt(1))
    assert broken.tokens == expected[:after], "no token that nobody has drawn"
    failed = broken.events[-1]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, BadLogits)
    assert f"after {60 + after} tokens" in str(failed.error)
    stage.dazed = False
    assert Answer(engine, prompt(1)).tokens == expected, "what was broken is not restored"
    engine.stop()


@pytest.mark.parametrize("fields", [{}, {"prompt_logprobs": 1}], ids=["prepared", "scored"])
@pytest.mark.parametrize("after", [0, 2])  # the first chunk; the last of three
def test_broken_logits_from_which_nothing_is_drawn_fail_the_request_too(
    make_tiny: Any, fields: dict[str, int], after: int
) -> None:
    stage = Dazed(make_tiny("dense").stage(slots=1), after)
    engine = engine_over(stage)
    broken = Answer(engine, prompt(1, 150), max_tokens=0, **fields)
    broken.wait()
    failed = broken.events[-1]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, BadLogits)
    assert not any(isinstance(event, Finished | PromptLogprobs) for event in broken.events)
    stage.dazed = False
    again = Answer(engine, prompt(1, 150), max_tokens=0, **fields)
    again.wait()
    finished = again.events[-1]
    assert isinstance(finished, Finished)
    assert finished.cache.restored == 0, "what was broken is not restored"
    engine.stop()


@pytest.mark.parametrize("bad", [(torch.nan,), (torch.inf,), (-torch.inf,), (torch.inf, -torch.inf)])
def test_a_row_of_logits_is_kept_if_every_one_is_a_number(make_tiny: Any, bad: tuple[float, ...]) -> None:
    """However large they are together."""
    engine = engine_over(make_tiny("dense").stage(slots=1))
    publisher = engine._publisher
    for row in (torch.randn(1001), torch.full((1001,), 3e38)):
        assert torch.equal(publisher.bring(row).result(), row)
        row[500 : 500 + len(bad)] = torch.tensor(bad)
        with pytest.raises(BadLogits):
            publisher.bring(row).result()
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
    broken = Answer(engine, prompt(1), max_tokens=0, prompt_logprobs=1)
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

    def poll_experts(self) -> None:
        self.settled.add(threading.current_thread())
        raise CpuExpertsLost("the threads are gone")


def test_a_stage_is_asked_for_what_it_knows_in_its_own_line_so_never_beside_a_forward(make_tiny: Any) -> None:
    tiny = make_tiny("dense")
    front, back = (Noting(tiny.stage(span, slots=1), 0) for span in (Span(0, 4), Span(4, 8)))
    engine = Engine(
        Pipeline([front, back]), PrefixCache(local_tiers(1 << 28)), EngineSettings(context=512, grid=64)
    ).start()
    answer = Answer(engine, prompt(1))
    answer.wait()
    engine.stop()
    failed = answer.events[-1]
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, CpuExpertsLost), "what a stage knows is told instead of a guess"
    assert front.settled == front.ran
    assert back.settled == back.ran


class Shard(Dazed):
    """A stage in another process: it has the verbs of a stage, and tells nothing of its work."""

    def __getattr__(self, name: str) -> Any:
        if name in ("work", "poll_experts"):
            raise AttributeError(name)
        return super().__getattr__(name)


@pytest.mark.parametrize("kind", [Dazed, Shard])
def test_broken_logits_point_to_the_log_of_a_stage_that_cannot_be_asked(make_tiny: Any, kind: type[Dazed]) -> None:
    tiny = make_tiny("dense")
    pipeline = Pipeline([tiny.stage(Span(0, 4), slots=1), kind(tiny.stage(Span(4, 8), slots=1), 0)])
    engine = Engine(pipeline, PrefixCache(local_tiers(1 << 28)), EngineSettings(context=512, grid=64)).start()
    answer = Answer(engine, prompt(1))
    answer.wait()
    engine.stop()
    failed = answer.events[-1]
    assert isinstance(failed, Failed)
    assert ("the shard of layers [4, 8), see its log" in str(failed.error)) == (kind is Shard)


def raise_at(count: int, error: Exception) -> Any:
    """A `stop_when` whose grammar or detokenizer breaks at its n-th token."""
    left = count

    def stop_when(token: int) -> bool:
        nonlocal left
        left -= 1
        if left == 0:
            raise error
        return False

    return stop_when


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"sampling": Sampling(temperature=1.0, top_k=2**63)}, id="a number that fits no tensor"),
        pytest.param({"sampling": Sampling(temperature=0, logit_bias={10**6: 1.0})}, id="a bias beyond the logits"),
        pytest.param({"stop_when": raise_at(3, RuntimeError("the grammar broke"))}, id="a broken watcher"),
    ],
)
def test_what_goes_wrong_for_one_row_ends_that_row_alone(make_tiny: Any, fault: dict[str, Any]) -> None:
    prompts = [tuple((seed * 31 + i * 7) % 320 for i in range(40)) for seed in range(3)]
    engine = engine_over(make_tiny("dense").stage(pages=64))
    try:
        alone = [Answer(engine, prompt).tokens for prompt in prompts]
        beside = [Answer(engine, prompt, max_tokens=40) for prompt in prompts]
        hostile = Answer(engine, (5, 6, 7), max_tokens=40, **fault)
        assert [answer.tokens[:12] for answer in beside] == alone
        hostile.wait()
        assert isinstance(hostile.events[-1], Failed), "the request at fault learns of it"
        assert len(Answer(engine, prompts[0]).tokens) == 12 and engine.status().running == 0
    finally:
        engine.stop()

"""The token loop on a tiny real model: what it promises about answers, hits, batches and slots."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.answers import Answer, arriving_together

from rekindle.engine import publisher
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import Finished, FinishReason, Sampling, Started, Token
from rekindle.errors import PromptTooLong, QueueFull
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import Boundary, BoundaryKind, Prompt
from rekindle.spec import Span
from rekindle.stages import Pipeline

RNG = np.random.default_rng(11)


def random_tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 320, count).tolist())


def make_engine(tiny: Any, spans: tuple[Span, ...] | None = None, **changes: Any) -> Engine:
    pages = changes.pop("pages", 64)
    slots = changes.pop("slots", 4)
    ram = changes.pop("ram", 1 << 28)
    spans = spans or (Span(0, 8),)
    pipeline = Pipeline([tiny.stage(span, slots=slots, pages=pages) for span in spans])
    settings = EngineSettings(**{"context": 2048, "grid": 64, **changes})
    return Engine(pipeline, PrefixCache(local_tiers(ram)), settings).start()


@pytest.fixture(params=[0, 1], ids=["step by step", "one step ahead"])
def async_steps(request: Any) -> int:
    return int(request.param)


@pytest.fixture(params=["dense", "moe"])
def tiny(request: Any, make_tiny: Any) -> Any:
    return make_tiny(request.param)


@pytest.fixture
def engine(tiny: Any, async_steps: int) -> Iterator[Engine]:
    engine = make_engine(tiny, async_steps=async_steps)
    yield engine
    engine.stop()


def greedy_by_reference(tiny: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(tiny.reference_logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_answer_is_the_reference_models(tiny: Any, engine: Engine) -> None:
    prompt = random_tokens(100)
    assert Answer(engine, Prompt(prompt)).wait().tokens == greedy_by_reference(tiny, prompt, 12)


def test_any_chunking_gives_the_same_greedy_tokens(tiny: Any) -> None:
    prompt = Prompt(random_tokens(300, 3))
    answers = []
    for grid in (16, 64, 100, 512):
        engine = make_engine(tiny, grid=grid, ram=0)
        answers.append(Answer(engine, prompt).wait().tokens)
        engine.stop()
    assert all(answer == answers[0] for answer in answers)


def test_same_edges_give_the_same_bits(tiny: Any) -> None:
    prompt = Prompt(random_tokens(200, 4), (Boundary(77, BoundaryKind.MESSAGE),))
    sampling = Sampling(temperature=0, logprobs=3)
    runs = []
    for _ in range(2):
        engine = make_engine(tiny, ram=0)
        runs.append([e for e in Answer(engine, prompt, sampling).wait().events if isinstance(e, Token)])
        engine.stop()
    assert runs[0] == runs[1]


def test_hit_as_long_as_the_prompt_runs_no_forward(engine: Engine) -> None:
    prompt = Prompt(random_tokens(150, 5))
    first = Answer(engine, prompt).wait()
    computed = engine.status().computed_tokens
    second = Answer(engine, prompt)
    assert second.finished.cache.restored == 150
    assert second.finished.cache.computed == 0
    assert engine.status().computed_tokens == computed
    assert second.tokens == first.tokens


def test_only_the_suffix_of_a_longer_prompt_is_computed(engine: Engine) -> None:
    prompt = random_tokens(150, 6)
    first = Answer(engine, Prompt(prompt)).wait()
    longer = (*prompt, *first.tokens, *random_tokens(40, 7))
    again = Answer(engine, Prompt(longer))
    assert again.finished.cache.restored >= 150 + len(first.tokens) - 1
    assert again.finished.cache.computed <= 41


def test_a_hit_never_changes_an_answer(tiny: Any) -> None:
    system, tail = random_tokens(130, 8), random_tokens(90, 9)
    prompt = Prompt((*system, *tail), (Boundary(130, BoundaryKind.SYSTEM),))
    sampling = Sampling(temperature=0, logprobs=2)
    cold_engine = make_engine(tiny, ram=0)
    cold = Answer(cold_engine, prompt, sampling).wait()
    cold_engine.stop()
    engine = make_engine(tiny)
    Answer(engine, Prompt((*system, *random_tokens(50, 10)), prompt.boundaries)).wait()
    warm = Answer(engine, prompt, sampling)
    assert warm.finished.cache.restored == 130
    tokens = lambda a: [e for e in a.events if isinstance(e, Token)]  # noqa: E731
    assert tokens(warm) == tokens(cold), "the same edges, so the same bits"
    engine.stop()


def test_snapshot_longer_than_the_prompt_is_never_used(engine: Engine) -> None:
    prompt = random_tokens(150, 12)
    Answer(engine, Prompt(prompt)).wait()
    shorter = Answer(engine, Prompt(prompt[:149]))
    assert shorter.finished.cache.restored < 149


def test_the_next_branch_starts_where_two_prompts_departed(engine: Engine) -> None:
    shared = random_tokens(100, 13)
    Answer(engine, Prompt((*shared, *random_tokens(60, 14)))).wait()
    second = Answer(engine, Prompt((*shared, *random_tokens(60, 15))))
    assert second.finished.cache.restored == 0
    third = Answer(engine, Prompt((*shared, *random_tokens(60, 16))))
    assert third.finished.cache.restored == 100


def test_two_prompts_part_where_the_first_is_not_published_yet(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, held, is_here = random_tokens(100, 113), [True], publisher._Capture.is_here
    monkeypatch.setattr(publisher._Capture, "is_here", lambda capture: not held and is_here(capture))
    for seed in (114, 115):
        answer = Answer(engine, Prompt((*shared, *random_tokens(60, seed))))
        assert answer.finished.cache.restored == 0
    on_its_way = engine._publisher.shared_length
    assert on_its_way(np.array(shared), "") == 100
    assert on_its_way(np.array(shared), "another") == 0, "whoever asks there has no use of it, and is told nothing"
    held.clear()
    third = Answer(engine, Prompt((*shared, *random_tokens(60, 116))))
    assert third.finished.cache.restored == 100


def test_prompts_that_arrive_together_compute_their_common_prefix_once(engine: Engine) -> None:
    shared = random_tokens(500, 17)
    answers = [Answer(engine, Prompt((*shared, *random_tokens(30, 18 + i)))) for i in range(4)]
    computed = sum(answer.finished.cache.computed for answer in answers)
    assert computed <= 500 + 4 * 30 + 64


@pytest.mark.parametrize("spans", [(Span(0, 8),), (Span(0, 3), Span(3, 8)), (Span(0, 1), Span(1, 6), Span(6, 8))])
def test_many_at_once_get_what_each_gets_alone(tiny: Any, spans: tuple[Span, ...], async_steps: int) -> None:
    if async_steps and len(spans) > 1:
        async_steps = 0  # only one stage runs ahead
    prompts = [Prompt(random_tokens(20 + 37 * i, 30 + i)) for i in range(9)]
    settings = [Sampling(temperature=0) if i % 2 else Sampling(temperature=0.9, seed=i, top_k=40) for i in range(9)]
    engine = make_engine(tiny, ram=0)
    alone = [Answer(engine, p, s).wait().tokens for p, s in zip(prompts, settings, strict=True)]
    engine.stop()
    engine = make_engine(tiny, spans, ram=0, async_steps=async_steps)
    answers = [Answer(engine, p, s) for p, s in zip(prompts, settings, strict=True)]
    assert [answer.wait().tokens for answer in answers] == alone
    engine.stop()
    for stage in engine.pipeline.stages:
        stage.check()
        assert stage.pages().used == 0


def test_a_pool_too_small_for_all_answers_everyone(tiny: Any) -> None:
    prompts = [Prompt(random_tokens(100 + 20 * i, 50 + i)) for i in range(6)]
    engine = make_engine(tiny, ram=0)
    alone = [Answer(engine, p, max_tokens=80).wait().tokens for p in prompts]
    engine.stop()
    engine = make_engine(tiny, pages=9, ram=0)
    answers = [Answer(engine, p, max_tokens=80) for p in prompts]
    assert [answer.wait().tokens for answer in answers] == alone
    assert engine.status().pages.used == 0
    engine.stop()


def test_cancelled_request_frees_its_slot_and_pages(engine: Engine) -> None:
    answer = Answer(engine, Prompt(random_tokens(100, 60)), max_tokens=1500)
    assert answer.first_token.wait(60)
    engine.cancel(answer.id)
    assert answer.finished.reason is FinishReason.CANCELLED
    assert len(answer.tokens) < 1500
    assert engine.status().pages.used == 0
    assert engine.status().running == 0


def test_a_full_queue_refuses_at_once(tiny: Any) -> None:
    engine = make_engine(tiny, slots=1, queue=2)
    running = Answer(engine, Prompt(random_tokens(10)), max_tokens=1500)
    assert running.first_token.wait(60)
    waiting = [Answer(engine, Prompt(random_tokens(10, i))) for i in range(2)]
    with pytest.raises(QueueFull, match="2 requests are waiting, the queue holds 2"):
        Answer(engine, Prompt(random_tokens(10)))
    engine.cancel(running.id)
    for answer in waiting:
        assert len(answer.wait().tokens) == 12
    engine.stop()


def test_stop_token_ends_the_answer_and_is_not_part_of_it(engine: Engine) -> None:
    prompt = Prompt(random_tokens(40, 70))
    free = Answer(engine, prompt).wait().tokens
    stop = free[5]
    answer = Answer(engine, prompt, stop_tokens=frozenset([stop]))
    assert answer.finished.reason is FinishReason.STOP
    assert answer.finished.stop_token == stop
    assert answer.tokens == free[: free.index(stop)]
    assert answer.finished.completion_tokens == len(answer.tokens) + 1
    ignoring = Answer(engine, prompt, stop_tokens=frozenset([stop]), ignore_stop_tokens=True)
    assert ignoring.wait().tokens == free


def test_no_last_token_waits_for_the_capture_of_another_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    capture = engine.pipeline.capture
    monkeypatch.setattr(
        engine.pipeline, "capture", lambda *its, **how: happened.append("capture") or capture(*its, **how)
    )
    said = [lambda count, n=n: happened.append(f"{n}: {count}") for n in range(3)]
    with arriving_together(engine):
        answers = [Answer(engine, Prompt(random_tokens(20, 75 + n)), at_token=said[n]) for n in range(3)]
    for answer in answers:
        assert len(answer.wait().tokens) == 12
    last = [happened.index(f"{n}: 12") for n in range(3)]
    assert "capture" not in happened[min(last) : max(last)]
    assert "capture" in happened[max(last) :], "the ends are captured, after the tokens of all"


def test_stop_predicate_sees_every_token_in_order(engine: Engine) -> None:
    seen: list[int] = []

    def stop(token: int) -> bool:
        seen.append(token)
        return len(seen) == 4

    answer = Answer(engine, Prompt(random_tokens(40, 71)), stop_when=stop)
    assert answer.finished.reason is FinishReason.STOP
    assert answer.tokens == seen


def test_prompt_beyond_the_context_is_refused_with_both_numbers(engine: Engine) -> None:
    with pytest.raises(PromptTooLong, match=r"2048 tokens, the context holds 2048"):
        Answer(engine, Prompt(random_tokens(2048)))


def test_a_long_prefill_lets_others_stream_between_its_chunks(engine: Engine) -> None:
    order: queue.SimpleQueue[str] = queue.SimpleQueue()
    stream = Answer(
        engine, Prompt(random_tokens(10, 80)), max_tokens=400, stop_when=lambda _: order.put("stream") or False
    )
    assert stream.first_token.wait(60)
    long = Answer(engine, Prompt(random_tokens(1900, 81)), max_tokens=1, stop_when=lambda _: order.put("long") or False)
    long.wait()
    order.put("end")
    engine.cancel(stream.id)
    stream.wait()
    seen = list(iter(order.get, "end"))
    assert "long" in seen
    assert seen.count("stream") >= 1900 // 64, "at least one token of the stream per chunk of the prefill"


def test_prompt_log_probabilities_equal_the_reference(tiny: Any, engine: Engine) -> None:
    from rekindle.engine.types import PromptLogprobs

    prompt = random_tokens(90, 90)
    answer = Answer(engine, Prompt(prompt), prompt_logprobs=2).wait()
    rows = next(event for event in answer.events if isinstance(event, PromptLogprobs)).rows
    truth = tiny.reference_logits(list(prompt)).log_softmax(-1)
    assert rows[0] is None
    for i, row in enumerate(rows[1:]):
        assert row is not None
        assert row.token == prompt[i + 1]
        assert abs(row.logprob - float(truth[i, prompt[i + 1]])) < 1e-3


def test_a_scored_prompt_takes_no_hit_and_counts_as_a_miss_with_its_reason(engine: Engine) -> None:
    prompt = Prompt(random_tokens(90, 91))
    Answer(engine, prompt).wait()
    before = dict(engine.status().cache.misses)
    started = Answer(engine, prompt, prompt_logprobs=0).wait().events[0]
    assert isinstance(started, Started)
    assert (started.cache.restored, started.cache.computed) == (0, 90)
    assert started.cache.miss == "prompt log-probabilities were asked for"
    after = dict(engine.status().cache.misses)
    assert after.pop("prompt_logprobs") == before.pop("prompt_logprobs", 0) + 1
    assert after == before


def test_started_comes_first_and_says_what_was_restored(engine: Engine) -> None:
    prompt = Prompt(random_tokens(100, 95))
    Answer(engine, prompt).wait()
    again = Answer(engine, prompt).wait()
    started = again.events[0]
    assert isinstance(started, Started)
    assert started.cache.restored_from["ram"] == 100


def test_background_work_waits_for_everyone_else_and_gives_up_its_slot(tiny: Any) -> None:
    engine = make_engine(tiny, slots=1)
    prepared = Answer(engine, Prompt(random_tokens(300, 99)), max_tokens=0, background=True)
    asked = Answer(engine, Prompt(random_tokens(50, 98)))
    assert len(asked.wait().tokens) == 12
    prepared.wait()
    again = Answer(engine, Prompt(random_tokens(300, 99)), max_tokens=0, background=True).wait()
    assert isinstance(again.events[-1], Finished)
    hit = Answer(engine, Prompt((*random_tokens(300, 99), 5, 6)))
    assert hit.finished.cache.restored == 300
    engine.stop()

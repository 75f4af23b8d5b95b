"""The token loop over a tiny pool: everyone is answered, and with the answers of a large one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.answers import Answer

from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import Finished
from rekindle.errors import PromptTooLong
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import Boundary, BoundaryKind, Prompt
from rekindle.spec import Span
from rekindle.stages import LocalStage, Pipeline

RNG = np.random.default_rng(21)
LENGTHS = [int(n) for n in RNG.integers(5, 700, 32)]
PROMPTS = [tuple(RNG.integers(0, 320, n).tolist()) for n in LENGTHS]


def make_engine(stages: list[LocalStage], ram: int = 0, context: int = 2048, grid: int = 128) -> Engine:
    return Engine(Pipeline(stages), PrefixCache(local_tiers(ram)), EngineSettings(context=context, grid=grid)).start()


def answers(engine: Engine, prompts: list[Prompt], count: int = 10) -> list[list[int]]:
    asked = [Answer(engine, prompt, max_tokens=count, patience=120) for prompt in prompts]
    return [answer.tokens for answer in asked if answer.finished]


@pytest.fixture(scope="module")
def alone(make_tiny: Any) -> list[list[int]]:
    engine = make_engine([make_tiny("dense").stage(slots=1, pages=64)])
    wanted = answers(engine, [Prompt(tokens) for tokens in PROMPTS])
    engine.stop()
    return wanted


@pytest.mark.parametrize("spans", [(Span(0, 8),), (Span(0, 3), Span(3, 8))], ids=["one stage", "split"])
@pytest.mark.parametrize("host_pages", [12, 100], ids=["little host memory", "enough host memory"])
def test_32_requests_against_a_tiny_pool_are_answered_as_with_a_large_one(
    make_tiny: Any, alone: list[list[int]], spans: tuple[Span, ...], host_pages: int
) -> None:
    tiny = make_tiny("dense")
    stages = [tiny.stage(span, slots=4, pages=7, host_pages=host_pages) for span in spans]
    engine = make_engine(stages)
    assert answers(engine, [Prompt(tokens) for tokens in PROMPTS]) == alone
    engine.stop()
    for stage in stages:
        stage.check()
        count = stage.pages()
        assert (count.free, count.used) == (count.total, 0)
    assert stages[-1].paging().page_outs > 0


def test_hits_in_a_tiny_pool_change_no_answer(make_tiny: Any, alone: list[list[int]]) -> None:
    stage = make_tiny("dense").stage(slots=2, pages=7, host_pages=60)
    engine = make_engine([stage], ram=1 << 28)
    longest = max(range(32), key=lambda i: LENGTHS[i])
    prompt = Prompt(PROMPTS[longest], (Boundary(300, BoundaryKind.SYSTEM),))
    first, again = answers(engine, [prompt]), answers(engine, [prompt])
    assert first == again == [alone[longest]]
    engine.stop()
    stage.check()


def test_a_prompt_longer_than_pool_and_host_is_refused_with_both_numbers(make_tiny: Any) -> None:
    engine = make_engine([make_tiny("dense").stage(slots=1, pages=7, host_pages=3)])
    with pytest.raises(PromptTooLong, match="700 tokens, the KV pool holds 640"):
        Answer(engine, Prompt((1,) * 700), max_tokens=4)
    assert len(answers(engine, [Prompt((1,) * 600)], count=30)[0]) == 30
    engine.stop()


def test_sparse_requests_are_all_answered(make_tiny: Any) -> None:
    stage = make_tiny("dense").stage(slots=3, pages=8, host_pages=60, kv_mode="sparse")
    engine = make_engine([stage])
    assert all(len(tokens) == 10 for tokens in answers(engine, [Prompt(tokens) for tokens in PROMPTS[:12]]))
    engine.stop()
    stage.check()
    assert stage.kv_mode == "sparse"
    assert stage.paging().skipped > 0


@pytest.mark.parametrize("spans", [(Span(0, 8),), (Span(0, 3), Span(3, 8))], ids=["one stage", "split"])
def test_only_a_request_that_left_out_pages_says_so_whoever_runs_beside_it(
    make_tiny: Any, spans: tuple[Span, ...]
) -> None:
    tiny = make_tiny("dense")
    engine = make_engine([tiny.stage(span, slots=2, pages=9, host_pages=60, kv_mode="sparse") for span in spans])
    asked = [Answer(engine, Prompt((PROMPTS[0] * 200)[:length]), max_tokens=30, patience=120) for length in (1200, 40)]
    said = []
    for answer in asked:
        end = answer.finished
        assert isinstance(end, Finished)
        said.append(end.cache.sparse)
    engine.stop()
    assert said == [True, False]

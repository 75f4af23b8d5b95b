"""An engine over stages whose slots lend their memory: everyone is answered as if all of it were there for good."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.answers import Answer
from support.lending_stages import WIDE, idle_of, lending_stage, poisoned
from support.paper_hall import QUICK

from rekindle.engine.engine import Engine, EngineSettings
from rekindle.errors import CopyFailed
from rekindle.prefix import HeldStates, PrefixCache, local_tiers
from rekindle.prompt import Prompt
from rekindle.shards import RemoteStage, ShardServer, Terms
from rekindle.spec import Span
from rekindle.stages import LocalStage, Pipeline, Stage

DICE = np.random.default_rng(21)
PROMPTS = [tuple(DICE.integers(0, 320, int(n)).tolist()) for n in DICE.integers(5, 700, 24)]
SPLIT = (Span(0, 5), Span(5, 8))  # both with attention layers


@pytest.fixture(scope="module")
def dense(make_tiny: Any) -> Any:
    return make_tiny("dense", **WIDE)


def make_engine(stages: Sequence[Stage], keeps: bool = False) -> Engine:
    held = HeldStates(None, 1 << 28) if keeps else None
    cache = PrefixCache(local_tiers(1 << 28 if keeps else 0), None, held)
    return Engine(Pipeline(stages), cache, EngineSettings(context=2048, grid=128)).start()


def answers(engine: Engine, prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
    asked = [Answer(engine, Prompt(tokens), max_tokens=10, patience=120) for tokens in prompts]
    return [answer.tokens for answer in asked if answer.finished]


@pytest.fixture(scope="module")
def wanted(dense: Any) -> list[list[int]]:
    engine = make_engine([dense.stage(slots=1, pages=64)])
    said = answers(engine, PROMPTS)
    engine.stop()
    return said


@pytest.fixture(params=["one stage", "split", "with a shard"])
def stages(request: Any, dense: Any, tmp_path: Path) -> Iterator[tuple[list[Stage], list[LocalStage]]]:
    """Of a pipeline, and those of them that are in this process or behind a link."""
    spans = (Span(0, 8),) if request.param == "one stage" else SPLIT
    made = [poisoned(lending_stage(dense, span, slots=4, places=7, host_pages=40)) for span in spans]
    if request.param != "with a shard":
        yield [*made], made
        return
    facts = {"fingerprint": "tiny", "hidden_dtype": "float32", "kv_dtype": "float32"}
    server = ShardServer({"back": made[1]}, f"ipc://{tmp_path}/shard", **facts)
    server.start()
    terms = Terms(**facts, span=made[1].span, slots=4, pages=47)  # those that are there whoever runs
    yield [made[0], RemoteStage(server.endpoint, "back", terms, deadlines=QUICK)], made
    server.stop()


@pytest.mark.parametrize("keeps", [False, True], ids=["closed", "kept"])
def test_requests_that_come_and_go_are_answered_as_with_all_memory_for_good(
    stages: tuple[list[Stage], list[LocalStage]], wanted: list[list[int]], keeps: bool
) -> None:
    pipeline, made = stages
    engine = make_engine(pipeline, keeps)
    assert answers(engine, PROMPTS) == wanted
    engine.stop()
    for stage in made:
        stage.check()
        assert stage.pages().used == 0
        assert all(slot in idle_of(stage) for slot in range(4)), "every slot is lent again"
    assert made[0].paging().page_outs > 0


def test_a_request_waits_while_the_pages_in_its_slot_cannot_leave(dense: Any, monkeypatch: Any) -> None:
    stage = poisoned(lending_stage(dense, slots=2))
    engine, refused = make_engine([stage]), threading.Event()

    def refuse(pool: Any, pages: Sequence[Any]) -> None:
        if pages:
            refused.set()
            raise CopyFailed("no host memory")

    monkeypatch.setattr(type(stage.pool), "_page_out", refuse)
    long, short = tuple(range(300)) * 3, tuple(range(40))
    first = Answer(engine, long[:640], max_tokens=40, at_token=lambda n: n == 2 and ask_second())
    second = list[Answer]()

    def ask_second() -> None:
        second.append(Answer(engine, short, max_tokens=5))

    assert len(first.tokens) == 40 and first.finished
    assert len(second[0].tokens) == 5 and second[0].finished
    assert refused.is_set(), "the second one was refused a slot before"
    engine.stop()
    stage.check()


def test_kept_slots_make_room_for_a_sequence_before_pages_leave_the_device(dense: Any) -> None:
    """The free place, and some pages, lie in the very slot that it gets."""
    stage = lending_stage(dense, slots=2)
    engine = make_engine([stage], keeps=True)
    assert Answer(engine, PROMPTS[0][:1] * (9 * 64), max_tokens=10).finished
    assert stage.pages().used == 10 and stage.pages().at_once == 1
    assert Answer(engine, PROMPTS[1][:40], max_tokens=10).finished
    engine.stop()
    assert stage.paging().page_outs == 0

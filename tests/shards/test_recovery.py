"""A shard that the head started dies: the answers go on, or end in an error with its name. Nothing leaks."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import soak_shards
from support.snapshot_lab import holds_nothing

from rekindle.batch import Batch, Segment
from rekindle.engine.types import Failed, Finished
from rekindle.errors import SnapshotMismatch, StageLost
from rekindle.shards import RemoteStage
from rekindle.snapshots.types import TAIL, Part
from rekindle.spec import Span
from rekindle.stages import LocalStage, Pipeline


@pytest.fixture(scope="module")
def moe(golden: Path) -> Path:
    return golden / "tiny-qwen35moe-Q4_K_M.gguf"


@pytest.fixture(scope="module")
def undisturbed(moe: Path) -> Iterator[Callable[[int, int], list[int]]]:
    """What a server without a shard answers to a prompt of the talk."""
    built = soak_shards.build(moe, split=False)

    def answer(talk: int, length: int) -> list[int]:
        asked = soak_shards.Asked(built, talk, length)
        assert isinstance(asked.wait(), Finished)
        tokens: list[int] = asked.tokens
        return tokens

    yield answer
    built.stop()


@pytest.fixture(scope="module")
def split(moe: Path) -> Iterator[Any]:
    built = soak_shards.build(moe, split=True, cache=1 << 28)
    yield built
    built.stop()


class Assassin:
    """Kills the shard just before the head sends it the n-th command of a kind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, built: Any, verb: str, calls: int) -> None:
        self.kills = 0
        self._left = calls
        self._built = built
        self._lock = threading.Lock()
        command: Callable[..., Any] = getattr(RemoteStage, verb)

        def call(stage: RemoteStage, *arguments: Any) -> Any:
            with self._lock:
                self._left -= 1
                if self._left == 0:
                    os.kill(self._built.hosts.pid("lab"), signal.SIGKILL)
                    self.kills += 1
            return command(stage, *arguments)

        monkeypatch.setattr(RemoteStage, verb, call)


@pytest.mark.parametrize(
    ("verb", "calls", "talk"),
    [
        ("submit", 2, 10),  # a forward
        ("submit", 12, 20),
        ("capture", 2, 30),
        ("prepare_restore", 1, 40),
        ("commit_restore", 1, 50),
    ],
)
def test_a_shard_killed_in_any_verb_changes_no_answer(
    monkeypatch: pytest.MonkeyPatch,
    split: Any,
    undisturbed: Callable[[int, int], list[int]],
    verb: str,
    calls: int,
    talk: int,
) -> None:
    soak_shards.Asked(split, talk, 150).wait()  # so that there is something to restore
    assassin = Assassin(monkeypatch, split, verb, calls)
    asked = {each: soak_shards.Asked(split, each, 230) for each in range(talk, talk + 3)}
    for each, answer in asked.items():
        assert isinstance(answer.wait(), Finished)
        assert answer.tokens == undisturbed(each, 230)
    assert assassin.kills == 1
    assert split.engine.status().running == 0
    assert holds_nothing(split.engine)


def test_a_shard_that_dies_while_nobody_asks_is_back_for_the_next_request(
    split: Any, undisturbed: Callable[[int, int], list[int]]
) -> None:
    os.kill(split.hosts.pid("lab"), signal.SIGKILL)
    asked = soak_shards.Asked(split, 4, 90)
    assert isinstance(asked.wait(), Finished)
    assert asked.tokens == undisturbed(4, 90)


def test_a_shard_that_cannot_be_started_again_and_fits_nowhere_fails_the_request_by_name_and_the_server_lives_on(
    monkeypatch: pytest.MonkeyPatch, split: Any, undisturbed: Callable[[int, int], list[int]]
) -> None:
    keeper = split.hosts._keepers["lab"]
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "_command", ["false"])
        patch.setattr("rekindle.build.failover.available_ram", lambda: 1 << 20)
        os.kill(keeper.pid, signal.SIGKILL)
        asked = soak_shards.Asked(split, 5, 90)
        end = asked.wait()
        assert isinstance(end, Failed)
        assert isinstance(end.error, StageLost)
        says = str(end.error)
        assert "span [4, 8)" in says
        assert "'false' ended with status 1 before it was ready" in says
        assert "no other device can take layers [4, 8): cpu has 768.0 KiB and" in says
    asked = soak_shards.Asked(split, 5, 90)
    assert isinstance(asked.wait(), Finished)
    assert asked.tokens == undisturbed(5, 90)


def test_random_kills_under_load_leave_no_wrong_answer_and_no_leak(moe: Path) -> None:
    tally = soak_shards.soak(moe, kills=2, seed=1)
    assert tally.kills == 2 and not soak_shards.is_bad(tally), json.dumps(vars(tally))
    assert tally.answers > 0


# All stages or none


def feed(pipeline: Pipeline, slot: int, length: int) -> tuple[Part, ...]:
    pipeline.open(slot)
    pipeline.forward(Batch((Segment(slot, 0, tuple(range(length))),))).result()
    return pipeline.capture(slot).result()


def cut(part: Part) -> Part:
    """The part of another model."""
    if part.is_paged:
        return Part(part.layer, {TAIL: part.tensors[TAIL][..., :-1].contiguous()}, part.pages)
    return Part(part.layer, {**part.tensors, "state": part.tensors["state"][1:]})


@pytest.mark.parametrize("spoilt", [0, 5, 7])
def test_a_restore_that_one_stage_refuses_is_adopted_by_none(make_tiny: Any, spoilt: int) -> None:
    tiny = make_tiny("dense")
    stages = [tiny.stage(Span(0, 4)), tiny.stage(Span(4, 7)), tiny.stage(Span(7, 8))]
    pipeline = Pipeline(stages)
    parts = feed(pipeline, 0, 100)
    before = [tensors(stage, 0) for stage in stages]
    bad = tuple(cut(part) if part.layer == spoilt else part for part in parts)
    with pytest.raises(SnapshotMismatch, match=f"layer {spoilt}"):
        pipeline.restore(1, 100, bad)
    with pytest.raises(SnapshotMismatch, match=f"layer {spoilt}"):
        pipeline.restore(0, 100, bad)
    assert [stage._tables[1].position for stage in stages] == [0, 0, 0]
    after = [tensors(stage, 0) for stage in stages]
    assert all((a == b).all() for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))
    pipeline.restore(1, 100, parts)
    for stage in stages:
        stage.check()
    pipeline.stop()


def tensors(stage: LocalStage, slot: int) -> list[Any]:
    parts = stage.capture(slot)
    return [part.tensors[TAIL if part.is_paged else "state"] for part in parts]


def test_a_restore_for_which_one_stage_has_no_pages_is_adopted_by_none(make_tiny: Any) -> None:
    tiny = make_tiny("dense")
    roomy, tight = tiny.stage(Span(0, 5)), tiny.stage(Span(5, 8), pages=3)
    pipeline = Pipeline([roomy, tight])
    giver = Pipeline([tiny.stage()])
    parts = feed(giver, 0, 130)  # three pages
    feed(pipeline, 0, 10)  # one of three
    with pytest.raises(Exception, match="3 pages are needed, 2 of 3 are free"):
        pipeline.restore(1, 130, parts)
    assert roomy._tables[1].position == 0
    assert roomy.pages().used == tight.pages().used == 1
    pipeline.restore(0, 130, parts)  # in place of what the slot holds there is room
    assert roomy.pages().used == tight.pages().used == 3
    pipeline.stop()

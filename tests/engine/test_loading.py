"""What lies on disk is read while the others go on. The disk here is one whose reads wait for a gate."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.snapshot_lab import PLENTY, Answer, Lab, random_tokens, wait_until

from rekindle.engine import loader
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import FinishReason, Started, Token
from rekindle.errors import BadSnapshotFile
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import Boundary, BoundaryKind, Prompt
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.types import Snapshot
from rekindle.stages import Pipeline

STORED = Prompt(random_tokens(150, 1), (Boundary(100, BoundaryKind.MESSAGE),))


class GatedStore(DiskStore):
    """A disk that answers when the gate opens, and refuses positions that are `bad`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "f" * 64, PLENTY)
        self.gate = threading.Event()
        self.asked = threading.Event()
        self.bad: set[int] = set()
        self.reads = 0
        self.last_reader = ""

    def load(self, id: str) -> Snapshot:
        self.last_reader = threading.current_thread().name
        self.reads += 1
        self.asked.set()
        assert self.gate.wait(60), "the gate stayed shut"
        if next(record.position for record in self.records() if record.id == id) in self.bad:
            raise BadSnapshotFile("bad on purpose")
        return super().load(id)


@pytest.fixture(scope="module")
def lab(make_tiny: Any) -> Lab:
    return Lab(make_tiny("dense"))


@pytest.fixture
def expected(lab: Lab, tmp_path: Path) -> list[int]:
    """The answer to the stored prompt, by the server that stored it."""
    engine = lab.engine(tmp_path)
    answer = Answer(engine, STORED)
    assert answer.finished
    engine.stop()
    return tokens_of(answer)


@pytest.fixture
def disk(tmp_path: Path, expected: list[int]) -> Iterator[GatedStore]:
    disk = GatedStore(tmp_path)
    yield disk
    disk.gate.set()


def engine_over(lab: Lab, disk: DiskStore, slots: int = 3, ram: int = PLENTY) -> Engine:
    pipeline = Pipeline([lab.stage(slots=slots)])
    return Engine(pipeline, PrefixCache(local_tiers(ram, disk)), EngineSettings(context=2048, grid=64)).start()


def tokens_of(answer: Answer) -> list[int]:
    return [event.token for event in answer.events if isinstance(event, Token)]


def test_others_answer_while_a_snapshot_is_read(lab: Lab, disk: GatedStore, expected: list[int]) -> None:
    engine = engine_over(lab, disk)
    waiting = Answer(engine, STORED)
    assert disk.asked.wait(60)
    others = [Answer(engine, Prompt(random_tokens(40, seed)), max_tokens=8) for seed in (2, 3, 4)]
    assert all(other.finished.completion_tokens == 8 for other in others)
    assert waiting.events == []
    assert engine.status().waiting == 1
    disk.gate.set()
    assert waiting.finished.cache.restored_from["disk"] == 150
    assert waiting.finished.cache.computed == 0
    assert tokens_of(waiting) == expected
    assert disk.last_reader.startswith("rekindle-loader")
    engine.stop()


def test_a_sequence_that_waits_for_the_disk_keeps_its_slot_free(lab: Lab, disk: GatedStore) -> None:
    engine, order = engine_over(lab, disk, slots=1), list[str]()
    first = Answer(engine, STORED, at_token=lambda n: order.append("first"))
    assert disk.asked.wait(60)
    second = Answer(engine, Prompt(random_tokens(40, 2)), at_token=lambda n: order.append("second"))
    wait_until(lambda: engine.status().waiting == 2 and second.id in engine._roster)  # the engine has seen it
    disk.gate.set()
    assert first.finished and second.finished
    assert order == ["first"] * 4 + ["second"] * 4
    engine.stop()


def test_an_engine_that_only_waits_for_the_disk_stands_still(
    lab: Lab, disk: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_over(lab, disk, slots=1)
    first = Answer(engine, STORED)
    assert disk.asked.wait(60)
    second = Answer(engine, Prompt(random_tokens(40, 2)))
    wait_until(lambda: engine.status().waiting == 2 and second.id in engine._roster)
    steps = []
    step = engine._step
    monkeypatch.setattr(engine, "_step", lambda: (steps.append(1), step()))
    threading.Event().wait(0.2)
    assert len(steps) <= 2  # what the second request brought, and no turn after it
    disk.gate.set()
    assert first.finished and second.finished
    engine.stop()


def test_who_comes_second_for_the_same_snapshot_finds_it_in_ram(lab: Lab, disk: GatedStore) -> None:
    engine = engine_over(lab, disk)
    first, second = Answer(engine, STORED), Answer(engine, STORED)
    disk.gate.set()
    assert first.finished.cache.restored_from["disk"] == second.finished.cache.restored_from["ram"] == 150
    assert disk.reads == 1
    stats = engine.prefixes.stats()
    assert (stats.lookups, stats.hits, stats.restored) == (2, {"disk": 1, "ram": 1}, {"disk": 150, "ram": 150})
    assert engine.status().restored_tokens == 300
    engine.stop()


def test_many_that_come_for_one_snapshot_keep_no_thread_from_another(
    lab: Lab, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "LOADERS", 2)
    engine = lab.engine(tmp_path)
    prompts = [STORED, Prompt(random_tokens(130, 9))]
    assert Answer(engine, prompts[1]).finished
    engine.stop()
    disk = GatedStore(tmp_path)
    engine = engine_over(lab, disk, slots=5)
    same = [Answer(engine, STORED) for _ in range(4)]
    other = Answer(engine, prompts[1])
    wait_until(lambda: disk.reads == 2)
    engine.cancel(same[2].id)
    disk.gate.set()
    assert other.finished.cache.restored_from["disk"] == 130
    tiers = [answer.finished.cache.restored_from for answer in same if answer is not same[2]]
    assert [tier["disk"] for tier in tiers] == [150, 0, 0] and [tier["ram"] for tier in tiers] == [0, 150, 150]
    assert disk.reads == 2
    engine.stop()
    assert all(entry.pins == 0 for entry in engine.prefixes.entries())


def test_a_read_that_fails_leaves_the_next_for_the_same_snapshot_its_turn(lab: Lab, disk: GatedStore) -> None:
    engine = engine_over(lab, disk)
    disk.bad = {150}
    first, second = Answer(engine, STORED), Answer(engine, STORED)
    disk.gate.set()
    assert first.finished.cache.restored_from["disk"] == 100
    assert second.finished.cache.restored_from["disk"] + second.finished.cache.restored_from["ram"] >= 100
    engine.stop()


def test_a_read_for_which_there_is_no_thread_fails_its_request(
    lab: Lab, disk: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_over(lab, disk)

    def refuse(work: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(engine._restorer._loader._threads, "submit", refuse)
    for _ in range(2):
        with pytest.raises(AssertionError, match="can't start new thread"):
            assert Answer(engine, STORED).finished
    assert Answer(engine, Prompt(random_tokens(40, 2))).finished.reason is FinishReason.LENGTH
    engine.stop()


def test_snapshots_of_several_requests_are_read_at_the_same_time(lab: Lab, tmp_path: Path) -> None:
    prompts = [Prompt(random_tokens(100 + seed, seed)) for seed in range(2)]
    first = lab.engine(tmp_path)
    expected = [Answer(first, prompt).tokens for prompt in prompts]
    first.stop()
    disk = GatedStore(tmp_path)
    engine = engine_over(lab, disk)
    answers = [Answer(engine, prompt) for prompt in prompts]
    wait_until(lambda: disk.reads == 2)  # though the gate is shut, and neither has been read
    disk.gate.set()
    assert [answer.finished.cache.restored_from["disk"] for answer in answers] == [100, 101]
    assert [answer.tokens for answer in answers] == expected
    engine.stop()


def test_a_file_that_turns_out_bad_gives_way_to_the_next_longest(
    lab: Lab, disk: GatedStore, expected: list[int]
) -> None:
    engine = engine_over(lab, disk)
    disk.bad = {150}
    disk.gate.set()
    answer = Answer(engine, STORED)
    assert answer.finished.cache.restored_from["disk"] == 100
    assert answer.finished.cache.computed == 50
    assert "quarantined" in (answer.finished.cache.miss or "")
    assert tokens_of(answer) == expected
    assert engine.prefixes.stats().bad_files == 1
    engine.stop()


def test_when_every_file_is_bad_the_prompt_runs_cold(lab: Lab, disk: GatedStore, expected: list[int]) -> None:
    engine = engine_over(lab, disk)
    disk.bad = {record.position for record in disk.records()}
    disk.gate.set()
    answer = Answer(engine, STORED)
    assert answer.finished.cache.restored == 0
    assert tokens_of(answer) == expected
    engine.stop()


def test_a_request_cancelled_while_its_snapshot_is_read_ends_at_once_and_pins_nothing(
    lab: Lab, disk: GatedStore
) -> None:
    engine = engine_over(lab, disk, slots=1)
    answer = Answer(engine, STORED)
    assert disk.asked.wait(60)
    engine.cancel(answer.id)
    assert answer.finished.reason is FinishReason.CANCELLED
    after = Answer(engine, Prompt(random_tokens(40, 2)))
    assert after.finished.reason is FinishReason.LENGTH
    disk.gate.set()
    engine.stop()
    assert all(entry.pins == 0 for entry in engine.prefixes.entries())
    assert engine.prefixes.stats().hits == engine.prefixes.stats().restored == {}, "nothing was restored"


def test_an_engine_that_stops_while_a_snapshot_is_read_answers_and_waits_for_the_read(
    lab: Lab, disk: GatedStore
) -> None:
    engine = engine_over(lab, disk)
    answer = Answer(engine, STORED)
    assert disk.asked.wait(60)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    assert answer.finished.reason is FinishReason.CANCELLED
    disk.gate.set()
    stopping.join(60)
    assert not stopping.is_alive()
    assert not any(isinstance(event, Started) for event in answer.events)
    assert all(entry.pins == 0 for entry in engine.prefixes.entries())


def test_what_is_being_read_is_no_victim(lab: Lab, disk: GatedStore, expected: list[int]) -> None:
    engine = engine_over(lab, disk, ram=0)
    answer = Answer(engine, STORED)
    assert disk.asked.wait(60)
    disk.make_room(PLENTY)  # everything that may be evicted is
    assert [entry.position for entry in engine.prefixes.entries()] == [150]
    disk.gate.set()
    assert answer.finished.cache.restored_from["disk"] == 150
    assert tokens_of(answer) == expected
    engine.stop()


def test_a_fault_of_the_loader_fails_its_own_request_only(
    lab: Lab, disk: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(id: str) -> Snapshot:
        raise MemoryError("no memory for a snapshot")

    monkeypatch.setattr(disk, "load", burst)
    engine = engine_over(lab, disk)
    failing = Answer(engine, STORED)
    other = Answer(engine, Prompt(random_tokens(40, 2)))
    assert other.finished.reason is FinishReason.LENGTH
    with pytest.raises(AssertionError, match="no memory for a snapshot"):
        assert failing.finished
    engine.stop()
    assert all(entry.pins == 0 for entry in engine.prefixes.entries())

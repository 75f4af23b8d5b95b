from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.paper_snapshots import FINGERPRINT, PaperModel, same
from support.snapshot_lab import wait_until

from rekindle.prompt import BoundaryKind
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.record import Record
from rekindle.snapshots.types import Snapshot
from rekindle.snapshots.writer import FIRST_PAUSE, LOOK, RANK, DiskWriter, Save


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    opened = DiskStore(tmp_path, FINGERPRINT, 1 << 30)
    yield opened
    opened.close()


def save_of(snapshot: Snapshot, done: list[Record | None]) -> Save:
    return Save(snapshot, BoundaryKind.END, None, done.append)


def snapshots(count: int) -> list[Snapshot]:
    return [PaperModel().snapshot(list(range(70 + i))) for i in range(count)]


def test_everything_offered_is_on_disk_after_a_flush(store: DiskStore) -> None:
    writer = DiskWriter(store, capacity=8)
    done: list[Record | None] = []
    wanted = snapshots(5)
    assert all(writer.offer(save_of(snapshot, done)) for snapshot in wanted)
    writer.flush()
    assert all(record and same(store.load(record.id), s) for record, s in zip(done, wanted, strict=True))
    assert writer.saves == 5
    writer.close()


def slow_saves(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """No save ends before the first event is set; the second says that one has begun."""
    gate, started, real = threading.Event(), threading.Event(), store.save

    def slow(*args: Any) -> Record:
        started.set()
        assert gate.wait(30)
        return real(*args)

    monkeypatch.setattr(store, "save", slow)
    return gate, started


def test_a_full_queue_refuses_at_once_and_counts(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, started = slow_saves(store, monkeypatch)
    writer = DiskWriter(store, capacity=2, queue_bytes=0)
    done: list[Record | None] = []
    first, *others = snapshots(4)
    assert writer.offer(save_of(first, done))
    assert started.wait(30)
    assert [writer.offer(save_of(s, done)) for s in others] == [True, True, False]
    assert writer.refused["queue"] == 1
    gate.set()
    writer.close()
    assert len(done) == 3


def test_more_wait_where_they_are_small(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, started = slow_saves(store, monkeypatch)
    first, *others = snapshots(7)
    sizes = [save_of(each, []).nbytes for each in others]
    pages = sum(page.nbytes for part in first.parts for page in part.pages)
    assert save_of(first, []).nbytes == first.own_bytes + pages and pages
    writer = DiskWriter(store, capacity=2, queue_bytes=sum(sizes[:4]))
    assert writer.offer(save_of(first, []))
    assert started.wait(30)
    assert [writer.offer(save_of(each, [])) for each in others] == [True] * 4 + [False] * 2
    gate.set()
    writer.close()
    assert writer._queued_bytes == 0


def test_when_nothing_waits_what_was_refused_is_asked_for(store: DiskStore) -> None:
    left, done = deque[Save](), list[Record | None]()
    writer = DiskWriter(store)
    writer.more = lambda: left.popleft() if left else None
    offered, *refused = snapshots(4)
    left.extend(save_of(each, done) for each in refused)
    writer.flush()
    assert not done, "it asks behind a save"
    assert writer.offer(save_of(offered, done))
    writer.flush()
    assert [record.position for record in done if record] == [each.position for each in (offered, *refused)]
    writer.close()


def test_a_disk_that_refuses_is_asked_again_for_what_was_left_when_its_pause_is_over(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.snapshots.writer.FIRST_PAUSE", 0.05)
    left, done, save, fails = deque[Save](), list[Record | None](), store.save, [OSError(errno.ENOSPC, "full")]

    def full_once(*args: Any) -> Record:
        if fails:
            raise fails.pop()
        return save(*args)

    monkeypatch.setattr(store, "save", full_once)
    writer = DiskWriter(store)
    writer.more = lambda: left.popleft() if left else None
    refused, later = snapshots(2)
    left.append(save_of(later, done))
    assert writer.offer(save_of(refused, done))
    wait_until(lambda: len(done) == 2)
    assert done[0] is None and done[1] is not None
    writer.close()


def resting_writer(store: DiskStore, monkeypatch: pytest.MonkeyPatch, capacity: int) -> tuple[DiskWriter, list[float]]:
    """A writer whose saves say that every piece took an hour, and how long it meant to rest after each."""
    clock, rests = Clock(), list[float]()
    writer = DiskWriter(store, capacity, clock, queue_bytes=0)
    real_save, real_wait = store.save, writer._changed.wait_for

    def save(snapshot: Snapshot, kind: BoundaryKind, conversation: str | None, rest: Callable[[], None]) -> Record:
        def later() -> None:
            clock.now += 3600
            rest()

        return real_save(snapshot, kind, conversation, later)

    def wait_for(wanted: Callable[[], bool], timeout: float | None = None) -> bool:
        rests.extend([] if timeout is None else [timeout])
        return real_wait(wanted, timeout)

    monkeypatch.setattr(store, "save", save)
    monkeypatch.setattr(writer._changed, "wait_for", wait_for)
    return writer, rests


def test_the_writer_rests_after_every_piece_but_lets_nobody_wait_for_it(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, rests = resting_writer(store, monkeypatch, capacity=8)
    done: list[Record | None] = []
    writer.offer(save_of(snapshots(1)[0], done))
    writer.flush()  # would take days
    assert len(done) == 1
    assert rests and set(rests) == {LOOK}, "of days, after each of which it looks whether it must go on resting"
    writer.close()


def test_the_writer_rests_for_nobody(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, _ = resting_writer(store, monkeypatch, capacity=8)
    writer._is_serving = lambda: False
    done: list[Record | None] = []
    assert writer.offer(save_of(snapshots(1)[0], done))
    wait_until(lambda: len(done) == 1)  # would take days
    writer.close()


def test_the_rest_ends_with_the_last_answer(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, _ = resting_writer(store, monkeypatch, capacity=8)
    clock, looks = writer._clock, list[bool]()

    def serving() -> bool:
        """While the first pieces are saved; a tenth of a second passes from look to look."""
        clock.now += 0.1  # type: ignore[attr-defined]
        looks.append(len(looks) < 5)
        return looks[-1]

    writer._is_serving = serving
    done: list[Record | None] = []
    assert writer.offer(save_of(snapshots(1)[0], done))
    wait_until(lambda: len(done) == 1)  # would take days
    assert looks[:8] == [True] * 5 + [False] * 3, "it goes on resting for a moment"
    writer.close()


def test_a_writer_that_was_closed_keeps_nobody_waiting(store: DiskStore) -> None:
    writer, done = DiskWriter(store), list[Record | None]()
    assert writer.offer(save_of(snapshots(1)[0], done))
    writer.close()
    writer.flush()
    writer.close()
    assert len(done) == 1


def test_a_fault_of_whoever_is_asked_for_more_does_not_end_the_writer(
    store: DiskStore, caplog: pytest.LogCaptureFixture
) -> None:
    writer, done = DiskWriter(store), list[Record | None]()

    def fails() -> Save | None:
        raise RuntimeError("on purpose")

    writer.more = fails
    for each in snapshots(2):
        assert writer.offer(save_of(each, done))
        writer.flush()
    assert all(done) and len(done) == 2
    assert "on purpose" in caplog.text
    writer.close()


def test_a_full_queue_ends_the_rest(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, _ = resting_writer(store, monkeypatch, capacity=1)
    first = threading.Event()
    one, two = snapshots(2)
    writer.offer(Save(one, BoundaryKind.END, None, lambda record: first.set()))
    while not writer.offer(save_of(two, [])):  # until the first one is in hand
        pass
    assert first.wait(30), "it rests though the next snapshot would find no place"
    writer.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_refuses_is_said_once_and_tried_again_later(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    clock = Clock()
    writer = DiskWriter(store, capacity=8, clock=clock)
    done: list[Record | None] = []
    a, b, c, d = snapshots(4)

    def refuse(descriptor: int, data: memoryview) -> int:
        raise OSError(code, os.strerror(code))

    with caplog.at_level(logging.INFO):
        with monkeypatch.context() as patch:
            patch.setattr("rekindle.snapshots.files.os.write", refuse)
            assert writer.offer(save_of(a, done))
            writer.flush()
            assert writer.troubled
            assert not writer.offer(save_of(b, done)), "no attempt before the pause is over"
            clock.now += FIRST_PAUSE + 1
            assert writer.offer(save_of(c, done))
            writer.flush()
        clock.now += 10 * FIRST_PAUSE
        assert writer.offer(save_of(d, done))
        writer.flush()
    assert [record is not None for record in done] == [False, False, True]
    assert writer.refused["disk"] == 3
    assert not writer.troubled
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "serving goes on from RAM" in warnings[0].message
    writer.close()


def test_what_does_not_fit_the_budget_is_counted_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path / "small", FINGERPRINT, 100)
    writer = DiskWriter(store)
    done: list[Record | None] = []
    with caplog.at_level(logging.WARNING):
        for snapshot in snapshots(3):
            writer.offer(save_of(snapshot, done))
            writer.flush()
    assert done == [None] * 3
    assert writer.refused["budget"] == 3
    assert len(caplog.records) == 1
    writer.close()
    store.close()


def test_a_fault_in_one_save_does_not_end_the_writer(store: DiskStore, caplog: pytest.LogCaptureFixture) -> None:
    writer = DiskWriter(store)
    done: list[Record | None] = []

    def broken(record: Record | None) -> None:
        raise ValueError("a fault of ours")

    a, b = snapshots(2)
    writer.offer(Save(a, BoundaryKind.END, None, broken))
    writer.flush()
    writer.offer(save_of(b, done))
    writer.flush()
    assert len(done) == 1
    assert writer.refused["fault"] == 1
    writer.close()


def test_who_waits_for_a_save_that_fails_by_a_fault_is_told(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> Record:
        raise ValueError("a fault of ours")

    writer, done = DiskWriter(store), list[Record | None]()
    with monkeypatch.context() as patch:
        patch.setattr(store, "save", broken)
        assert writer.offer(save_of(snapshots(1)[0], done))
        writer.flush()
    assert done == [None] and writer.refused["fault"] == 1
    assert writer.offer(save_of(snapshots(1)[0], done))
    writer.flush()
    assert done[1] is not None
    writer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no rank of their own")
def test_the_writers_thread_gives_way_and_no_other_does(store: DiskStore) -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    writer = DiskWriter(store)
    writer.offer(Save(PaperModel().snapshot(list(range(10))), BoundaryKind.END, None, lambda record: None))
    writer.flush()
    assert writer._thread.native_id is not None
    assert os.getpriority(os.PRIO_PROCESS, writer._thread.native_id) >= RANK
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    writer.close()

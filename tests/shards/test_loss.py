"""Shards are processes, and processes die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.paper_hall import QUICK
from support.paper_shard import ENDLESS, terms

from rekindle.batch import Batch, Segment
from rekindle.errors import BadConfig, LinkRefused, StageLost
from rekindle.shards import RemoteStage, ShardProcess, start_shard
from rekindle.spec import Span

PROGRAM = "-m", "support.paper_shard"
SPAN = Span(0, 4)


class Yard:
    """Starts shards at one address, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/shard"
        self.trace = folder / "trace"
        self._shards: list[ShardProcess] = []

    def start(self, *hang: str) -> ShardProcess:
        command = [sys.executable, *PROGRAM, self.endpoint, "--trace", str(self.trace), "--hang", *hang]
        self._shards.append(start_shard(command, self.endpoint, deadline=60))
        return self._shards[-1]

    def connect(self) -> RemoteStage:
        return RemoteStage(self.endpoint, "paper", terms(SPAN), deadlines=QUICK)

    def close(self) -> None:
        for shard in self._shards:
            shard.stop()


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(tmp_path)
    yield yard
    yard.close()


def wait_until(true: Callable[[], bool], why: str) -> None:
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until, f"it never happened: {why}"
        time.sleep(0.01)


def forward(remote: RemoteStage, token: int = 1) -> Any:
    return remote.forward(Batch((Segment(0, 0, (token,)),)), None)


VERBS: dict[str, Callable[[RemoteStage], object]] = {
    "forward": lambda remote: forward(remote, ENDLESS),
    "capture": lambda remote: remote.capture(0),
    "restore": lambda remote: remote.restore(1, 1, HELD[0]),
}
HELD: list[Any] = []


@pytest.mark.parametrize(
    ("verb", "under_way"),
    [("forward", "forward of 1 rows"), ("capture", "capture of slot 0"), ("restore", "commit of slot 1")],
)
def test_a_shard_killed_at_work_is_lost_inside_the_deadline_and_found_again(
    yard: Yard, verb: str, under_way: str
) -> None:
    shard = yard.start(*({"capture", "restore"} & {verb}))
    remote = yard.connect()
    remote.open(0)
    if verb == "restore":
        forward(remote)
        HELD[:] = [remote.capture(0)]
    failures: list[BaseException] = []

    def work() -> None:
        try:
            VERBS[verb](remote)
        except StageLost as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(yard.trace.exists, f"the shard begins to {verb}")
    os.kill(shard.pid, signal.SIGKILL)
    thread.join(QUICK.call)
    assert len(failures) == 1
    assert under_way in str(failures[0])
    assert yard.endpoint in str(failures[0])
    assert "[0, 4)" in str(failures[0])
    with pytest.raises(StageLost, match="reconnect first"):
        remote.open(0)
    yard.start()
    remote.reconnect()
    assert remote.pages().used == 0
    remote.open(0)
    assert forward(remote).hidden is not None
    remote.stop()


def test_a_stopped_shard_is_lost_by_silence(yard: Yard) -> None:
    shard = yard.start()
    remote = RemoteStage(yard.endpoint, "paper", terms(SPAN), deadlines=replace(QUICK, silence=0.5))
    os.kill(shard.pid, signal.SIGSTOP)
    wait_until(lambda: states(shard.pid) == {"T"}, "every thread of the shard stands still")
    try:
        with pytest.raises(StageLost, match=r"open of slot 0: .*no sign of life for 0.5 s"):
            remote.open(0)
    finally:
        os.kill(shard.pid, signal.SIGCONT)
    remote.reconnect()
    remote.stop()


def test_reconnect_to_nobody_fails_inside_its_deadline_and_may_be_tried_again(yard: Yard) -> None:
    shard = yard.start()
    remote = RemoteStage(yard.endpoint, "paper", terms(SPAN), deadlines=replace(QUICK, connect=0.5))
    shard.stop()
    wait_until(lambda: remote.lost is not None, "the loss is noticed")
    with pytest.raises(StageLost, match="no answer to hello"):
        remote.reconnect()
    with pytest.raises(StageLost, match="reconnect first"):
        remote.open(0)
    yard.start()
    remote.reconnect()
    remote.open(0)
    remote.stop()


def test_a_shard_stops_in_good_order(yard: Yard) -> None:
    shard = yard.start()
    shard.stop()
    assert shard.returncode == 0
    shard.stop()


def test_a_shard_that_does_not_listen_to_reason_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.shards.process._GRACE", 0.3)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('rekindle-shard ready x', flush=True); time.sleep(60)"
    )
    shard = start_shard([sys.executable, "-c", deaf], "x", deadline=20)
    shard.stop()
    assert shard.returncode == -signal.SIGKILL


def test_the_end_of_a_shard_is_told() -> None:
    told: list[int] = []
    brief = "import sys; print('a word before'); print('rekindle-shard ready x', flush=True); sys.exit(3)"
    shard = start_shard([sys.executable, "-c", brief], "x", deadline=20, on_exit=told.append)
    wait_until(lambda: told == [3], "the exit is told")
    shard.stop()


@pytest.mark.parametrize(
    ("program", "endpoint", "error", "says"),
    [
        ("raise SystemExit(7)", "x", StageLost, "ended with status 7 before it was ready"),
        ("import time; time.sleep(60)", "x", StageLost, "was not ready within 1 s"),
        (
            "print('rekindle-shard ready y', flush=True); import time; time.sleep(60)",
            "x",
            LinkRefused,
            "listens on y, expected x",
        ),
    ],
)
def test_a_shard_that_does_not_become_ready_is_reported_and_ended(
    program: str, endpoint: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        start_shard([sys.executable, "-c", program], endpoint, deadline=1)


def test_a_command_that_does_not_exist_is_reported() -> None:
    with pytest.raises(BadConfig, match="no-such-program"):
        start_shard(["/nowhere/no-such-program"], None, deadline=5)


def test_no_shard_outlives_its_parent(tmp_path: Path) -> None:
    parent = (
        "import sys, time; from rekindle.shards import start_shard\n"
        f"shard = start_shard([sys.executable, *{PROGRAM!r}, 'ipc://{tmp_path}/s'], None, deadline=60)\n"
        "print(shard.pid, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        child = int(process.stdout.readline())
        os.kill(child, 0)
        process.kill()
    wait_until(lambda: is_gone(child), "the shard ends with its parent")


def states(pid: int) -> set[str]:
    """Of the threads of a process, in the kernel's letters."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {stat.rsplit(")", 1)[1].split()[0] for stat in stats}


def is_gone(pid: int) -> bool:
    """Ended; whether somebody has collected its status is not our matter."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_shard_started_by_a_thread_that_ended_lives_on(yard: Yard) -> None:
    shards: list[ShardProcess] = []
    thread = threading.Thread(target=lambda: shards.append(yard.start()))
    thread.start()
    thread.join()
    remote = yard.connect()
    remote.open(0)
    assert shards[0].returncode is None
    remote.stop()

"""A shard as a child process: started, watched, stopped, and never left behind.

The child says one line on its standard output when it is ready:

    rekindle-shard ready ENDPOINT
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType

from rekindle.errors import BadConfig, LinkRefused, StageLost
from rekindle.shards.server import ShardServer

log = logging.getLogger(__name__)

READY = "rekindle-shard ready "
_GONE = 0.5  # seconds in which a process whose connections broke is seen to have ended
_GRACE = 5.0  # seconds between asking a shard to stop and making it stop

# Runs in the child before the command: asks the kernel to kill it when the thread that started it ends (1 is
# PR_SET_PDEATHSIG, and it survives exec), and leaves if that has happened already.
_LEASH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def start_shard(
    command: list[str],
    endpoint: str | None,
    deadline: float,
    on_exit: Callable[[int], None] | None = None,
) -> ShardProcess:
    """Start a shard and wait for its ready line. `endpoint` is where it must listen, None if it may choose."""
    process = ShardProcess(command, on_exit)
    try:
        process.wait_ready(deadline)
        if endpoint is not None and process.endpoint != endpoint:
            raise LinkRefused(f"shard {command[0]!r} listens on {process.endpoint}, expected {endpoint}")
    except BaseException:
        process.stop()
        raise
    return process


class ShardProcess:
    """A running shard. Its standard error is ours; what it prints after the ready line goes to the log."""

    def __init__(self, command: list[str], on_exit: Callable[[int], None] | None = None) -> None:
        assert command, "a shard is started by a command"
        if shutil.which(command[0]) is None:
            raise BadConfig(f"shard command {command[0]!r} is not a program that can be run here")
        self.command = command
        self.endpoint = ""
        self._on_exit = on_exit
        self._child: subprocess.Popen[str] | None = None
        self._error: OSError | None = None
        self._started = threading.Event()
        self._said = threading.Event()  # the ready line came, or never will
        # The kernel ties the child to the thread that started it, so this thread stays as long as the child does.
        self._thread = threading.Thread(target=self._watch, name=f"shard {command[0]}", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise BadConfig(f"shard {command[0]!r} cannot be started: {self._error}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    @property
    def _process(self) -> subprocess.Popen[str]:
        assert self._child is not None, "a shard process has started once its constructor returned"
        return self._child

    def wait_ready(self, deadline: float) -> None:
        if not self._said.wait(deadline):
            raise StageLost(f"shard {self.command[0]!r} (pid {self.pid}) was not ready within {deadline:g} s")
        if not self.endpoint:
            code = self._process.wait()
            raise StageLost(f"shard {self.command[0]!r} ended with status {code} before it was ready; see its output")

    def has_ended(self, within: float) -> bool:
        """Whether it has, or does within so many seconds: a dead process breaks its connections before it is gone."""
        self._thread.join(within)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Ask it to end, make it end, and wait until it has."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                os.killpg(self.pid, sign)
            self._thread.join(_GRACE)
        assert not self._thread.is_alive(), "a killed process ends"

    def _watch(self) -> None:
        try:
            self._child = self._spawn()
        except OSError as error:
            self._error = error
            return
        finally:
            self._started.set()
        self._listen()
        code = self._process.wait()
        if self._on_exit is not None:
            self._on_exit(code)

    def _spawn(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), *self.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C at the terminal is for the server, which then stops its shards
        )

    def _listen(self) -> None:
        assert self._process.stdout is not None, "the child's output is a pipe"
        with self._process.stdout as lines:
            for line in lines:
                if not self._said.is_set() and line.startswith(READY):
                    self.endpoint = line.removeprefix(READY).strip()
                    self._said.set()
                else:
                    log.info("shard %d: %s", self.pid, line.rstrip())
        self._said.set()


class ShardKeeper:
    """A shard that this process starts, starts again after a loss, and stops."""

    def __init__(self, command: list[str], endpoint: str, deadline: float) -> None:
        self._command = command
        self._endpoint = endpoint
        self._deadline = deadline  # seconds from start to ready: a large span takes minutes to load
        self._process: ShardProcess | None = start_shard(command, endpoint, deadline)

    @property
    def pid(self) -> int:
        assert self._process is not None, "a shard that was stopped has no process"
        return self._process.pid

    def is_running(self) -> bool:
        return self._process is not None and not self._process.has_ended(_GONE)

    def restart(self) -> None:
        self.stop()
        log.warning("shard %s is started again", self._endpoint)
        self._process = start_shard(self._command, self._endpoint, self._deadline)

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None


def serve_forever(server: ShardServer) -> None:
    """Serve until SIGTERM or SIGINT, then stop in good order. To be called from the main thread."""
    stop = threading.Event()

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, ask_to_stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.start()
        print(READY + server.endpoint, flush=True)
        while not stop.is_set() and not server.stopped.is_set():
            stop.wait(0.5)
    finally:
        server.stop()
        for number, handler in before.items():
            signal.signal(number, handler)

"""Commands of rekindle and scripts, each in a process of its own, forked from one that has imported everything: a start
that takes three seconds of imports takes none. Whatever comes after the imports is as in `rekindle …` at a prompt."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import rekindle.cli.commands

for command in rekindle.cli.commands.HELP:
    import_module(f"rekindle.cli.{command}")

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["support.forked"])
REKINDLE = "rekindle"


class _Descriptor:
    """A file descriptor that a started process gets its own copy of."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _detached, (reduction.DupFd(self.number),)


def _detached(duplicate: Any) -> _Descriptor:
    return _Descriptor(duplicate.detach())


def _run(
    arguments: Sequence[str], environment: Mapping[str, str], hang_up: Any, out: _Descriptor, err: _Descriptor
) -> None:
    os.dup2(out.number, 1)
    os.dup2(err.number, 2)
    os.close(out.number)
    os.close(err.number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGHUP, hang_up)
    sys.argv = list(arguments)
    if arguments[0] == REKINDLE:
        rekindle.cli.main()
    else:
        sys.path[:0] = [str(Path(arguments[0]).parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
        runpy.run_path(arguments[0], run_name="__main__")


class Forked:
    """As much of subprocess.Popen as tests ask for. The first of the arguments is REKINDLE or the path of a script."""

    def __init__(
        self,
        arguments: Sequence[str],
        out: int,
        err: int,
        environment: Mapping[str, str],
        hang_up: Any = signal.SIG_DFL,
    ) -> None:
        """hang_up: what the process inherits for SIGHUP; not ours, which is SIG_IGN where tests run under nohup."""
        details = dict(environment), hang_up
        self._process = CONTEXT.Process(target=_run, args=(arguments, *details, _Descriptor(out), _Descriptor(err)))
        self._process.start()
        # A process that its test forgot must not keep pytest from ending
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("rekindle", timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_rekindle(*arguments: object, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """`rekindle …` to its end, and what it said."""
    return run_forked([REKINDLE, *map(str, arguments)], os.environ | environment, timeout)


def run_forked(
    arguments: Sequence[str], environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = Forked(arguments, out.fileno(), err.fileno(), environment)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(list(arguments), status, out.read(), err.read())

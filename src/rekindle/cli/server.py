"""The server process of `rekindle serve`: its port, and how it stops."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from rekindle.api import ModelHost
from rekindle.cli.garbage import FullCollections
from rekindle.errors import BadConfig

log = logging.getLogger("rekindle")

PATIENCE = 3.0  # seconds after the last event for clients that neither read it nor send the rest of a request


def stop_signals() -> list[signal.Signals]:
    """SIGHUP too, which a closed terminal sends; but not under nohup, which ignores it."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hang_up]


class Server(uvicorn.Server):
    """Stops in steps. SIGTERM and SIGHUP let running answers finish, for `drain` seconds; Ctrl-C, or a second signal,
    ends them with a last event; a signal after that ends the process at once."""

    def __init__(
        self,
        config: uvicorn.Config,
        models: ModelHost,
        keeps_snapshots: bool,
        drain: float = 0.0,
        greet: Callable[[], None] = lambda: None,
    ) -> None:
        """drain: seconds that running answers get to finish. greet: called when the next request is served at once."""
        super().__init__(config)
        self._greet = greet
        self._models = models
        self._keeps_snapshots = keeps_snapshots
        self._drain = drain
        self._drained_by: float | None = None  # of a monotonic clock
        self._garbage = FullCollections()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own would raise each signal again once it has stopped, while snapshots are still to be saved."""
        for number in stop_signals():
            signal.signal(number, self._stop)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._greet()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT and self._drained_by is None and self._drain > 0:
            self._drained_by = time.monotonic() + self._drain
            return
        for other in stop_signals():
            signal.signal(other, signal.SIG_DFL)
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Several times a second: does what a signal asked for, since a signal handler must not wait or log."""
        self._garbage.tick(self._is_idle)
        if self._drained_by is not None and not self.should_exit:
            if not self._models.draining:
                log.info("stopping: answers under way get up to %g seconds, new requests are refused", self._drain)
                self._models.drain()
            elif self._is_idle() or time.monotonic() > self._drained_by:
                self._stop(signal.SIGINT, None)
        return await super().on_tick(counter)

    def _is_idle(self) -> bool:
        status = self._models.status()
        return not status.running + status.waiting

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        written = ", snapshots are written" if self._keeps_snapshots else ""
        log.info("stopping: answers under way end here%s; Ctrl-C again leaves at once", written)
        self._models.end_requests()
        hanging_up = asyncio.create_task(self._hang_up())
        await super().shutdown(sockets)
        hanging_up.cancel()

    async def _hang_up(self) -> None:
        """PATIENCE begins when every request has had its last event: a step under way may take longer than that."""
        await asyncio.to_thread(self._models.wait_for_end)
        await asyncio.sleep(PATIENCE)
        for connection in self.server_state.connections:
            connection.transport.abort()


def listen(host: str, port: int) -> socket.socket:
    """Bind the port before minutes of loading, so that a port in use is an error at once."""
    if not 0 <= port <= 65535:
        raise BadConfig(f"--port {port}: a port is a number up to 65535, or 0 for any that is free")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise BadConfig(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --host or --port"
        ) from error
    return listener

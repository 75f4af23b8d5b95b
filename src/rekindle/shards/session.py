"""The head's end of a link, from one handshake to one loss.

There is no reader thread: a thread that waits for a reply reads the socket, and hands other replies to their threads.
So a lone caller gets its reply without a change of threads, which is what a decode step over a link costs.
A background thread sends pings and watches the connection; it decides that a shard is lost.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import zmq
from zmq.utils.monitor import parse_monitor_message

from rekindle import errors
from rekindle.errors import BadFrame, LinkRefused, RekindleError, StageLost
from rekindle.shards import frames
from rekindle.shards.frames import AnyBody, Frame, FrameBody, Header, Limits
from rekindle.shards.link import (
    PULSE,
    REPLIES,
    REQUESTS,
    Context,
    HeadKeys,
    Socket,
    head_socket,
    new_session,
    receive_parts,
    send_parts,
)
from rekindle.shards.terms import Terms

T = TypeVar("T")

_SLICE = 0.05  # seconds that a reader sleeps before it looks whether the shard was lost meanwhile
_RETRY = 0.1  # seconds between two hellos to a shard that is held by another head


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds."""

    connect: float = 10.0
    call: float = 120.0  # of one command: the longest prefill chunk, the largest snapshot
    goodbye: float = 2.0
    ping: float = 0.5  # between two pings
    silence: float = 5.0  # without a pong, after which the shard counts as lost


class Pending(Generic[T]):
    """A command under way."""

    def __init__(
        self, session: HeadSession, frame_id: int, body: AnyBody, read: Callable[[Frame], T], seconds: float
    ) -> None:
        self.id = frame_id
        self._session = session
        self._body = body
        self._read = read
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._reply: tuple[Header, Sequence[zmq.Frame]] | None = None
        self._lost: str | None = None
        self._result: list[T] = []  # of one, once it was read

    def done(self) -> bool:
        return self._settled or self._session.glance(self)

    def result(self) -> T:
        """Wait for the reply. Raises the shard's error, or StageLost inside the deadline."""
        if not self._result:
            self._session.wait(self)
            self._result.append(self._read(self._frame()))
            self._reply = None  # the message's memory goes with the tensors that view it
        return self._result[0]

    @property
    def what(self) -> str:
        return describe(self._body)

    @property
    def _settled(self) -> bool:
        return self._reply is not None or self._lost is not None or bool(self._result)

    @property
    def _left(self) -> float:
        return self._until - time.monotonic()

    def _frame(self) -> Frame:
        if self._reply is None:
            assert self._lost is not None, "a command that was waited for has a reply or was lost"
            raise StageLost(f"{self._session.who}: lost during {self.what}: {self._lost}")
        header, parts = self._reply
        if isinstance(header.body, frames.Failed):
            raise import_error(header.body, self._session.who, self.what)
        return Frame(header.id, header.body, frames.import_tensors(header, parts, self._session.limits))


class HeadSession:
    """Three connections, a lease on one stage, and the commands under way."""

    def __init__(
        self,
        endpoint: str,
        stage: str,
        terms: Terms,
        keys: HeadKeys | None,
        deadlines: Deadlines,
        limits: Limits,
        replaces: bytes,
    ) -> None:
        self.id = new_session()
        self.who = f"shard {endpoint} span {terms.span}"
        self.limits = limits
        self.lost: str | None = None
        self._deadlines = deadlines
        self._ids = itertools.count(1)
        self._pending: dict[int, Pending[Any]] = {}
        self._sending = threading.Lock()  # guards the requests socket and the order of ids
        self._turn = threading.Condition()  # guards _reading, _pending and lost
        self._reading = False  # a thread reads the replies socket
        context: Context = zmq.Context.instance()
        sockets = [
            head_socket(context, endpoint, keys, self.id + letter, limits) for letter in (REQUESTS, REPLIES, PULSE)
        ]
        self._requests, self._replies, self._pulse = sockets
        self._monitors = [socket.get_monitor_socket(_WATCHED) for socket in sockets]
        try:
            for socket in sockets:
                socket.connect(endpoint)
            hello = frames.Hello(
                stage,
                terms.fingerprint,
                terms.span.start,
                terms.span.stop,
                terms.hidden_dtype,
                terms.kv_dtype,
                terms.slots,
                replaces,
                terms.pages,
                terms.rewind_rows,
            )
            until = time.monotonic() + deadlines.connect
            self.welcome = self._shake_hands(hello, until)
            self._first_pulse(until)
        except BaseException:
            self._close(*sockets)
            raise
        self._replies.setsockopt(zmq.RCVTIMEO, int(_SLICE * 1000))
        self._beat = threading.Thread(target=self._keep_beating, name=f"pulse of {endpoint}", daemon=True)
        self._beat.start()

    # The handshake

    def _shake_hands(self, hello: frames.Hello, until: float) -> frames.Welcome:
        while True:
            self._replies.send_multipart(frames.export_frame(Frame(0, hello), self.limits))
            body = self._await(self._replies, until, "hello")
            if isinstance(body, frames.Welcome):
                return body
            if not isinstance(body, frames.Refused):
                raise LinkRefused(f"{self.who}: said hello, got {describe(body)}")
            if not body.passing or time.monotonic() + _RETRY > until:
                raise LinkRefused(f"{self.who} refuses: {body.message}")
            time.sleep(_RETRY)

    def _first_pulse(self, until: float) -> None:
        """Only after this does a disconnection mean a loss; before it may be part of connecting."""
        self._pulse.send_multipart(frames.export_frame(Frame(0, frames.Ping()), self.limits))
        body = self._await(self._pulse, until, "ping")
        if not isinstance(body, frames.Pong):
            raise LinkRefused(f"{self.who}: sent a ping, got {describe(body)}")
        for monitor in self._monitors:
            while monitor.poll(0):
                monitor.recv_multipart()

    def _await(self, socket: Socket, until: float, what: str) -> AnyBody:
        """The next frame of the handshake; failures of the connection end the wait early."""
        started = time.monotonic()
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        monitor = self._monitors[-1]  # of the pulse: its connection fails for the same reasons as the others
        poller.register(monitor, zmq.POLLIN)
        seen: set[int] = set()
        while (left := until - time.monotonic()) > 0:
            ready = dict(poller.poll(int(left * 1000) + 1))
            if socket in ready:
                return self._import_greeting(socket)
            if monitor in ready:
                seen.add(parse_monitor_message(monitor.recv_multipart())["event"])
            if zmq.EVENT_HANDSHAKE_FAILED_AUTH in seen:
                raise LinkRefused(f"{self.who}: the shard does not allow this head's key")
        silence = f"{self.who}: no answer to {what} within {time.monotonic() - started:.1f} s"
        if seen & _BROKEN_HANDSHAKES:
            raise LinkRefused(
                f"{silence}: the handshake breaks off; do both ends have keys, and is this the shard's key?"
            )
        raise StageLost(
            f"{silence}: {'it is there, but mute' if zmq.EVENT_CONNECTED in seen else 'nobody listens there'}"
        )

    def _import_greeting(self, socket: Socket) -> AnyBody:
        try:
            return frames.import_frame(socket.recv_multipart(copy=False), self.limits).body
        except (BadFrame, LinkRefused) as error:
            raise LinkRefused(f"{self.who}: {error}") from None

    # Commands

    def ask(
        self, body: AnyBody, tensors: Mapping[str, torch.Tensor], read: Callable[[Frame], T], seconds: float
    ) -> Pending[T]:
        with self._sending:
            frame_id = next(self._ids)
            message = frames.export_frame(Frame(frame_id, body, tensors), self.limits)
            pending = Pending(self, frame_id, body, read, seconds)
            with self._turn:  # a loss settles all commands that are pending, and none becomes pending after it
                if self.lost is not None:
                    raise StageLost(f"{self.who}: no {describe(body)}: lost before ({self.lost}); reconnect first")
                self._pending[frame_id] = pending
            send_parts(self._requests, message)
        return pending

    def wait(self, pending: Pending[T]) -> None:
        """Until the reply is there or the shard is lost. One waiter at a time reads for all."""
        with self._turn:
            while self._reading and not pending._settled:
                if not self._turn.wait(max(pending._left, 0)):
                    self._lose(f"no answer within {pending._seconds:g} s")
            if pending._settled:
                return
            self._reading = True
        try:
            while not pending._settled:
                self._read_next(pending)
        finally:
            with self._turn:
                self._reading = False
                self._turn.notify_all()

    def glance(self, pending: Pending[T]) -> bool:
        """Read what has come, without waiting."""
        with self._turn:
            if self._reading:
                return pending._settled
            self._reading = True
        try:
            while not pending._settled and self.lost is None and self._replies.poll(0):
                self._deliver(receive_parts(self._replies))
        finally:
            with self._turn:
                self._reading = False
                self._turn.notify_all()
        return pending._settled

    def _read_next(self, pending: Pending[T]) -> None:
        try:
            message = receive_parts(self._replies)
        except zmq.Again:
            if pending._left <= 0:
                self.lose(f"no answer within {pending._seconds:g} s")
            return
        self._deliver(message)

    def _deliver(self, message: Sequence[zmq.Frame]) -> None:
        try:
            header = frames.import_header(message, self.limits)
        except (BadFrame, LinkRefused) as error:
            self.lose(f"an unreadable frame came back: {error}")
            return
        with self._turn:
            pending = self._pending.pop(header.id, None)
            if pending is not None:
                pending._reply = (header, message)
                self._turn.notify_all()
        if pending is None:
            self.lose(f"a reply to no command came back: {describe(header.body)}")

    def lose(self, why: str) -> None:
        with self._turn:
            self._lose(why)

    def _lose(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
        for pending in self._pending.values():
            pending._lost = self.lost
        self._pending.clear()
        self._turn.notify_all()

    def close(self) -> None:
        """Close the sockets of a session that is lost, once no thread uses them."""
        assert self.lost is not None, "a session is closed after it was lost or left"
        self._beat.join()
        with self._sending, self._turn:
            self._turn.wait_for(lambda: not self._reading)
            self._close(self._requests, self._replies, self._pulse)

    def _close(self, *sockets: Socket) -> None:
        for socket in sockets:
            if not socket.closed:
                socket.disable_monitor()
                socket.close()
        for monitor in self._monitors:
            monitor.close()

    # The pulse

    def _keep_beating(self) -> None:
        heard = sent = time.monotonic()
        poller = zmq.Poller()
        for socket in (self._pulse, *self._monitors):
            poller.register(socket, zmq.POLLIN)
        ping = frames.export_frame(Frame(0, frames.Ping()), self.limits)
        while self.lost is None:
            ready = dict(poller.poll(int(_SLICE * 1000)))
            now = time.monotonic()
            if self._pulse in ready:
                heard = now
                self._hear()
            if any(_disconnected(monitor) for monitor in self._monitors if monitor in ready):
                self.lose("the connection broke")
            if now - heard > self._deadlines.silence:
                self.lose(f"no sign of life for {self._deadlines.silence:g} s")
            if now - sent >= self._deadlines.ping:
                self._pulse.send_multipart(ping)
                sent = now

    def _hear(self) -> None:
        try:
            body = frames.import_frame(self._pulse.recv_multipart(copy=False), self.limits).body
        except (BadFrame, LinkRefused) as error:
            self.lose(f"an unreadable pong came back: {error}")
            return
        if isinstance(body, frames.Failed):
            self.lose(body.message)


def _disconnected(monitor: Socket) -> bool:
    return parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_DISCONNECTED


_BROKEN_HANDSHAKES = {int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL), int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)}
_WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | sum(_BROKEN_HANDSHAKES)


def describe(body: FrameBody) -> str:
    """What is under way, for an error message."""
    if isinstance(body, frames.Forward):
        rows = sum(len(segment.tokens) for segment in body.segments)
        return f"forward of {rows} rows for slots {[segment.slot for segment in body.segments]}"
    slot = getattr(body, "slot", None)
    return type(body).__name__.lower() + (f" of slot {slot}" if slot is not None else "")


def import_error(failed: frames.Failed, who: str, what: str) -> RekindleError:
    """The shard's exception as one of ours: of the same class, if it is in our tree."""
    kind = getattr(errors, failed.error, None)
    if isinstance(kind, type) and issubclass(kind, RekindleError):
        return kind(f"{failed.message} ({what} on {who})")
    return RekindleError(f"{failed.error}: {failed.message} ({what} on {who})")

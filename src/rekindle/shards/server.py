"""A process that hosts stages for a head.

One thread reads the socket: it answers pings at once and puts commands in line for the stage they name. Each stage has
one worker thread, so its commands run in the order of their arrival and a long forward holds up nobody else. Workers
send their replies themselves: the socket is used by one thread at a time, and nobody sleeps inside it.

A head holds a stage by a lease: every frame renews it, and when it runs out, the head's slots are closed.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import zmq
from zmq.auth.thread import ThreadAuthenticator

from rekindle.errors import BadFrame, LinkRefused
from rekindle.shards import frames
from rekindle.shards.frames import AnyBody, Frame, Header, Limits
from rekindle.shards.host import Session, StageHost
from rekindle.shards.link import (
    PULSE,
    REPLIES,
    REQUESTS,
    SESSION_BYTES,
    ZAP_DOMAIN,
    AllowList,
    ShardKeys,
    Socket,
    bind_shard,
)
from rekindle.shards.terms import Terms, disagreements
from rekindle.stages.types import Stage

log = logging.getLogger(__name__)

DEFAULT_LEASE = 10.0  # seconds
_TICK = 100  # ms between two looks at the leases


class ShardServer:
    """Serves stages, by name, to one head per stage at a time. Owns the stages: they stop with it."""

    def __init__(
        self,
        stages: Mapping[str, Stage],
        endpoint: str,
        *,
        fingerprint: str,
        hidden_dtype: str,
        kv_dtype: str,
        keys: ShardKeys | None = None,
        lease: float = DEFAULT_LEASE,
        limits: Limits | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._lease = lease
        self._context = zmq.Context()
        self._authenticator = _authenticate(self._context, keys) if keys is not None else None
        try:
            self._router = bind_shard(self._context, endpoint, keys, self._limits)
        except LinkRefused:
            self._close_context()
            raise
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)  # the port, where 0 was asked for
        self._using_router = threading.Lock()
        self._alarm, self._bell = socket.socketpair()  # ring the bell and the socket thread looks at the router
        self._alarm.setblocking(False)
        self._bell.setblocking(False)

        def terms(stage: Stage) -> Terms:
            return Terms(fingerprint, stage.span, hidden_dtype, kv_dtype, stage.slots)

        self._hosts = {
            name: StageHost(name, stage, terms(stage), self._send, self._limits) for name, stage in stages.items()
        }
        self._sessions: dict[bytes, Session] = {}
        self._stopping = threading.Event()
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="shard sockets", daemon=True)

    def start(self) -> None:
        for host in self._hosts.values():
            host.start()
        self._thread.start()

    def stop(self) -> None:
        """Close every slot, stop the stages and free the address."""
        self._stopping.set()
        if self._thread.ident is None:
            self._shut_down()
        else:
            self._thread.join()

    # The socket thread

    def _serve(self) -> None:
        # ZeroMQ's descriptor only tells that something changed; what it was is asked of the socket, under the lock.
        waiter = select.poll()
        waiter.register(self._router.fileno(), select.POLLIN)
        waiter.register(self._alarm, select.POLLIN)
        look_at = time.monotonic()
        try:
            while not self._stopping.is_set():
                waiter.poll(_TICK)
                self._silence_alarm()
                while (message := self._next_message()) is not None:
                    self._receive(message)
                if time.monotonic() >= look_at:
                    self._end_expired()
                    look_at = time.monotonic() + _TICK / 1000
        finally:
            self._shut_down()

    def _silence_alarm(self) -> None:
        with suppress(BlockingIOError):
            self._alarm.recv(4096)

    def _next_message(self) -> list[zmq.Frame] | None:
        with self._using_router:
            if not _has_message(self._router):
                return None
            return self._router.recv_multipart(copy=False)

    def _shut_down(self) -> None:
        for session in list(self._sessions.values()):
            self._end(session, "the shard stops")
        for host in self._hosts.values():
            host.stop()
        with self._using_router:
            self._router.close()
        self._alarm.close()
        self._bell.close()
        self._close_context()
        self.stopped.set()

    def _close_context(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    def _receive(self, message: Sequence[zmq.Frame]) -> None:
        identity, *parts = message
        sender = identity.bytes
        frame_id = 0
        try:
            header = frames.import_header(parts, self._limits)
            frame_id = header.id
            self._take(sender, header, parts)
        except LinkRefused as error:
            self._reply(sender, frame_id, frames.Refused(str(error)))
        except BadFrame as error:
            log.warning("bad frame from a head: %s", error)
            self._reply(_reply_address(sender), frame_id, frames.Failed("BadFrame", str(error)))

    def _take(self, sender: bytes, header: Header, parts: Sequence[zmq.Frame]) -> None:
        if len(sender) != SESSION_BYTES + 1:
            raise LinkRefused("the head's connection does not name its session")
        session_id, connection = sender[:-1], sender[-1:]
        if isinstance(header.body, frames.Hello):
            self._reply(sender, header.id, self._greet(session_id, header.body))
            return
        session = self._sessions.get(session_id)
        if session is None:
            answer = frames.Failed(
                "StageLost", "the shard does not know this session: it restarted, or the lease ran out"
            )
            self._reply(_reply_address(sender) if connection == REQUESTS else sender, header.id, answer)
            return
        session.heard = time.monotonic()
        if connection == PULSE:
            frames.expect(header.body, frames.Ping)
            self._reply(sender, header.id, frames.Pong())
        elif isinstance(header.body, frames.Goodbye):
            self._end(session, "the head said goodbye", header.id)
        else:
            session.host.put(session, header, parts)

    def _greet(self, session_id: bytes, hello: frames.Hello) -> AnyBody:
        host = self._hosts.get(hello.stage)
        if host is None:
            return frames.Refused(f"stage {hello.stage!r}: shard hosts {', '.join(self._hosts)}")
        points = disagreements(host.terms, hello)
        if points:
            return frames.Refused(f"stage {hello.stage!r}: {'; '.join(points)}")
        lost = self._sessions.get(hello.replaces)
        if lost is not None and lost.host is host:
            self._end(lost, "its head came back")
        if host.session is not None:
            left = host.session.heard + self._lease - time.monotonic()
            message = f"stage {hello.stage!r} is held by another head, whose lease ends in {left:.1f} s"
            return frames.Refused(message, passing=True)
        host.session = self._sessions[session_id] = Session(session_id, host)
        return frames.Welcome(host.stage.slots, host.stage.device, self._lease)

    def _end_expired(self) -> None:
        now = time.monotonic()
        for session in list(self._sessions.values()):
            if now - session.heard > self._lease:
                self._end(session, f"no sign of life for {self._lease} s")

    def _end(self, session: Session, why: str, goodbye: int | None = None) -> None:
        log.info("stage %r: session ends: %s", session.host.name, why)
        session.alive = False
        del self._sessions[session.id]
        session.host.session = None
        session.host.put_end(session, goodbye)

    def _reply(self, address: bytes, frame_id: int, body: AnyBody) -> None:
        self._send([address, *frames.export_frame(Frame(frame_id, body), self._limits)])

    def _send(self, message: Sequence[bytes | memoryview]) -> None:
        """From any thread."""
        with self._using_router:
            try:
                self._router.send_multipart(message, flags=zmq.NOBLOCK, copy=False)
            except zmq.ZMQError as error:
                log.debug("a reply found no reader, its head's lease will end: %s", error)
            # Sending may have taken note of an arrival, and then the descriptor stays silent about it.
            arrived = _has_message(self._router)
        if arrived and threading.current_thread() is not self._thread:
            with suppress(BlockingIOError):  # it rings already
                self._bell.send(b"!")


def _has_message(router: Socket) -> bool:
    return bool(int(router.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _reply_address(sender: bytes) -> bytes:
    return sender[:-1] + REPLIES


def _authenticate(context: zmq.Context[zmq.Socket[bytes]], keys: ShardKeys) -> ThreadAuthenticator:
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=ZAP_DOMAIN.decode(), credentials_provider=AllowList(keys.allowed))
    return authenticator

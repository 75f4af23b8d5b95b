"""A process that hosts stages for a head.

Each stage has one worker thread, so its commands run in the order of their arrival and a long forward delays no other
stage. Idle workers read the socket themselves, so a decode step never changes threads; while all of them run commands,
the watch thread reads it a few times a second, answers pings and queues commands. A lock gives the socket to one
thread at a time, for calls that do not block; a thread that has sent also reads, since sending may clear the socket's
sign of arrivals.

A head holds a stage by a lease: every frame renews it, and when it runs out, the head's slots are closed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence

import zmq
from zmq.auth.thread import ThreadAuthenticator

from rekindle.errors import BadFrame, LinkRefused
from rekindle.shards import frames
from rekindle.shards.frames import AnyBody, Frame, Header, Limits
from rekindle.shards.host import HeldSession, StageHost
from rekindle.shards.link import (
    PULSE,
    REPLIES,
    REQUESTS,
    SESSION_BYTES,
    ZAP_DOMAIN,
    AllowList,
    ShardKeys,
    bind_shard,
    receive_parts,
    send_parts,
)
from rekindle.shards.terms import Terms, disagreements
from rekindle.stages.types import Stage

log = logging.getLogger(__name__)

DEFAULT_LEASE = 10.0  # seconds
_TICK = 0.05  # seconds between two looks of the watch
_NOBLOCK, _POLLIN = int(zmq.NOBLOCK), int(zmq.POLLIN)


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
        vocabulary: int | None = None,
        rewind_rows: int = 0,
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
        self._using = threading.Lock()  # the socket
        self._reading = threading.Lock()  # the next message, until it stands in line; taken before _using

        def terms(stage: Stage) -> Terms:
            pages = stage.pages().total
            return Terms(fingerprint, stage.span, hidden_dtype, kv_dtype, stage.slots, pages, rewind_rows)

        self._hosts = {
            name: StageHost(name, stage, terms(stage), self, self._limits, vocabulary) for name, stage in stages.items()
        }
        self._sessions: dict[bytes, HeldSession] = {}
        self._stopping = threading.Event()
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="shard watch", daemon=True)

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

    def fileno(self) -> int:
        """Becomes readable when something may have come; only read() can tell."""
        return self._router.fileno()

    def read(self) -> None:
        """Put every message that has come where it belongs. From any thread."""
        with self._reading:
            while (message := self._next_message()) is not None:
                self._receive(message)

    def send(self, message: Sequence[bytes | memoryview]) -> None:
        """From any thread, which reads afterwards: sending may swallow the sign that something has come."""
        with self._using:
            if self._router.closed:
                return
            try:
                send_parts(self._router, message, _NOBLOCK)
            except zmq.ZMQError as error:
                log.debug("a reply found no reader, its head's lease will end: %s", error)

    def _next_message(self) -> list[zmq.Frame] | None:
        with self._using:
            if self._router.closed or not int(self._router.getsockopt(zmq.EVENTS)) & _POLLIN:
                return None
            return receive_parts(self._router)

    def _watch(self) -> None:
        try:
            while not self._stopping.wait(_TICK):
                self.read()
                self._end_expired()
        finally:
            self._shut_down()

    def _shut_down(self) -> None:
        with self._reading:
            for session in list(self._sessions.values()):
                self._end(session, "the shard stops")
        for host in self._hosts.values():
            host.stop()
        with self._using:
            self._router.close()
        for host in self._hosts.values():
            host.close()
        self._close_context()
        self.stopped.set()

    def _close_context(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    # While reading

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
        host.session = self._sessions[session_id] = HeldSession(session_id, host)
        return frames.Welcome(host.stage.slots, host.stage.device, self._lease)

    def _end_expired(self) -> None:
        with self._reading:
            now = time.monotonic()
            for session in list(self._sessions.values()):
                if now - session.heard > self._lease:
                    self._end(session, f"no sign of life for {self._lease} s")

    def _end(self, session: HeldSession, why: str, goodbye: int | None = None) -> None:
        log.info("stage %r: session ends: %s", session.host.name, why)
        session.alive = False
        del self._sessions[session.id]
        session.host.session = None
        session.host.put_end(session, goodbye)

    def _reply(self, address: bytes, frame_id: int, body: AnyBody) -> None:
        self.send([address, *frames.export_frame(Frame(frame_id, body), self._limits)])


def _reply_address(sender: bytes) -> bytes:
    return sender[:-1] + REPLIES


def _authenticate(context: zmq.Context[zmq.Socket[bytes]], keys: ShardKeys) -> ThreadAuthenticator:
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=ZAP_DOMAIN.decode(), credentials_provider=AllowList(keys.allowed))
    return authenticator

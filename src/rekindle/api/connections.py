"""Connections: how many there may be, how long headers may take, and how long an answer may lie unread.

uvicorn bounds the time between two requests of a connection and the size of headers, but neither how long the first
ones take to arrive, nor how many connections wait for them, nor how long a client may leave what it was sent unread.
And a body in chunks of one byte each keeps its parser busy for seconds: it is parsed in slices, between which the
event loop serves others, and hardly at all once its answer has been given.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from rekindle.errors import BadConfig

SLICE = 2048  # bytes; in chunks of one byte some hundred chunks, which take ten milliseconds
LINGER_SECONDS = 1.0  # for the rest of a body whose answer has been given
LINGER_BYTES = 1 << 20  # of that rest
LINGER_CHUNKS = 64 << 10  # bytes of it where it may come in chunks
UNREAD_SECONDS = 60.0
# Between two requests of a connection. Clients keep theirs for 4 (undici), 5 (httpx) or 15 seconds (aiohttp) and should
# give up first: who sends just as the server hangs up has lost a request.
IDLE_SECONDS = 20


def guarded_protocol(most: int, header_seconds: float, unread_seconds: float = UNREAD_SECONDS) -> type[H11Protocol]:
    """uvicorn's protocol with bounds: connections at one time, seconds for a request's headers to arrive, and seconds
    for a client to take what lies ready for it."""
    if most < 1:
        raise BadConfig(f"--max-connections {most}: at least 1 is needed")
    if header_seconds <= 0:
        raise BadConfig(f"--header-timeout {header_seconds:g}: must be above 0 seconds")
    refusal = _refusal(f"{most} connections are open, which is all this server takes (--max-connections)")

    class GuardedProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None  # for headers
        _unread: asyncio.TimerHandle | None = None  # for a client to read what it was sent
        _lingering: asyncio.TimerHandle | None = None  # for the rest of a body whose answer has been given
        _rest = 0  # bytes of it that may still come
        _unparsed: bytes = b""
        _is_parsing = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.write(refusal)
                transport.close()
                return
            self._await_headers()

        def data_received(self, data: bytes) -> None:
            if self._lingering is not None and self._is_more_than_rest(data):
                return
            self._unparsed += data
            if not self._is_parsing:
                self._parse_slice()

        def _parse_slice(self) -> None:
            """Parse received bytes: a slice at a time where they may be chunks, else all at once."""
            self._is_parsing = bool(self._unparsed) and not self.transport.is_closing()
            if not self._is_parsing:
                return
            size = SLICE if self._may_be_chunked() else len(self._unparsed)
            data, self._unparsed = self._unparsed[:size], self._unparsed[size:]
            super().data_received(data)
            self._stop_lingering_at_the_end()
            self._await_headers()
            self._is_parsing = bool(self._unparsed)
            if self._is_parsing:
                self.loop.call_soon(self._parse_slice)

        def _may_be_chunked(self) -> bool:
            if self._lingering is None and (self.cycle is None or self.cycle.response_complete):
                return True  # headers, and the bytes after them, which may be chunks
            return self._is_chunked()

        def _is_chunked(self) -> bool:
            return any(name == b"transfer-encoding" for name, _ in self.headers)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.their_state is h11.SEND_BODY:
                # A request may be refused before its body is here. Clients then send the next one on this connection,
                # so the rest is read and thrown away: a little of it, for a moment.
                self._rest = (LINGER_CHUNKS if self._is_chunked() else LINGER_BYTES) - len(self._unparsed)
                self._lingering = self.loop.call_later(LINGER_SECONDS, self.transport.abort)
            else:
                self._await_headers()

        def _is_more_than_rest(self, data: bytes) -> bool:
            """Too much is not read at all; the client has the moment that is left to read its answer."""
            self._rest -= len(data)
            if self._rest < 0:
                self._unparsed = b""
                self.flow.pause_reading()
            return self._rest < 0

        def _stop_lingering_at_the_end(self) -> None:
            if self._lingering is not None and self.conn.their_state is not h11.SEND_BODY:
                self._lingering.cancel()
                self._lingering = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self._unread or self.loop.call_later(unread_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop_reading_clock()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unparsed = b""
            self._stop_waiting()
            self._stop_reading_clock()
            if self._lingering is not None:
                self._lingering.cancel()
            super().connection_lost(exc)

        def _await_headers(self) -> None:
            """Between requests the clock runs from the first byte on; before that, uvicorn's for idle connections."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()
            elif self._deadline is None and (self.cycle is None or self._has_begun_another()):
                self._deadline = self.loop.call_later(header_seconds, self.transport.abort)

        def _has_begun_another(self) -> bool:
            return self.timeout_keep_alive_task is None or bool(self.conn.trailing_data[0])

        def _stop_reading_clock(self) -> None:
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

        def _stop_waiting(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return GuardedProtocol


def _refusal(message: str) -> bytes:
    error: dict[str, Any] = {"message": message, "type": "server_error", "param": None, "code": "too_many_connections"}
    body = json.dumps({"error": error}).encode()
    head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"retry-after: 1\r\nconnection: close\r\n\r\n" + body

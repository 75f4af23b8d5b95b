"""HTTP messages read from a socket, whole: a message may arrive in any number of pieces."""

from __future__ import annotations

import socket
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WireMessage:
    first_line: bytes
    body: bytes


def read_message(connection: socket.socket) -> WireMessage:
    """One request or answer; without a Content-Length, what has come of its body."""
    got = b""
    while b"\r\n\r\n" not in got:
        got += _more(connection, got)
    head, _, body = got.partition(b"\r\n\r\n")
    first_line, *lines = head.split(b"\r\n")
    lengths = [int(line.split(b":")[1]) for line in lines if line.lower().startswith(b"content-length:")]
    while len(body) < sum(lengths):
        body += _more(connection, body)
    assert not lengths or len(body) == sum(lengths), f"more than one message came: {body[sum(lengths) :]!r}"
    return WireMessage(first_line, body)


def _more(connection: socket.socket, got: bytes) -> bytes:
    data = connection.recv(65536)
    assert data, f"the connection was closed after {got!r}"
    return data

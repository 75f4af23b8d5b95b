"""The connection between a head and a shard: addresses, keys and sockets.

A link is an ipc:// socket that only its user can open, or tcp:// with CURVE: both ends have a key pair, the head knows
the shard's public key and the shard lists the heads it allows. On loopback, which every user of the host can reach, the
two ends of one user share a key pair that lies in the user's own folder.

A head opens three connections to the one socket of a shard, so that no large frame can hold up a sign of life:
requests go out on the first, replies come in on the second, pings and pongs have the third. The connections of one
session are known by its id and one letter.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import zmq
from zmq.utils.z85 import Z85CHARS

from rekindle.errors import BadConfig, LinkRefused
from rekindle.shards.frames import Limits

Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]
Socket: TypeAlias = zmq.Socket[bytes]

REQUESTS, REPLIES, PULSE = b"q", b"r", b"p"
SESSION_BYTES = 16
ZAP_DOMAIN = b"rekindle"

_SNDMORE = int(zmq.SNDMORE)
_IPC_PATH_LIMIT = 107  # bytes of a Unix socket path
_KEY_LENGTH = 40  # characters of a key in Z85
_KEY_FILE_LIMIT = 1 << 12  # bytes


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


@dataclass(frozen=True, slots=True)
class HeadKeys:
    """What the head needs for an encrypted link."""

    pair: KeyPair
    shard: str  # public key of the shard


@dataclass(frozen=True, slots=True)
class ShardKeys:
    """What a shard needs for encrypted links."""

    pair: KeyPair
    allowed: frozenset[str]  # public keys of the heads that may connect


def keygen(path: Path) -> KeyPair:
    """Write a new key pair: the secret for its owner's eyes in `path`, the public key in `path`.pub."""
    pair = _write_pair(path)
    path.with_name(path.name + ".pub").write_text(f"{pair.public}\n")
    return pair


def load_keys(path: Path) -> KeyPair:
    """Read a key pair that keygen wrote; refuse one that others could have read."""
    text, status = _read_key_file(path)
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise BadConfig(f"secret key {path} has mode {mode:04o}, expected 0600: chmod 600 it, or make a new one")
    lines = text.split()
    if len(lines) != 2:
        raise BadConfig(f"key file {path} has {len(lines)} entries, expected a public and a secret key")
    public, secret = (_check_key(line, path) for line in lines)
    if zmq.curve_public(secret.encode()).decode() != public:
        raise BadConfig(f"key file {path}: its public key does not belong to its secret key")
    return KeyPair(public, secret)


def load_public(path: Path) -> str:
    return _check_key(_read_key_file(path)[0].strip(), path)


def shared_keys(path: Path) -> KeyPair:
    """The key pair at both ends of a user's own links; whichever end comes first makes it."""
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_shared(path)
        owner = path.stat().st_uid
    except OSError as error:
        raise BadConfig(f"{path}, which links of one user share, cannot be made: {error.strerror}; give keys") from None
    if owner != os.geteuid():
        raise BadConfig(f"{path}, which links of one user share, belongs to user {owner}, not to {os.geteuid()}")
    return load_keys(path)


def _make_shared(path: Path) -> None:
    """There whole or not at all, and never a second time: the other end may be about to make it too."""
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    _write_pair(fresh)
    try:
        with suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        fresh.unlink()


def _write_pair(path: Path) -> KeyPair:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)  # whatever the umask was
        file.write(f"{public}\n{secret}\n")
    return KeyPair(public, secret)


def _read_key_file(path: Path) -> tuple[str, os.stat_result]:
    try:
        with path.open("rb") as file:
            return file.read(_KEY_FILE_LIMIT).decode(), os.fstat(file.fileno())
    except OSError as error:
        raise BadConfig(f"key file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadConfig(f"key file {path} holds no text, expected keys of {_KEY_LENGTH} characters") from None


def _check_key(text: str, path: Path) -> str:
    if len(text) != _KEY_LENGTH:
        raise BadConfig(f"key file {path}: a key has {_KEY_LENGTH} characters, found {len(text)}")
    if unknown := set(text.encode()) - set(Z85CHARS):
        raise BadConfig(f"key file {path}: {chr(min(unknown))!a} is no character of a key")
    return text


def check_endpoint(endpoint: str, encrypted: bool) -> None:
    """Refuse what we cannot speak, and what others could read or take over."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        if len(os.fsencode(rest)) > _IPC_PATH_LIMIT:
            raise LinkRefused(f"{endpoint}: the path has {len(rest)} bytes, a socket path at most {_IPC_PATH_LIMIT}")
        return
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port:
        raise LinkRefused(f"{endpoint!r} is no link address: expected ipc://PATH or tcp://HOST:PORT")
    if not encrypted:
        reach = "every user of this host can reach" if is_loopback(endpoint) else "leaves this host"
        raise LinkRefused(f"{endpoint} {reach} and the link has no keys: give both ends keys (rekindle shard keygen)")


def is_loopback(endpoint: str) -> bool:
    """tcp:// that does not leave this host."""
    scheme, _, rest = endpoint.partition("://")
    host = rest.rpartition(":")[0]
    if scheme != "tcp" or host == "localhost":
        return scheme == "tcp"
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def new_session() -> bytes:
    """An id that cannot be guessed: it is also the right to replace the session after a loss."""
    return b"s" + secrets.token_bytes(SESSION_BYTES - 1)  # ids that begin with a zero byte belong to ZeroMQ


def bind_shard(context: Context, endpoint: str, keys: ShardKeys | None, limits: Limits) -> Socket:
    """The one socket of a shard. With keys the context needs an authenticator that knows the allowed heads."""
    check_endpoint(endpoint, encrypted=keys is not None)
    socket = _socket(context, zmq.ROUTER, endpoint, limits)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if keys is not None:
        socket.curve_server = True
        socket.curve_publickey = keys.pair.public.encode()
        socket.curve_secretkey = keys.pair.secret.encode()
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    try:
        _bind(socket, endpoint)
    except (zmq.ZMQError, LinkRefused) as error:
        socket.close()
        raise LinkRefused(f"cannot listen on {endpoint}: {error}") from None
    return socket


def _bind(socket: Socket, endpoint: str) -> None:
    """A socket file is its owner's from its first moment; ZeroMQ deletes whatever lies at its path."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint:
        socket.bind(endpoint)
        return
    if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise LinkRefused("something that is no socket lies there")
    before = os.umask(0o177)
    try:
        socket.bind(endpoint)
    finally:
        os.umask(before)


def head_socket(context: Context, endpoint: str, keys: HeadKeys | None, identity: bytes, limits: Limits) -> Socket:
    """For one of the three connections of a head; the caller connects it when it is ready to watch it."""
    check_endpoint(endpoint, encrypted=keys is not None)
    socket = _socket(context, zmq.DEALER, endpoint, limits)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)  # ms; while the shard is still starting
    if keys is not None:
        socket.curve_serverkey = keys.shard.encode()
        socket.curve_publickey = keys.pair.public.encode()
        socket.curve_secretkey = keys.pair.secret.encode()
    return socket


def _socket(context: Context, kind: int, endpoint: str, limits: Limits) -> Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)  # ms
    # ZeroMQ drops a peer that announces a larger part, before it takes memory for it.
    socket.setsockopt(zmq.MAXMSGSIZE, limits.frame)
    return socket


def send_parts(socket: Socket, message: Sequence[bytes | memoryview], flags: int = 0) -> None:
    """One message; views, which long tensors come as, are not copied."""
    last = len(message) - 1
    for index, part in enumerate(message):
        socket.send(part, flags if index == last else flags | _SNDMORE, copy=isinstance(part, bytes))


def receive_parts(socket: Socket) -> list[zmq.Frame]:
    """The next message, as its parts came. Each part knows whether more follow, so the socket is not asked."""
    part = socket.recv(copy=False)
    parts = [part]
    while part.more:
        part = socket.recv(copy=False)
        parts.append(part)
    return parts


class AllowList:
    """Answers the authenticator: is this public key one of the allowed heads?"""

    def __init__(self, allowed: Iterable[str]) -> None:
        self._allowed = frozenset(key.encode() for key in allowed)

    def callback(self, domain: str, key: bytes) -> bool:
        return domain == ZAP_DOMAIN.decode() and key in self._allowed

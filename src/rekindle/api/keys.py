"""Clients by key: each has a name space for its snapshots, and limits.

The file that `--api-keys` names is TOML, one table per client:

    [alice]
    key = "a long secret"
    namespace = "team"            # left out: alice's own; clients that name the same one share what they computed
    requests_per_minute = 60      # left out: no limit
    tokens_per_minute = 200000    # prompt and answer together
    concurrent = 4                # answers at once
    metrics = true                # may read /metrics, which count what all clients do; left out: no
"""

from __future__ import annotations

import hashlib
import logging
import re
import tomllib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from rekindle.errors import BadConfig

log = logging.getLogger("rekindle.api")

SHORTEST_KEY = 8  # characters; what is shorter can be guessed over a network
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Client:
    """The holder of a key. Without keys every request comes from one nameless client of the common name space."""

    name: str = ""
    namespace: str = ""
    is_alone: bool = False  # no other key has its name space: all that was cached there is the client's own
    sees_metrics: bool = True
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


ANYONE = Client()


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    namespace: str | None = None
    metrics: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


class ApiKeys:
    """Clients by key. Only digests are kept: looking one up takes no longer for a key that is nearly right."""

    def __init__(self, clients: dict[str, Client]) -> None:
        """clients: by their key."""
        self._clients = {_digest(key.encode()): client for key, client in clients.items()}

    @classmethod
    def single(cls, key: str) -> ApiKeys:
        """One key that all clients share, and with it the common name space."""
        if not key:
            raise BadConfig("api_key: an empty key guards nothing; leave it out or set one")
        return cls({key: ANYONE})

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """From a file of named keys."""
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BadConfig(f"--api-keys {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise BadConfig(f"--api-keys {path}: {error}") from error
        if not tables:
            raise BadConfig(f"--api-keys {path}: names no key")
        rows = {name: _row(path, name, table) for name, table in tables.items()}
        if path.stat().st_mode & 0o077:
            log.warning("%s holds keys and can be read by others than its owner: chmod 600 it", path)
        clients: dict[str, Client] = {}
        for name, row in rows.items():
            if row.key in clients:
                raise BadConfig(f"--api-keys {path}: {clients[row.key].name} and {name} have the same key")
            clients[row.key] = _client(path, name, row)
        sharers = Counter(client.namespace for client in clients.values())
        return cls({key: replace(each, is_alone=sharers[each.namespace] == 1) for key, each in clients.items()})

    @property
    def namespaces(self) -> frozenset[str]:
        return frozenset(client.namespace for client in self._clients.values())

    def find(self, key: bytes) -> Client | None:
        return self._clients.get(_digest(key))


def _row(path: Path, name: str, table: object) -> _Row:
    try:
        return msgspec.convert(table, _Row)
    except msgspec.ValidationError as error:
        fields = ", ".join(_Row.__struct_fields__)
        raise BadConfig(f"--api-keys {path}: {name}: {error}; a client's table may have {fields}") from error


def _client(path: Path, name: str, row: _Row) -> Client:
    namespace = name if row.namespace is None else row.namespace
    for what, word in (("the name", name), ("namespace", namespace)):
        if not _NAME.fullmatch(word):
            raise BadConfig(f"--api-keys {path}: {name}: {what} {word!r} must be 1 to 64 of A-Z a-z 0-9 . _ -")
    if len(row.key) < SHORTEST_KEY:
        raise BadConfig(
            f"--api-keys {path}: {name}: the key has {len(row.key)} characters, at least {SHORTEST_KEY} are needed"
        )
    limits = (row.requests_per_minute, row.tokens_per_minute, row.concurrent)
    if any(limit is not None and limit < 1 for limit in limits):
        raise BadConfig(f"--api-keys {path}: {name}: a limit must be at least 1; leave it out for none")
    return Client(name, namespace, False, row.metrics, *limits)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

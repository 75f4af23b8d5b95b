"""Settings of the HTTP side, fixed at the start."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rekindle.api.cards import RANGES, ModelCard
from rekindle.api.keys import ApiKeys
from rekindle.errors import BadConfig

# A Host header: a name or an address, and perhaps a port. No user, no path, no zone of an address.
HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
ORIGIN = re.compile(rf"https?://{HOST.pattern}")


@dataclass(frozen=True, slots=True)
class Guard:
    """Who may use the server, and bounds on what a request costs before its client is known."""

    keys: ApiKeys | None = None  # None: no key is asked for
    hosts: tuple[str, ...] = ()  # names that clients may call this server by, besides its addresses; * is any
    origins: tuple[str, ...] = ()  # of web pages besides our own; * is any
    max_body: int = 16 << 20  # bytes
    bodies: int = 4  # of the largest size that may be read at one time; of smaller ones accordingly more
    body_seconds: float = 60.0  # for a body to arrive

    def __post_init__(self) -> None:
        for host in self.hosts:
            if host != "*" and (not HOST.fullmatch(host) or ":" in host):
                raise BadConfig(
                    f"--allow-host {host}: must be a name such as ai.example.org, without port, or * for any"
                )
        for origin in self.origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise BadConfig(f"--allow-origin {origin}: must be such as https://chat.example.org, or * for any")
        if self.max_body < 1:
            raise BadConfig(f"max_body: must be at least 1 byte, got {self.max_body}")
        if self.bodies < 1:
            raise BadConfig(f"bodies: must be at least 1, got {self.bodies}")
        if self.body_seconds <= 0:
            raise BadConfig(f"body_seconds: must be above 0, got {self.body_seconds:g}")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What clients are told of the model's file."""

    architecture: str = "unknown"
    parameters: int = 0
    nbytes: int = 0
    quantisation: str = "unknown"  # the type that most of its bytes have
    format: str = "gguf"
    template: str = ""  # of its chats, empty where it has none


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one model."""

    models: tuple[str, ...]  # its names, as /v1/models shows them: the id first
    unlisted: tuple[str, ...] = field(default=(), kw_only=True)  # names that it answers to as well
    context: int  # the most tokens that prompt and answer may have together
    fingerprint: str = ""  # the model's, from its weights
    facts: ModelFacts = field(default_factory=ModelFacts)
    created: int = 0  # unix seconds shown by /v1/models
    card: ModelCard = field(default_factory=ModelCard)  # for fields that a request does not set
    heartbeat_seconds: float = 15.0  # an open stream is never silent for longer, so no proxy gives up on a prefill
    prepare_next: bool = True  # after an answer, prepare the state for the prompt its client will send next

    def __post_init__(self) -> None:
        if not self.models:
            raise BadConfig("models: at least one model id is needed, got none")
        if self.context < 2:
            raise BadConfig(f"context: must hold a prompt and an answer, got {self.context} tokens")
        if self.card.max_tokens is not None and self.card.max_tokens < 1:
            raise BadConfig(f"max-tokens: must be at least 1, got {self.card.max_tokens}")
        for sampling in filter(None, (self.card.sampling, self.card.direct)):
            for name, (low, high) in RANGES.items():
                if not low <= getattr(sampling, name) <= high:
                    raise BadConfig(f"{name}: must be {low:g} to {high:g}, got {getattr(sampling, name):g}")
        if self.heartbeat_seconds <= 0:
            raise BadConfig(f"heartbeat_seconds: must be above 0, got {self.heartbeat_seconds}")

    @property
    def system_fingerprint(self) -> str | None:
        return f"fp_{self.fingerprint[:12]}" if self.fingerprint else None

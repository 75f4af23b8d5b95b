"""What the HTTP side is told once, at the start."""

from __future__ import annotations

from dataclasses import dataclass, field

from rekindle.engine.types import Sampling
from rekindle.errors import BadConfig


@dataclass(frozen=True, slots=True)
class Settings:
    models: tuple[str, ...]  # ids shown by /v1/models; the first answers requests that name none
    context: int  # the most tokens that prompt and answer may have together
    fingerprint: str = ""  # the model's, from its weights
    created: int = 0  # unix seconds shown by /v1/models
    api_key: str | None = None  # guards /v1; None leaves it open
    allowed_origins: tuple[str, ...] = ()  # browsers' origins besides our own page
    max_body_bytes: int = 64 * 1024 * 1024
    default_max_tokens: int | None = None  # None: what the context leaves
    sampling: Sampling = field(default_factory=Sampling)  # for fields a request does not set
    heartbeat_seconds: float = 15.0  # an open stream is never silent for longer, so no proxy gives up on a prefill
    normalise: bool = True  # leave out lines that clients change on each call; `ModelText` gets the rules
    remember_turns: bool = True  # keep the ids of the model's own turns; `ModelText` gets the memory
    prepare_next: bool = True  # after an answer, prepare the state for the prompt its client will send next

    def __post_init__(self) -> None:
        if not self.models:
            raise BadConfig("models: at least one model id is needed, got none")
        if self.context < 2:
            raise BadConfig(f"context: must hold a prompt and an answer, got {self.context} tokens")
        if self.api_key == "":
            raise BadConfig("api_key: an empty key guards nothing; leave it out or set one")
        if self.max_body_bytes < 1:
            raise BadConfig(f"max_body_bytes: must be at least 1, got {self.max_body_bytes}")
        if self.default_max_tokens is not None and self.default_max_tokens < 1:
            raise BadConfig(f"default_max_tokens: must be at least 1, got {self.default_max_tokens}")
        if self.heartbeat_seconds <= 0:
            raise BadConfig(f"heartbeat_seconds: must be above 0, got {self.heartbeat_seconds}")

    @property
    def system_fingerprint(self) -> str | None:
        return f"fp_{self.fingerprint[:12]}" if self.fingerprint else None

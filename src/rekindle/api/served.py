"""What is served: a loaded model, what clients learn of each, and where one is loaded from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from rekindle.api.ports import EnginePort, TextPort
from rekindle.api.settings import Settings
from rekindle.errors import RekindleError


class ModelState(StrEnum):
    UNLOADED = "unloaded"  # the next request loads it
    LOADING = "loading"
    READY = "ready"
    UNLOADING = "unloading"
    FAILED = "failed"  # its last load; a request after a pause tries again


class RunningEngine(EnginePort, Protocol):
    """An engine as its host sees it. Only `wait_for_end` and `stop` may block."""

    def drain(self) -> None:
        """Refuse new requests; those that were taken run to their end."""

    def end_requests(self) -> None:
        """Every request gets its last event after the step under way; new ones are refused."""

    def wait_for_end(self) -> None:
        """After `end_requests`: until every request has had its last event."""

    def stop(self) -> None:
        """End every request, save what the next load should know, and give all memory back."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model: all that a request needs of it."""

    engine: RunningEngine
    text: TextPort
    settings: Settings


class ModelSource(Protocol):
    """One model that can be loaded. Its methods run on the host's thread, one at a time over all sources."""

    @property
    def settings(self) -> Settings:
        """Its names, its context and its defaults, known before it is loaded; may be read from any thread."""

    def fits_beside(self, others: list[ModelSource]) -> bool:
        """Whether it can be loaded while `others`, which are loaded, stay: as well as it could alone."""

    def load(self, others: list[ModelSource]) -> ServedModel:
        """Load it beside `others`; raises RekindleError with the reason where that cannot be."""

    def reason(self, error: RekindleError) -> str:
        """Why it could not be loaded, for clients."""

    def tidy(self) -> None:
        """After a load, a failed load or an unload: give memory that nobody holds back to the system."""

"""When copies to host memory are complete: values of the `Ready` protocol, asked before the copies are read."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from rekindle.errors import CopyFailed
from rekindle.snapshots.types import Ready


class Later:
    """Copies that the copy thread hands to the device once it has memory for them."""

    def __init__(self, handed_over: Future[Ready]) -> None:
        self.handed_over = handed_over

    @property
    def failed(self) -> bool:
        """Some of them were never handed over; others may be under way all the same."""
        return self.handed_over.done() and self.handed_over.exception() is not None

    @property
    def done(self) -> bool:
        return self.failed or (self.handed_over.done() and self.handed_over.result().done)

    def wait(self) -> None:
        if (error := self.handed_over.exception()) is not None:
            raise CopyFailed(f"copies to host memory could not be handed to the device: {error}") from error
        self.handed_over.result().wait()


@dataclass(frozen=True, slots=True, eq=False)
class Together:
    """Copies that were taken at several times."""

    copies: tuple[Ready, ...]

    @property
    def done(self) -> bool:
        return all(copy.done for copy in self.copies)

    def wait(self) -> None:
        for copy in self.copies:
            copy.wait()


def has_failed(copies: Ready | None) -> bool:
    return isinstance(copies, Later) and copies.failed

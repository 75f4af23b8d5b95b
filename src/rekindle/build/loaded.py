"""A built engine as its host sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rekindle.build.built import Built
from rekindle.engine.types import EngineStatus, Request
from rekindle.errors import Stopping
from rekindle.prompt import Prompt


class LoadedEngine:
    """Lets go of the engine when it has been stopped: a request that ends late may hold this, but no weights."""

    def __init__(self, built: Built) -> None:
        self.built: Built | None = built  # None once it has been stopped
        self._status: EngineStatus | None = None  # the last, from then on

    def submit(self, request: Request) -> None:
        if (built := self.built) is None:
            raise Stopping("the model has been unloaded")
        built.entry.submit(request)

    def cancel(self, request_id: str) -> None:
        self._if_loaded(lambda built: built.entry.cancel(request_id))

    def keep(self, prompt: Prompt, seconds: float, namespace: str) -> None:
        self._if_loaded(lambda built: built.entry.keep(prompt, seconds, namespace))

    def status(self) -> EngineStatus:
        built = self.built
        if self._status is not None:
            return self._status
        assert built is not None, "an engine that is gone has left its last status"
        return built.entry.status()

    def continuations(self, tokens: Sequence[int], longest: int, namespace: str) -> list[list[int]]:
        built = self.built
        return [] if built is None else built.engine.prefixes.continuations(tokens, longest, namespace)

    def drain(self) -> None:
        self._if_loaded(Built.drain)

    def end_requests(self) -> None:
        self._if_loaded(Built.end_requests)

    def wait_for_end(self) -> None:
        self._if_loaded(Built.wait_for_end)

    def stop(self) -> None:
        self._if_loaded(self._stop)

    def _stop(self, built: Built) -> None:
        built.end_requests()
        built.wait_for_end()
        self._status = built.entry.status()
        try:
            built.stop()
        finally:
            self.built = None

    def _if_loaded(self, verb: Callable[[Built], None]) -> None:
        if (built := self.built) is not None:
            verb(built)

"""What `build_engine` gives: a running engine, and how to stop it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rekindle.build.model import Model
from rekindle.build.shards import Shards
from rekindle.build.watch import FileWatcher
from rekindle.engine.engine import Engine
from rekindle.engine.router import Router
from rekindle.experts import CountsFile
from rekindle.placement import Plan

if TYPE_CHECKING:
    from rekindle.build.ray import RayHosts


@dataclass(frozen=True, slots=True)
class Built:
    """A running engine and what it was built from."""

    engine: Engine
    model: Model
    plan: Plan
    watcher: FileWatcher
    counts: CountsFile | None = None  # of a model with experts, where there is a cache folder
    hosts: Shards | RayHosts | None = None  # of stages outside this process
    router: Router | None = None  # of several replicas, the first of which is `engine`

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its answer."""
        return self.plan.wishes.context

    @property
    def entry(self) -> Engine | Router:
        """Takes requests: the router, or the only engine."""
        return self.router or self.engine

    @property
    def _engines(self) -> tuple[Engine, ...]:
        return self.router.replicas if self.router is not None else (self.engine,)

    def drain(self) -> None:
        """Refuse new requests; those that were taken run to their end."""
        for engine in self._engines:
            engine.drain()

    def end_requests(self) -> None:
        """Every request gets its last event after the step under way; new ones are refused. Waits for nothing."""
        for engine in self._engines:
            engine.end_requests()

    def wait_for_end(self) -> None:
        """After `end_requests`: until every request has had its last event."""
        for engine in self._engines:
            engine.wait_for_end()

    def stop(self) -> None:
        """End every request, then save what the next start should know."""
        self.watcher.stop()
        for engine in self._engines:
            engine.stop()
        if self.hosts is not None:
            self.hosts.stop()
        if self.counts is not None:
            self.counts.stop()

"""Several whole replicas of a model behind one door.

A request goes to the replica that knows the longest prefix of its prompt: published in its index, or being run by it
right now. Among equals the least busy one takes it. A replica that loses a stage and cannot bring it back gives its
requests without a token to the others, and is asked last for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from rekindle.engine.admission import common_length
from rekindle.engine.engine import Engine, EngineStatus
from rekindle.engine.types import Event, Failed, Finished, PromptLogprobs, Request, Started, Token
from rekindle.errors import BadRequest, RekindleError, StageLost
from rekindle.prefix.cache import CacheStats
from rekindle.spec import PAGE
from rekindle.stages.types import PageCount

log = logging.getLogger("rekindle.engine")

REST = 30.0  # seconds that a replica is asked last after it has lost a stage


class Router:
    """Has the face of an engine. Every method may be called from any thread."""

    def __init__(self, replicas: Sequence[Engine]) -> None:
        assert replicas, "a door has at least one replica behind it"
        self.replicas = tuple(replicas)
        self._lock = threading.Lock()  # guards the three below
        self._running: dict[str, tuple[int, np.ndarray]] = {}  # by request: its replica and its prompt
        self._errands: dict[str, _Errand] = {}  # by request, from its submit to its last event
        self._failed_at = [-REST] * len(replicas)  # by replica, of a monotonic clock

    def submit(self, request: Request) -> None:
        """To the best replica that takes it; raises what the first one said if none does."""
        errand = _Errand(self, request)
        with self._lock:
            self._errands[request.id] = errand
        try:
            self._hand_over(errand, self._order(np.asarray(request.prompt.tokens)))
        except BaseException:
            self.end(request)
            raise

    def cancel(self, request_id: str) -> None:
        """Wherever it is; if it is between two replicas, the one that takes it over is told."""
        with self._lock:
            if (errand := self._errands.get(request_id)) is not None:
                errand.cancelled = True
        for replica in self.replicas:
            replica.cancel(request_id)

    def status(self) -> EngineStatus:
        """Everything together; broken only where every replica is."""
        each = [replica.status() for replica in self.replicas]
        caches = {id(replica.prefixes): status.cache for replica, status in zip(self.replicas, each, strict=True)}
        pages = [status.pages for status in each]
        broken = [status.broken for status in each if status.broken is not None]
        sums = {
            field.name: sum(getattr(status, field.name) for status in each)
            for field in fields(EngineStatus)
            if field.name not in ("pages", "cache", "work", "broken")
        }
        return EngineStatus(
            **sums,
            pages=PageCount(sum(p.free for p in pages), sum(p.used for p in pages), sum(p.total for p in pages)),
            cache=_together(list(caches.values())),
            work=_added([status.work for status in each]),
            broken="; ".join(broken) if len(broken) == len(each) else None,
        )

    def _order(self, tokens: np.ndarray) -> list[int]:
        """Replicas, the best first."""
        now = time.monotonic()
        with self._lock:
            running = list(self._running.values())
            rests = [now - failed < REST for failed in self._failed_at]

        def rank(index: int) -> tuple[bool, int, int]:
            replica = self.replicas[index]
            prompts = [prompt for home, prompt in running if home == index]
            known = max([replica.prefixes.known_length(tokens), *(common_length(tokens, prompt) for prompt in prompts)])
            # What ends inside the first page is no reason to wait for somebody.
            return rests[index], -(known if known >= PAGE else 0), len(prompts)

        return sorted(range(len(self.replicas)), key=rank)

    def _hand_over(self, errand: _Errand, order: Sequence[int]) -> None:
        """To the first that takes it."""
        refusals: list[RekindleError] = []
        for place, index in enumerate(order):
            errand.others = order[place + 1 :]
            with self._lock:
                self._running[errand.request.id] = (index, np.asarray(errand.request.prompt.tokens))
            try:
                self.replicas[index].submit(replace(errand.request, sink=errand.take))
            except BadRequest:
                raise
            except RekindleError as error:
                refusals.append(error)
            else:
                if errand.cancelled:  # perhaps before this replica knew of it
                    self.replicas[index].cancel(errand.request.id)
                return
        raise refusals[0]

    def end(self, request: Request) -> None:
        """No replica has it any more, and none will."""
        with self._lock:
            self._running.pop(request.id, None)
            self._errands.pop(request.id, None)

    def outlive(self, errand: _Errand, error: StageLost) -> bool:
        """The errand's replica lost a stage. True where another takes the request over."""
        with self._lock:
            home, _ = self._running.pop(errand.request.id, (None, None))
            if home is not None:
                self._failed_at[home] = time.monotonic()
        if errand.told or errand.cancelled or not errand.others:
            return False
        try:
            self._hand_over(errand, errand.others)
        except RekindleError as refusal:
            log.warning("request %s found no other replica: %s", errand.request.id, refusal)
            return False
        log.warning("%s; request %s goes to another replica", error, errand.request.id)
        return True


class _Errand:
    """One request on its way: passes events on, unless another replica begins it anew."""

    def __init__(self, router: Router, request: Request) -> None:
        self.request = request
        self.others: Sequence[int] = ()  # replicas not tried yet
        self.told = False  # the client has seen something of the answer
        self.cancelled = False  # nobody waits for it any more
        self._router = router
        self._started = False

    def take(self, event: Event) -> None:
        if isinstance(event, Started):
            if self._started:
                return
            self._started = True
        elif isinstance(event, Failed):
            if isinstance(event.error, StageLost) and self._router.outlive(self, event.error):
                return
            self._router.end(self.request)
        elif isinstance(event, Finished):
            self._router.end(self.request)
        self.told |= isinstance(event, Token | PromptLogprobs)
        self.request.sink(event)


def _added(each: Sequence[Mapping[str, int]]) -> Counter[str]:
    """Zeros stay, which adding counters would drop."""
    counts = Counter[str]()
    for some in each:
        counts.update(some)
    return counts


def _together(caches: Sequence[CacheStats]) -> CacheStats:
    """Counts of several caches in one."""
    if len(caches) == 1:
        return caches[0]
    return CacheStats(**{field.name: _sum([getattr(c, field.name) for c in caches]) for field in fields(CacheStats)})


def _sum(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        return dict(sum((Counter(value) for value in values), Counter()))
    return sum(values) if isinstance(values[0], int) else ", ".join(dict.fromkeys(map(str, values)))

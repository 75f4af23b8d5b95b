"""Requests are shared out among several replicas of a model.

A request goes to the replica that knows the longest prefix of its prompt: published in its index, kept in one of its
slots, being run by it right now, or just run, since snapshots are published a moment after the answer's end. Of those
that know as much but for a page, one that keeps it in a slot takes it, else the least busy one. If a replica loses a
stage and cannot bring it back, its requests that have no token yet go to the others, and it is tried last for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rekindle.engine.engine import Engine
from rekindle.engine.sums import sum_of
from rekindle.engine.types import (
    EngineStatus,
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    Request,
    Started,
    Token,
)
from rekindle.errors import BadRequest, RekindleError, StageLost
from rekindle.prompt import Prompt, common_length
from rekindle.spec import PAGE

log = logging.getLogger("rekindle.engine")

REST = 30.0  # seconds for which a replica is tried last after it has lost a stage
PUBLISHING = 2.0  # seconds after an answer's end within which its snapshots are published, with time to spare
MOST = 256  # answers whose end is remembered so long


_Run = tuple[int, str, np.ndarray]  # the replica of a request, its name space and its prompt


class Router:
    """Has the methods of an engine that a client calls. Every method may be called from any thread."""

    def __init__(self, replicas: Sequence[Engine]) -> None:
        assert replicas, "a router has at least one replica"
        self.replicas = tuple(replicas)
        self._lock = threading.Lock()  # guards the four below
        self._running: dict[str, _Run] = {}  # by id
        self._just_run = deque[tuple[float, _Run]](maxlen=MOST)  # the oldest end first, by a monotonic clock
        self._routed: dict[str, _RoutedRequest] = {}  # by request, from its submit to its last event
        self._failed_at = [-REST] * len(replicas)  # by replica, of a monotonic clock

    def submit(self, request: Request) -> None:
        """To the best replica that takes it; if none does, raises the refusal of the first."""
        routed = _RoutedRequest(self, request)
        with self._lock:
            self._routed[request.id] = routed
        try:
            self._hand_over(routed, self._order(request))
        except BaseException:
            self.end(request)
            raise

    def cancel(self, request_id: str) -> None:
        """At every replica; a request that is between two of them is cancelled at the one that takes it over."""
        with self._lock:
            if (routed := self._routed.get(request_id)) is not None:
                routed.cancelled = True
        for replica in self.replicas:
            replica.cancel(request_id)

    def keep(self, prompt: Prompt, seconds: float, namespace: str) -> None:
        """Whichever replica captured them: the cache is one."""
        for replica in self.replicas:
            replica.keep(prompt, seconds, namespace)

    def status(self) -> EngineStatus:
        """Sums over the replicas; broken only if every replica is."""
        each = [replica.status() for replica in self.replicas]
        caches = {id(replica.prefixes): status.cache for replica, status in zip(self.replicas, each, strict=True)}
        broken = [status.broken for status in each if status.broken is not None]
        together = "; ".join(broken) if len(broken) == len(each) else None
        return replace(sum_of(each, list(caches.values())), broken=together)

    def _order(self, request: Request) -> list[int]:
        """Replicas, the best first."""
        now, tokens, namespace = time.monotonic(), request.prompt.key, request.namespace
        with self._lock:
            running = list(self._running.values())
            self._forget_published(now)
            just_run = [run for _, run in self._just_run]
            rests = [now - failed < REST for failed in self._failed_at]

        def known_by(index: int) -> tuple[int, bool]:
            """Tokens of the longest prefix, and whether a slot keeps it."""
            replica = self.replicas[index]
            shared = [
                common_length(tokens, prompt)
                for its, its_namespace, prompt in running
                if its == index and its_namespace == namespace
            ]
            ended = [  # which leaves a snapshot at the end of its prompt, and perhaps nowhere else
                len(prompt)
                for its, its_namespace, prompt in just_run
                if its == index and its_namespace == namespace and common_length(tokens, prompt) == len(prompt)
            ]
            kept = replica.kept_length(tokens, namespace)
            known = max([replica.prefixes.known_length(tokens, namespace), kept, *shared, *ended])
            return known, kept == known

        each = [known_by(index) for index in range(len(self.replicas))]
        longest = max(known for known, _ in each)

        def rank(index: int) -> tuple[bool, int, bool, int]:
            # To compute less than a page more is not worth waiting for: some tokens behind a system prompt that all of
            # them know are shared with whoever runs there. And only the longest is taken over.
            known, keeps = each[index]
            load = sum(its == index for its, *_ in running)
            lead = longest if longest - known < PAGE else known
            return rests[index], -lead, not (keeps and known >= PAGE), load

        return sorted(range(len(self.replicas)), key=rank)

    def _hand_over(self, routed: _RoutedRequest, order: Sequence[int]) -> None:
        """To the first replica in `order` that takes it."""
        refusals: list[RekindleError] = []
        for place, index in enumerate(order):
            routed.others = order[place + 1 :]
            request = routed.request
            with self._lock:
                self._running[request.id] = (index, request.namespace, request.prompt.key)
            try:
                self.replicas[index].submit(replace(routed.request, sink=routed.take))
            except BadRequest:
                raise
            except RekindleError as error:
                refusals.append(error)
            else:
                if routed.cancelled:  # perhaps before this replica had it
                    self.replicas[index].cancel(routed.request.id)
                return
        raise refusals[0]

    def end(self, request: Request, whole: bool = False) -> None:
        """It has had its last event, or was refused. whole: its prompt was computed, to the end."""
        with self._lock:
            run = self._running.pop(request.id, None)
            self._forget_published(now := time.monotonic())
            if whole and run is not None:
                self._just_run.append((now, run))
            self._routed.pop(request.id, None)

    def _forget_published(self, now: float) -> None:
        """With the lock."""
        while self._just_run and now - self._just_run[0][0] > PUBLISHING:
            self._just_run.popleft()

    def reroute(self, routed: _RoutedRequest, error: StageLost) -> bool:
        """The request's replica lost a stage. True if another replica takes it over."""
        with self._lock:
            replica, *_ = self._running.pop(routed.request.id, (None,))
            if replica is not None:
                self._failed_at[replica] = time.monotonic()
        if routed.streamed or routed.cancelled or not routed.others:
            return False
        try:
            self._hand_over(routed, routed.others)
        except RekindleError as refusal:
            log.warning("request %s found no other replica: %s", routed.request.id, refusal)
            return False
        log.warning("%s; request %s goes to another replica", error, routed.request.id)
        return True


class _RoutedRequest:
    """One request at the replica that has it: passes its events on, unless another replica begins it anew."""

    def __init__(self, router: Router, request: Request) -> None:
        self.request = request
        self.others: Sequence[int] = ()  # replicas not tried yet
        self.streamed = False  # the client has seen something of the answer
        self.cancelled = False  # the client has left
        self._router = router
        self._started = False

    def take(self, event: Event) -> None:
        if isinstance(event, Started):
            if self._started:
                return
            self._started = True
        elif isinstance(event, Failed):
            if isinstance(event.error, StageLost) and self._router.reroute(self, event.error):
                return
            self._router.end(self.request)
        elif isinstance(event, Finished):
            self._router.end(self.request, whole=event.reason is not FinishReason.CANCELLED)
        self.streamed |= isinstance(event, Token | PromptLogprobs)
        self.request.sink(event)

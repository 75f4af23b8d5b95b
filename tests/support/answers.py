"""What a test asks an engine, and what comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rekindle.engine.engine import Engine
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling, Token
from rekindle.prompt import Prompt

GREEDY = Sampling(temperature=0)


@contextmanager
def arriving_together(engine: Engine) -> Iterator[None]:
    """What is asked inside is known to the engine all at once."""
    all_are_there = threading.Event()
    engine._inbox.put(lambda: all_are_there.wait(60) and None)
    try:
        yield
    finally:
        all_are_there.set()


class Door(Protocol):
    """An engine or a router."""

    def submit(self, request: Request, /) -> None: ...


class Answer:
    """One request under way, and its events. `at_token` is called with the number of tokens so far, by the engine."""

    def __init__(
        self,
        door: Door,
        prompt: Prompt | Sequence[int],
        sampling: Sampling = GREEDY,
        at_token: Callable[[int], object] | None = None,
        patience: float = 60.0,
        **fields: Any,
    ) -> None:
        self.events: list[Event] = []
        self.first_token = threading.Event()
        self.id = f"r{id(self)}"
        self._at_token, self._patience = at_token, patience
        self._done = threading.Event()
        prompt = prompt if isinstance(prompt, Prompt) else Prompt(tuple(prompt))
        fields = {"max_tokens": 12, "stop_tokens": frozenset[int](), **fields}
        door.submit(Request(self.id, prompt, sampling, sink=self._take, **fields))

    def _take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Token):
            self.first_token.set()
            if self._at_token is not None:
                self._at_token(sum(isinstance(event, Token) for event in self.events))
        if isinstance(event, Finished | Failed):
            self._done.set()

    def wait(self) -> Answer:
        """Until the last event, whichever it is."""
        assert self._done.wait(self._patience), f"no end after {self._patience:.0f} s: {self.events[-3:]}"
        return self

    @property
    def last(self) -> Event:
        return self.wait().events[-1]

    @property
    def finished(self) -> Finished:
        last = self.last
        assert isinstance(last, Finished), last
        return last

    @property
    def rows(self) -> list[Token]:
        """Tokens with their log-probabilities, when the request has ended."""
        return [event for event in self.wait().events if isinstance(event, Token)]

    @property
    def tokens(self) -> list[int]:
        """When the request has ended, well or not."""
        return [event.token for event in self.rows]

"""What a finished chat answer leaves for the next request: its ids, and the state of the prompt that comes next.

A template may drop an answer's thinking from the history, and always writes a few tokens behind the answer. So the
state in which an answer ends is often of no use to the prompt that follows. That prompt is known up to where the
client's new message starts; its state is prepared while the client reads, runs its tools or types.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock

from rekindle.api.dialects import chat_message
from rekindle.api.generation import Choice
from rekindle.api.metrics import Metrics
from rekindle.api.ports import EnginePort, TextPort
from rekindle.api.schema import ChatBody
from rekindle.api.settings import Settings
from rekindle.engine.types import Event, Failed, Finished, FinishReason, Request, Sampling, Started
from rekindle.errors import BadRequest, QueueFull, Stopping
from rekindle.prompt import BoundaryKind, Prompt

log = logging.getLogger("rekindle.api")

WORTHWHILE = 16  # tokens; fewer than that behind the answer's own state are run sooner than they are prepared


@dataclass(slots=True)
class _Preparation:
    """One request to the engine on its way."""

    id: str
    waiting: bool = True


class History:
    """Remembers answers and prepares what follows them."""

    def __init__(self, engine: EnginePort, text: TextPort, settings: Settings, metrics: Metrics) -> None:
        self._engine = engine
        self._text = text
        self._settings = settings
        self._metrics = metrics
        self._lock = Lock()
        self._under_way: dict[tuple[int, ...], _Preparation] = {}  # by conversation

    def finished(self, body: ChatBody, choice: Choice) -> None:
        """On the loop, before the client learns of the end; what takes long goes to a worker thread."""
        self._text.remember(choice.prompt, choice.ids, chat_message(choice.text))
        is_asking = body.add_generation_prompt is not False  # else the client's own beginning of a turn was continued
        if self._settings.prepare_next and is_asking and (body.n or 1) == 1:
            asyncio.get_running_loop().run_in_executor(None, self._prepare, body, choice)

    def _prepare(self, body: ChatBody, choice: Choice) -> None:
        try:
            outcome = self._try_to_prepare(body, choice)
        except Exception:
            log.exception("the prompt after an answer could not be prepared")
            outcome = "failed"
        if outcome is not None:
            self._count(outcome)

    def _try_to_prepare(self, body: ChatBody, choice: Choice) -> str | None:
        """What became of it; None if the engine will tell."""
        answer = chat_message(choice.text)
        try:
            prompt = self._text.next_prompt(body.sent_messages, answer, body.sent_tools, **body.template_kwargs)
        except BadRequest:
            return "refused"  # the template takes no such conversation, so no client will send it
        if prompt is None or len(prompt.tokens) >= self._settings.context:
            return "impossible"
        if not _is_worthwhile(prompt, choice):
            return "needless"
        return self._submit(prompt, _conversation(choice.prompt))

    def _submit(self, prompt: Prompt, conversation: tuple[int, ...]) -> str | None:
        preparation = _Preparation(uuid.uuid4().hex)
        status = self._engine.status()
        with self._lock:
            ours = sum(each.waiting for each in self._under_way.values())
            former = self._under_way.get(conversation)
            others = len(self._under_way) - (former is not None)
            if status.waiting > ours or others >= status.slots:
                return "dropped"  # the server is busy, and what comes first is whoever waits for an answer
            self._under_way[conversation] = preparation
        if former is not None:
            self._engine.cancel(former.id)
        try:
            self._engine.submit(
                Request(
                    id=preparation.id,
                    prompt=prompt,
                    sampling=Sampling(temperature=0),
                    max_tokens=0,
                    stop_tokens=frozenset(),
                    sink=partial(self._note, conversation, preparation),
                    background=True,
                )
            )
        except (QueueFull, Stopping):
            self._end(conversation, preparation)
            return "dropped"
        except Exception:
            self._end(conversation, preparation)
            raise
        return None

    def _note(self, conversation: tuple[int, ...], preparation: _Preparation, event: Event) -> None:
        """On the engine's thread."""
        match event:
            case Started():
                preparation.waiting = False
            case Finished():
                self._end(conversation, preparation)
                self._count("cancelled" if event.reason is FinishReason.CANCELLED else "prepared")
            case Failed():
                self._end(conversation, preparation)
                self._count("failed")

    def _end(self, conversation: tuple[int, ...], preparation: _Preparation) -> None:
        with self._lock:
            if self._under_way.get(conversation) is preparation:
                del self._under_way[conversation]

    def _count(self, outcome: str) -> None:
        self._metrics.preparations.labels(outcome).inc()


def _is_worthwhile(prompt: Prompt, choice: Choice) -> bool:
    """Whether the prompt needs more than a few tokens behind the state in which the answer ended."""
    finished = choice.finished
    assert finished is not None, "what follows an answer is prepared when it has finished"
    drawn = choice.ids[:-1] if finished.stop_token is not None else choice.ids
    written = (*choice.prompt.tokens, *drawn)
    shared = _common_length(prompt.tokens, written)
    extends = shared >= len(written) - 1  # an answer's last token is not in its state unless a stop token followed
    return not (extends and len(prompt.tokens) - shared < WORTHWHILE)


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _conversation(prompt: Prompt) -> tuple[int, ...]:
    """A conversation goes by its opening: everything up to the end of its first message."""
    opening = (b.position for b in prompt.boundaries if b.kind is BoundaryKind.MESSAGE)
    return prompt.tokens[: next(opening, len(prompt.tokens))]

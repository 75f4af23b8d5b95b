"""What a finished chat answer leaves for the next request: its ids, and the state of the prompt that comes next.

A template may drop an answer's thinking from the history, and always writes a few tokens after the answer. So the
state in which an answer ends is often of no use to the prompt that follows. That prompt is known up to where the
client's new message starts; its state is prepared while the client reads, runs its tools or types.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass
from functools import partial
from threading import Lock

import numpy as np

from rekindle.api.choice import Choice
from rekindle.api.keys import Client
from rekindle.api.metrics import Metrics
from rekindle.api.ports import EnginePort
from rekindle.api.request import Conversation
from rekindle.api.served import ServedModel
from rekindle.engine.types import Event, Failed, Finished, FinishReason, Request, Sampling, Started
from rekindle.errors import BadRequest, QueueFull, Stopping
from rekindle.prompt import BoundaryKind, Prompt, common_length, ids_of

log = logging.getLogger("rekindle.api")

WORTHWHILE = 16  # tokens; fewer than that after the answer's own state are run sooner than they are prepared


@dataclass(frozen=True, slots=True)
class _Key:
    """Of a conversation: only its latest answer is worth a preparation."""

    model: str
    namespace: str
    opening: tuple[int, ...]


@dataclass(slots=True)
class _Preparation:
    """One request to the engine on its way."""

    id: str
    waiting: bool = True


class History:
    """Remembers answers and prepares what follows them."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = Lock()
        self._under_way: dict[_Key, _Preparation] = {}

    def finished(self, model: ServedModel, conversation: Conversation, n: int, client: Client, choice: Choice) -> None:
        """One of the model's `n` answers has finished. Called on the loop, before the client sees the end; preparing
        takes long and goes to a worker thread."""
        model.text.remember(choice.prompt, choice.ids, choice.message, client.namespace)
        if conversation.keep_seconds and choice.prompt.marks:
            model.engine.keep(choice.prompt, conversation.keep_seconds, client.namespace)
        is_whole = conversation.add_generation_prompt  # else the answer continues a turn that the client began
        if model.settings.prepare_next and is_whole and n == 1:
            asyncio.get_running_loop().run_in_executor(None, self._prepare, model, conversation, client, choice)

    def _prepare(self, model: ServedModel, conversation: Conversation, client: Client, choice: Choice) -> None:
        try:
            outcome = self._try_to_prepare(model, conversation, client.namespace, choice)
        except Exception:
            log.exception("the prompt after an answer could not be prepared")
            outcome = "failed"
        if outcome is not None:
            self._count(outcome)

    def _try_to_prepare(
        self, model: ServedModel, conversation: Conversation, namespace: str, choice: Choice
    ) -> str | None:
        """The outcome; None where the engine's events will bring it."""
        if choice.answer.ends_in_call:
            return "impossible"
        messages, answer = conversation.messages, choice.message
        try:
            options = conversation.options(model.text)
            prompt = model.text.next_prompt(messages, answer, conversation.tools, namespace, **options)
        except BadRequest:
            return "refused"  # the template takes no such conversation, so no client will send it
        if prompt is None or len(prompt.tokens) >= model.settings.context:
            return "impossible"
        if not _is_worthwhile(prompt, choice):
            return "needless"
        return self._submit(model.engine, prompt, _Key(model.settings.models[0], namespace, _opening(choice.prompt)))

    def _submit(self, engine: EnginePort, prompt: Prompt, key: _Key) -> str | None:
        preparation = _Preparation(uuid.uuid4().hex)
        status = engine.status()
        with self._lock:
            of_model = {other: each for other, each in self._under_way.items() if other.model == key.model}
            ours = sum(each.waiting for each in of_model.values())
            former = of_model.get(key)
            others = len(of_model) - (former is not None)
            if status.waiting > ours or others >= status.slots:
                return "dropped"  # the server is busy, and requests that a client waits for come first
            self._under_way[key] = preparation
        if former is not None:
            engine.cancel(former.id)
        try:
            engine.submit(
                Request(
                    id=preparation.id,
                    prompt=prompt,
                    sampling=Sampling(temperature=0),
                    max_tokens=0,
                    stop_tokens=frozenset(),
                    sink=partial(self._note, key, preparation),
                    background=True,
                    namespace=key.namespace,
                )
            )
        except (QueueFull, Stopping):
            self._end(key, preparation)
            return "dropped"
        except Exception:
            self._end(key, preparation)
            raise
        return None

    def _note(self, key: _Key, preparation: _Preparation, event: Event) -> None:
        """On the engine's thread."""
        match event:
            case Started():
                preparation.waiting = False
            case Finished():
                self._end(key, preparation)
                self._count("cancelled" if event.reason is FinishReason.CANCELLED else "prepared")
            case Failed():
                self._end(key, preparation)
                self._count("failed")

    def _end(self, key: _Key, preparation: _Preparation) -> None:
        with self._lock:
            if self._under_way.get(key) is preparation:
                del self._under_way[key]

    def _count(self, outcome: str) -> None:
        self._metrics.preparations.labels(outcome).inc()


def _is_worthwhile(prompt: Prompt, choice: Choice) -> bool:
    """Whether the prompt needs more than a few tokens after the state in which the answer ended."""
    finished = choice.finished
    assert finished is not None, "what follows an answer is prepared when it has finished"
    drawn = choice.ids[:-1] if finished.stop_token is not None else choice.ids
    written = np.concatenate([choice.prompt.key, ids_of(drawn)])
    shared = common_length(prompt.key, written)
    extends = shared >= len(written) - 1  # an answer's last token is not in its state unless a stop token followed
    return not (extends and len(prompt.tokens) - shared < WORTHWHILE)


def _opening(prompt: Prompt) -> tuple[int, ...]:
    """A conversation goes by its opening: everything up to the end of its first message."""
    opening = (b.position for b in prompt.boundaries if b.kind is BoundaryKind.MESSAGE)
    return prompt.tokens[: next(opening, len(prompt.tokens))]

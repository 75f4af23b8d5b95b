"""The answers of one HTTP request: submitted together, read as text, cancelled when the client leaves."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rekindle.api.choice import Choice, TextDelta, ends_in_thinking, join
from rekindle.api.events import Bell, EventQueue, TimedEvent
from rekindle.api.metrics import Metrics
from rekindle.api.params import GenerationParams
from rekindle.api.ports import EnginePort, TextPort
from rekindle.api.report import Usage, account, usage_of
from rekindle.engine.types import Failed, Finished, FinishReason, Request, ThinkingLimit, Token
from rekindle.errors import Stopping
from rekindle.grammar.calls import OPENS
from rekindle.text.parsing import AnswerParser

log = logging.getLogger("rekindle.api")


@dataclass(slots=True)
class Generation:
    """All answers of one HTTP request. Made by `start`; its owner calls `close` at the end, however it ends."""

    engine: EnginePort
    text: TextPort
    metrics: Metrics
    params: GenerationParams
    arrived: float  # monotonic seconds
    events: EventQueue
    on_finished: Callable[[Choice], None] | None = None  # called with each finished answer before its last delta
    choices: list[Choice] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        engine: EnginePort,
        text: TextPort,
        metrics: Metrics,
        params: GenerationParams,
        arrived: float,
        bell: Bell,
        on_finished: Callable[[Choice], None] | None = None,
    ) -> Generation:
        """Submit every answer; if the engine refuses one, the others are cancelled and its error is raised."""
        generation = cls(engine, text, metrics, params, arrived, EventQueue(bell), on_finished)
        try:
            for index in range(len(params.prompts) * params.n):
                generation._submit(index)
        except Exception:
            generation.close()
            raise
        return generation

    def _submit(self, index: int) -> None:
        params = self.params
        prompt, max_tokens = params.prompts[index // params.n], params.max_tokens[index // params.n]
        is_thinking = ends_in_thinking(prompt, self.text)
        parser = self._parser(is_thinking) if params.parses else None
        choice = Choice(index, uuid.uuid4().hex, prompt, params.seed(index), self.text, params.stop_strings, parser)
        choice.limit = self._thinking_limit(is_thinking)
        self.engine.submit(
            Request(
                id=choice.request_id,
                prompt=prompt,
                sampling=replace(params.sampling, seed=choice.seed),
                max_tokens=max_tokens,
                stop_tokens=params.stop_tokens,
                sink=partial(self.events.put, index),
                stop_when=self.text.stop_watcher(params.stop_strings) if params.stop_strings else None,
                ignore_stop_tokens=params.ignore_stop_tokens,
                prompt_logprobs=params.prompt_logprobs,
                namespace=params.namespace,
                thinking=choice.limit,
                rules=params.rules,
            )
        )
        self.choices.append(choice)
        # Tells a long answer under way from a server that hangs.
        log.debug("request %s: %d prompt tokens, limit %d", choice.request_id[:8], len(prompt.tokens), max_tokens)

    def _thinking_limit(self, is_open: bool) -> ThinkingLimit | None:
        budget, tokens = self.params.thinking_budget, self.text.thinking_tokens
        if budget is None or tokens is None:
            return None
        return ThinkingLimit(budget, tokens.begin, tokens.end, tokens.close, is_open)

    def _parser(self, is_thinking: bool) -> AnswerParser:
        """Where calls keep to a grammar they are written in one way, and other texts that read like calls are text."""
        params = self.params
        marker = OPENS if params.own_calls else None
        return AnswerParser(params.tools, is_thinking, params.rules is None, marker)

    @property
    def done(self) -> bool:
        return all(choice.finished for choice in self.choices)

    async def batches(self, patience: float) -> AsyncIterator[list[TextDelta]]:
        """Deltas as they come, at most one per answer and batch; an empty batch after `patience` quiet seconds."""
        while not self.done:
            events = await self.events.take(patience)
            tokens = self._measure(events)
            indices = dict.fromkeys(it.index for it in events)
            deltas = [self.choices[i].read([it.event for it in events if it.index == i]) for i in indices]
            for delta in deltas:
                if delta.finish is not None and self.on_finished is not None:
                    self.on_finished(self.choices[delta.index])
            yield deltas
            if tokens < len(events):
                _raise_failure(events)

    async def answers(self) -> list[TextDelta]:
        """Every answer whole, by index."""
        deltas: list[list[TextDelta]] = [[] for _ in self.choices]
        async for batch in self.batches(patience=3600.0):
            for delta in batch:
                deltas[delta.index].append(delta)
        return [join(of_one) for of_one in deltas]

    def close(self) -> None:
        """Cancel every answer that has not ended: its client has left. Safe to call twice."""
        self.events.close()
        for choice in self.choices:
            if not choice.ended:
                choice.ended, choice.ending = True, "client left"
                self.engine.cancel(choice.request_id)
                self.metrics.cancellations.inc()

    def _measure(self, events: Sequence[TimedEvent]) -> int:
        """How many of the events are tokens."""
        tokens = 0
        for timed in events:
            choice = self.choices[timed.index]
            if isinstance(timed.event, Token):
                tokens += 1
                self._note_token(choice, timed.at)
            elif isinstance(timed.event, Finished):
                self.metrics.count_finished(timed.event)
                choice.ending = timed.event.reason.value
            elif isinstance(timed.event, Failed):
                choice.ending = "failed"
        self.metrics.generated.inc(tokens)
        return tokens

    def _note_token(self, choice: Choice, at: float) -> None:
        if choice.last_token_at is None:
            choice.first_token_at = at
            self.metrics.first_token.observe(at - self.arrived)
        else:
            self.metrics.token.observe(at - choice.last_token_at)
        choice.last_token_at = at

    @property
    def drawn(self) -> int:
        """Tokens of all answers so far."""
        return sum(len(choice.ids) for choice in self.choices)

    def usage(self) -> Usage:
        return usage_of(self.choices, self.params.n)

    def report(self, ignored_fields: list[str], token_ids: bool = False) -> dict[str, Any]:
        """What ran: the first answer's account, those of the `others` beside it, and the fields without effect; the
        token ids of prompt and answer where a client asks for them and its dialect has no place for them."""
        first, *others = [account(choice, self.params, self.text) for choice in self.choices]
        report = {**first, "ignored_fields": ignored_fields}
        if token_ids:
            prompt, answer = self.choices[0].prompt.tokens, self.choices[0].ids
            report |= {"prompt_token_ids": list(prompt), "token_ids": list(answer)}
        return {**report, "others": others} if others else report


def _raise_failure(events: Sequence[TimedEvent]) -> None:
    for timed in events:
        if isinstance(timed.event, Failed):
            raise timed.event.error
        if isinstance(timed.event, Finished) and timed.event.reason is FinishReason.CANCELLED:
            raise Stopping("the server is stopping and ended this answer before it was complete")

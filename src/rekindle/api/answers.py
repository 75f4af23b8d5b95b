"""A generation written as one JSON answer or as a stream of events, in either dialect."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from rekindle.api.dialects import Dialect
from rekindle.api.errors import fault_of
from rekindle.api.generation import Generation
from rekindle.api.schema import GenerationBody
from rekindle.api.settings import Settings
from rekindle.api.sse import DONE, HEARTBEAT, event

Json = dict[str, Any]


class Answerer:
    """One HTTP request's frame: what is the same in every chunk of its answer."""

    def __init__(self, body: GenerationBody, dialect: Dialect, generation: Generation, settings: Settings) -> None:
        self._body = body
        self._dialect = dialect
        self._generation = generation
        self._patience = settings.heartbeat_seconds
        self._id = dialect.id_prefix + generation.choices[0].request_id  # the log names the same
        self._created = int(time.time())
        self._model = body.model or settings.models[0]
        self._fingerprint = settings.system_fingerprint

    async def whole(self) -> Json:
        answers = await self._generation.answers()
        choices = [self._dialect.whole(*pair) for pair in zip(self._generation.choices, answers, strict=True)]
        return self._frame(self._dialect.object_name, choices) | {"usage": self._generation.usage()} | self._report()

    async def events(self) -> AsyncIterator[bytes]:
        """The stream is open, so an error can only be told inside it."""
        try:
            async for data in self._events():
                yield data
        except Exception as error:
            yield event(fault_of(error).body)
        yield DONE

    async def _events(self) -> AsyncIterator[bytes]:
        for choice in self._generation.choices:
            if (opening := self._dialect.opening(choice)) is not None:
                yield event(self._chunk(opening))
        async for pieces in self._generation.batches(self._patience):
            chunks = [
                self._chunk(shape)
                for piece in pieces
                for shape in self._dialect.chunks(self._generation.choices[piece.index], piece)
            ]
            if self._generation.done and not self._body.include_usage:
                chunks[-1] |= self._report()  # an answer's last chunk is its finish, and this is the last answer
            for chunk in chunks:
                yield event(chunk)
            if not pieces:
                yield HEARTBEAT
        if self._body.include_usage:
            last = self._frame(self._dialect.chunk_name, []) | {"usage": self._generation.usage()}
            yield event(last | self._report())

    def _chunk(self, choice: Json) -> Json:
        """With usage asked for, every chunk has the field, null until the last."""
        return self._frame(self._dialect.chunk_name, [choice]) | ({"usage": None} if self._body.include_usage else {})

    def _frame(self, object_name: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }

    def _report(self) -> Json:
        return {"rekindle": self._generation.report(self._body.ignored_fields)}

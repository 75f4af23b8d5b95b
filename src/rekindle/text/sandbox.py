"""A chat template, rendered in a process of its own (`jinja_worker`), which ends where it needs too much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rekindle.errors import BadModelFile, BadRequest
from rekindle.text import jinja_worker
from rekindle.workers import WorkerEnded, Workers

SECONDS = 5.0  # of processor time for one text; a conversation of 100,000 tokens takes a tenth of one

_workers = Workers(Path(jinja_worker.__file__))


class TemplateRefuses(BadRequest):
    """The template raised an error for these values, or was stopped for the time or memory that it needed."""


class TemplateStopped(TemplateRefuses):
    """The template was stopped with its process."""


class Template:
    """Renders plain data. May be used from several threads: each text takes a process for itself."""

    def __init__(self, source: str) -> None:
        self._source = source
        try:
            why = self._ask(None).get("broken")
        except TemplateStopped as error:  # constant expressions are computed already
            why = str(error)
        if why is not None:
            raise BadModelFile(f"the chat template does not compile: {why}")

    def render(self, values: dict[str, Any]) -> str:
        found = self._ask(values)
        if "text" not in found:
            raise TemplateRefuses(found.get("refused") or found["broken"], "messages")
        return found["text"]

    def _ask(self, values: dict[str, Any] | None) -> dict[str, str]:
        try:
            request = json.dumps({"source": self._source, "values": values, "seconds": SECONDS}).encode()
        except RecursionError as error:
            raise TemplateRefuses("they are nested too deep", "messages") from error
        try:
            return _workers.ask(request)
        except WorkerEnded as error:
            why = f"it takes more than {SECONDS:g} seconds" if error.was_slow else str(error)
            raise TemplateStopped(why, "messages") from error

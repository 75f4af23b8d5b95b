"""The process that renders chat templates: run as a script, with the standard library and jinja2 alone.

A template is a program that comes with a model's file. The sandbox keeps it from touching anything, but not from
running 10⁹ turns of a loop or building a string of that length, in one call that no other thread can interrupt. So it
runs here, and the operating system ends the process when it needs too much time or memory.

Reads requests and writes answers, one line of JSON each: {"source", "values", "seconds"} gives {"text"}, {"refused"} or
{"broken"}.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 1 << 30  # bytes of address space
LONGEST = 1 << 25  # characters of one text


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(4)
def compiled(source: str) -> jinja2.Template:
    """The template in a sandbox, with the blanks and helpers that templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it; jinja2's own filter would escape `<` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def answer(source: str, values: dict[str, Any] | None) -> dict[str, str]:
    """Without values the template is only compiled."""
    try:
        template = compiled(source)
    except Exception as error:  # of the parser, or of Python's compiler on what came out: nested too deep, and the like
        return {"broken": _said(error)}
    try:
        text = template.render(values) if values is not None else ""
    except Exception as error:  # the model's own code met a request it was not written for: any type is possible
        return {"refused": _said(error)}
    if len(text) > LONGEST:
        return {"refused": f"it wrote {len(text):,} characters, at most {LONGEST:,} are allowed"}
    return {"text": text}


def _said(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"it needs more than {MEMORY >> 20} MiB of memory"
    return str(error) or type(error).__name__


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # Of processor time, after which the process ends, also in the middle of one long call.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        found = json.dumps(answer(request["source"], request["values"]))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(found.encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

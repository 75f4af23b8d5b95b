"""`rekindle serve` with a model that answers by a script. Everything is real, the model's forward too, but the
tokens that are drawn: the engine is told to go on with those of the script.

    scripted_server.py SCRIPT LOG MODEL [serve's other arguments]

SCRIPT: a JSON list of rules; of those that fit a prompt the first one answers. LOG: gets a JSON line for every answer.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rekindle import cli
from rekindle.build import open_model
from rekindle.engine import engine
from rekindle.engine.types import Event, Finished, Request, Token
from rekindle.text import Tokenizer

DEFAULT = "Good.\n</think>\n\nGood."


class Script:
    """Answers prompts. A rule fits where the prompt has the words of `needs` and, behind the last `after`, none of
    `without`."""

    def __init__(self, rules: list[dict[str, str]], tokenizer: Tokenizer) -> None:
        self._rules = rules
        self._tokenizer = tokenizer

    def answer(self, prompt: str) -> list[int]:
        text = next((rule["say"] for rule in self._rules if _fits(rule, prompt)), DEFAULT)
        return [*self._tokenizer.encode_template(text), min(self._tokenizer.stop_ids)]


def _fits(rule: dict[str, str], prompt: str) -> bool:
    before, found, behind = prompt.rpartition(rule["after"])
    return bool(found) and rule["needs"] in before + behind and rule["without"] not in behind


class Log:
    """What was sent, restored and computed, for the test to add up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def listen(self, request: Request, sink: Callable[[Event], None]) -> Callable[[Event], None]:
        answer: list[int] = []

        def heard(event: Event) -> None:
            if isinstance(event, Token):
                answer.append(event.token)
            if isinstance(event, Finished):
                self._write(request, answer, event)
            sink(event)

        return heard

    def _write(self, request: Request, answer: list[int], event: Finished) -> None:
        line = {
            "prompt": list(request.prompt.tokens),
            "answer": answer + ([event.stop_token] if event.stop_token is not None else []),
            "restored": dict(event.cache.restored_from),
            "computed": event.cache.computed,
            "background": request.background,
        }
        with self._lock, self._path.open("a") as file:
            print(json.dumps(line), file=file)


def main() -> None:
    script_file, log_file, model, *arguments = sys.argv[1:]
    tokenizer = open_model(Path(model)).tokenizer
    script, log = Script(json.loads(Path(script_file).read_text()), tokenizer), Log(Path(log_file))
    make = engine.make_sequence

    def scripted(request: Request, *rest: Any) -> Any:
        sequence = make(replace(request, sink=log.listen(request, request.sink)), *rest)
        if not request.background:
            sequence.forcing.force(script.answer(tokenizer.decode(request.prompt.tokens, skip_control=False)))
        return sequence

    setattr(engine, "make_sequence", scripted)  # noqa: B010 (another signature, on purpose)
    sys.argv = ["rekindle", "serve", model, *arguments]
    cli.main()


if __name__ == "__main__":
    main()

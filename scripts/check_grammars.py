"""Answers of a random model under random schemas: every one that ends by itself must be valid.

    python scripts/check_grammars.py [--schemas 1000] [--seed 0] [--together 4] [--draft lookup]

A tiny model with random weights is written and answers each schema once, sampled at temperature 1 over all tokens, so
that nothing but the grammar keeps it to the schema. An answer that reaches its limit of tokens is cut and cannot be
valid; it is counted. The last line is JSON; the exit status is 1 if an answer is invalid or fails, or if more than one
in twenty is cut or refused.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema

from rekindle.api.model_text import ModelText
from rekindle.bench.synth import write_synthetic
from rekindle.build import Built, build_engine
from rekindle.config import Config
from rekindle.engine.types import Event, Failed, Finished, FinishReason, Request, Sampling, Token
from rekindle.errors import BadRequest
from rekindle.grammar import Grammar
from rekindle.grammar.frame import ThinkingFrame, in_library_form, whole
from rekindle.prompt import Prompt

LONGEST = 1500  # tokens of an answer
NAMES = ("a", "name", "with space", "ünï", 'quo"te', "back\\slash", "emoji🙂", "x-y_z", "</tool_call>", "0")
PATTERNS = ("^[a-z]{1,6}$", "^(foo|bar)+$", r"^\d{2}-\d{2}$", "[A-Z]{2}$", "^a")


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Of what clients send; texts and lists have an end, which a random model would seldom find."""
    kinds = [_string, _number, _words, _enum]
    if depth:
        kinds += [partial(_object, depth=depth), partial(_array, depth=depth), partial(_either, depth=depth)]
    return rng.choice(kinds)(rng)


def random_object(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    schema = _object(rng, depth)
    if rng.random() < 0.3:
        schema["$defs"] = {"part": random_schema(rng, 1)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["required"].append("part")
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(5))
    properties = {name: random_schema(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randrange(3)
    schema = {"type": "array", "items": random_schema(rng, depth - 1), "minItems": least}
    return {**schema, "maxItems": least + rng.randrange(3)}


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def _string(rng: random.Random) -> dict[str, Any]:
    limits = rng.choice(({"maxLength": 8}, {"minLength": 2, "maxLength": 5}, {"pattern": rng.choice(PATTERNS[:3])}))
    formats: tuple[dict[str, Any], ...] = tuple({"format": name} for name in ("date", "uuid", "ipv4"))
    return {"type": "string", **rng.choice((limits, limits, *formats))}


def _number(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-100, 100)
    bounds = rng.choice(({}, {"minimum": low}, {"minimum": low, "maximum": low + rng.randrange(200)}))
    return {"type": rng.choice(("integer", "number")), **bounds}


def _words(rng: random.Random) -> dict[str, Any]:
    return {"type": rng.choice(("boolean", "null", ["boolean", "null"]))}


def _enum(rng: random.Random) -> dict[str, Any]:
    values = [*NAMES, 1, -2, 0.5, True, None]
    return rng.choice(({"enum": rng.sample(values, rng.randint(1, 4))}, {"const": rng.choice(values)}))


class Answer:
    """One answer under way."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema = schema
        self.tokens: list[int] = []
        self.last: Finished | Failed | None = None
        self._done = threading.Event()

    def take(self, event: Event) -> None:
        if isinstance(event, Token):
            self.tokens.append(event.token)
        elif isinstance(event, Finished | Failed):
            self.last = event
            self._done.set()

    def judge(self, built: Built) -> str:
        """One word; "invalid" and "failed" come with the details on the error stream."""
        assert self._done.wait(600), "no end after 600 s"
        if isinstance(self.last, Failed):
            print(json.dumps(self.schema), self.last.error, file=sys.stderr)
            return "failed"
        assert self.last is not None
        if self.last.reason is not FinishReason.STOP:
            return "cut"
        text = built.model.tokenizer.decode(self.tokens)
        try:
            jsonschema.validate(json.loads(text), self.schema, jsonschema.Draft202012Validator)
        except (ValueError, jsonschema.ValidationError) as error:
            print(json.dumps(self.schema), repr(text), error, file=sys.stderr)
            return "invalid"
        return "valid"


def ask(built: Built, text: ModelText, schema: dict[str, Any], seed: int) -> Answer:
    """Raises BadRequest where the schema is refused."""
    rules = text.compile(whole(ThinkingFrame.NONE, in_library_form(Grammar.of_schema(schema, "schema"))), "schema")
    answer = Answer(schema)
    built.entry.submit(
        Request(
            f"{seed}",
            Prompt(tuple(text.encode("Write JSON.", True).tokens)),
            Sampling(temperature=1.0, seed=seed),
            LONGEST,
            text.stop_tokens,
            answer.take,
            rules=rules,
        )
    )
    return answer


def run(built: Built, schemas: int, seed: int, together: int) -> Counter[str]:
    text = ModelText(built.model.tokenizer, built.model.template)
    rng = random.Random(seed)
    told = Counter[str]()
    under_way: list[Answer] = []
    for number in range(schemas):
        try:
            under_way.append(ask(built, text, random_object(rng), seed + number))
        except BadRequest as error:
            print(error, file=sys.stderr)
            told["refused"] += 1
        if len(under_way) == together:
            told[under_way.pop(0).judge(built)] += 1
    return told + Counter(answer.judge(built) for answer in under_way)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--together", type=int, default=4)
    parser.add_argument("--draft", default="lookup")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_synthetic(Path(folder) / "tiny.gguf", "tiny")
        built = build_engine(Config(model=model, threads=1, context=2048, sequences=given.together, draft=given.draft))
        try:
            told = run(built, given.schemas, given.seed, given.together)
        finally:
            built.stop()
    print(json.dumps({"schemas": given.schemas, "seed": given.seed, **told}))
    bad = told["invalid"] + told["failed"]
    return int(bad > 0 or told["cut"] + told["refused"] > given.schemas / 20)


if __name__ == "__main__":
    sys.exit(main())

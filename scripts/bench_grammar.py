"""What a grammar costs on the host: the table of a vocabulary, compiling, and every token's mask.

    python scripts/bench_grammar.py [--tokens 248320] [--answers 20]

The vocabulary is the embedded model's, filled up with pairs of its tokens. Answers are walked by drawing any token that
the mask allows: the time of a token is that of accepting it and of making the mask after it; beside it stands the time
to mask one row of logits on the CPU. Both are processor time: medians, and for tokens the 99th percentile too.
Compiling is wall time and includes the process that reads a grammar first. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from rekindle.build import embedded_model, open_model
from rekindle.grammar import Grammar
from rekindle.grammar.calls import CallableTool, CallFormat, calls_only
from rekindle.grammar.compiler import Compiler, Vocabulary
from rekindle.grammar.frame import ThinkingFrame, in_library_form, whole
from rekindle.grammar.guide import Guide, Rules
from rekindle.kernels.sampling import keep_allowed

LONGEST = 200  # tokens of an answer
ORDER = {
    "type": "object",
    "properties": {
        "customer": {"type": "string"},
        "paid": {"type": "boolean"},
        "lines": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "article": {"type": "string"},
                    "count": {"type": "integer"},
                    "price": {"type": "number"},
                },
                "required": ["article", "count", "price"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["customer", "paid", "lines"],
    "additionalProperties": False,
}
SOURCES = {
    "schema": whole(ThinkingFrame.NONE, in_library_form(Grammar.of_schema(ORDER, "x"))),
    "any object": whole(ThinkingFrame.NONE, in_library_form(Grammar.of_any_object("x"))),
    "thinking, then the schema": whole(ThinkingFrame.OPEN, in_library_form(Grammar.of_schema(ORDER, "x"))),
    "20 tools": whole(
        ThinkingFrame.NONE,
        calls_only([CallableTool(f"t{n}", ORDER, True, "x") for n in range(20)], CallFormat.XML, True),
    ),
}
T = TypeVar("T")


def vocabulary(size: int) -> Vocabulary:
    tokenizer = open_model(embedded_model()).tokenizer
    special = tokenizer.special_ids | tokenizer.stop_ids
    known = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)][:size]
    plain = [token for id, token in enumerate(known) if id not in special and token]
    rng, seen = random.Random(0), set(known)
    while len(known) < size:
        pair = rng.choice(plain) + rng.choice(plain)
        if pair not in seen:
            seen.add(pair)
            known.append(pair)
    stops = sorted(id for id in tokenizer.stop_ids if id < size)

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode_markup(text)
        return ids if max(ids, default=0) < size else []  # a smaller vocabulary writes some texts byte by byte

    return Vocabulary(known, sorted(id for id in special if id < size), stops, encode)


def timed(call: Callable[[], T], clock: Callable[[], float] = time.thread_time) -> tuple[T, float]:
    began = clock()
    found = call()
    return found, clock() - began


def walk(rules: Rules, stops: frozenset[int], rng: np.random.Generator) -> list[float]:
    """Seconds per token of one answer."""
    way, seconds = timed(lambda: rules.begin(stops))
    spent = [seconds]
    while len(spent) < LONGEST and way.stuck is None:
        token = int(rng.choice(np.flatnonzero(np.unpackbits(way.mask.view(np.uint8), bitorder="little"))))
        if token in stops:
            break
        spent.append(timed(lambda: (way.accept(token), way.mask))[1])  # noqa: B023
    return spent


def masking(way: Guide, size: int) -> float:
    logits, masks = torch.randn(1, size), torch.from_numpy(way.mask[None])
    return statistics.median(timed(lambda: keep_allowed(logits, masks, [0]))[1] for _ in range(50))


def measure(compiler: Compiler, source: str, stops: frozenset[int], answers: int, size: int) -> dict[str, Any]:
    rules, first = timed(lambda: compiler.compile(source, "x"), time.perf_counter)
    again = statistics.median(timed(lambda: compiler.compile(source, "x"), time.perf_counter)[1] for _ in range(9))
    rng = np.random.default_rng(0)
    spent = sorted(seconds for _ in range(answers) for seconds in walk(rules, stops, rng))
    return {
        "compile_ms": round(1e3 * again, 2),
        "first_compile_ms": round(1e3 * first, 2),
        "token_us": round(1e6 * spent[len(spent) // 2], 1),
        "token_us_p99": round(1e6 * spent[int(len(spent) * 0.99)], 1),
        "row_us": round(1e6 * masking(rules.begin(stops), size), 1),
        "tokens": len(spent),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=248_320)
    parser.add_argument("--answers", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = vocabulary(given.tokens)
    compiler = Compiler(lambda: found)
    _, seconds = timed(lambda: compiler.compile(SOURCES["any object"], "x"), time.perf_counter)
    told: dict[str, Any] = {"vocabulary": given.tokens, "table_s": round(seconds, 2)}
    for name, source in SOURCES.items():
        told[name] = measure(compiler, source, frozenset(found.stops), given.answers, given.tokens)
        print(f"{name}: {told[name]}", flush=True)
    print(json.dumps(told))


if __name__ == "__main__":
    main()

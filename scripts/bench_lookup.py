"""Decode speed of a conversation that edits a file, with prompt lookup beside the speed without it.

    python scripts/bench_lookup.py [MODEL] [--answer 320] [--rounds 3] [--threads N]

One engine answers the same two requests in turn without and with drafts, greedily: the model is given a file and asked
to write it again with a change, then to change it once more. The tokens must be the same. What counts is the median,
over the rounds, of the ratio of both decode speeds. The last line is JSON; the exit status is 1 below the goal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from rekindle.build import Built, build_engine
from rekindle.build.drafts import drafts_of
from rekindle.config import Config
from rekindle.engine.drafting import Drafts
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling, Token
from rekindle.prompt import Prompt

GOAL = 1.5
FILE = '''\
class Account:
    """Money of one customer."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        self.history.append(("withdraw", amount))

    def transfer(self, other, amount):
        self.withdraw(amount)
        other.deposit(amount)
'''
EDITS = (
    f"Here is the file account.py:\n\n```python\n{FILE}```\n\n"
    "Write the whole file again. Only change the name of the class to BankAccount.",
    'Write the whole file again. Only change the message "not enough money" to "balance too low".',
)


def ask(built: Built, prompt: Prompt, answer: int) -> tuple[list[int], Finished]:
    """Greedily."""
    events: list[Event] = []
    done = threading.Event()

    def take(event: Event) -> None:
        events.append(event)
        if isinstance(event, Finished | Failed):
            done.set()

    stops = built.model.tokenizer.stop_ids
    built.engine.submit(Request("bench", prompt, Sampling(temperature=0), answer, stops, take))
    done.wait()
    last = events[-1]
    assert isinstance(last, Finished), last
    return [event.token for event in events if isinstance(event, Token)], last


def converse(built: Built, drafts: Drafts, answer: int) -> tuple[list[list[int]], list[Finished]]:
    """The answers' tokens, and how they came about."""
    engine, template = built.engine, built.model.template
    assert template is not None, "the model has no chat template"
    engine.settings = replace(engine.settings, drafts=drafts)
    messages: list[dict[str, Any]] = []
    answers, ends = list[list[int]](), list[Finished]()
    for edit in EDITS:
        messages.append({"role": "user", "content": edit})
        tokens, finished = ask(built, template.render(messages), answer)
        messages.append({"role": "assistant", "content": built.model.tokenizer.decode(tokens)})
        answers.append(tokens)
        ends.append(finished)
    return answers, ends


def speed(ends: list[Finished]) -> float:
    """Tokens per second after the first of each answer."""
    return sum(end.completion_tokens - 1 for end in ends) / sum(end.timings.decode for end in ends)


def measure(built: Built, answer: int, rounds: int) -> dict[str, Any]:
    lookup, plain = drafts_of(Config(draft="lookup"), ["cpu"], None), Drafts(off="to compare")
    converse(built, plain, 8)  # the first steps of a process are slower
    ratios, speeds = list[float](), list[tuple[float, float]]()
    for _ in range(rounds):
        expected, without = converse(built, plain, answer)
        found, ends = converse(built, lookup, answer)
        assert found == expected, "drafts changed the answer"
        speeds.append((speed(without), speed(ends)))
        ratios.append(speeds[-1][1] / speeds[-1][0])
    drafts = [end.draft for end in ends]
    blocks = sum(draft.blocks for draft in drafts)
    return {
        "ratio": round(statistics.median(ratios), 2),
        "plain": [round(one, 1) for one, _ in speeds],
        "lookup": [round(one, 1) for _, one in speeds],
        "tokens": sum(map(len, found)),
        "blocks": blocks,
        "proposed": sum(draft.proposed for draft in drafts),
        "accepted": sum(draft.accepted for draft in drafts),
        "goal": GOAL,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--answer", type=int, default=320, help="tokens of an answer, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    built = build_engine(
        Config(model=options.model, threads=options.threads, devices=("cpu",), context=4096, sequences=2)
    )
    told = measure(built, options.answer, options.rounds)
    built.stop()
    print(json.dumps(told))
    return int(told["ratio"] < GOAL)


if __name__ == "__main__":
    sys.exit(main())

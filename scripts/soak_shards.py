"""Kill the shard of a split server at random moments, under load, and see that every request ends well.

    scripts/soak_shards.py MODEL [--kills 50] [--seed 0]

One stage runs here, one in a shard that is started again after every kill. Several clients ask for growing prompts all
the while. Every request must end in time, in the answer of an undisturbed server or in an error that names the stage;
when all is quiet no slot and no page may be held. Ends in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from rekindle.build import Built, build_engine
from rekindle.config import Config, parse_shards
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling, Token
from rekindle.errors import StageLost
from rekindle.prompt import Boundary, BoundaryKind, Prompt

CLIENTS = 3
TALKS = 6
LENGTHS = (90, 150, 230)  # tokens of a talk's prompts, each a prefix of the next
ANSWER = 8  # tokens
CACHE = 6 << 20  # bytes, a few snapshots: some prompts are restored, others are run
PATIENCE = 120.0  # seconds that a request may take, with a shard starting again in them


@dataclass
class Tally:
    kills: int = 0
    answers: int = 0
    wrong: int = 0
    errors: int = 0  # clear ones
    unclear: int = 0
    hung: int = 0
    restored: int = 0  # answers that began with a hit
    leaked_pages: int = 0
    leaked_slots: int = 0
    waits: list[float] = field(default_factory=list)  # seconds from a kill to the next answer


def build(model: Path, split: bool, cache: int = CACHE) -> Built:
    shards = parse_shards([f"lab={sys.executable} -m rekindle.cli shard {model}"] if split else [], [], [])
    devices = ("cpu", "cpu@lab") if split else ("cpu",)
    sizes = dict(context=512, sequences=4, grid=64, threads=1)
    return build_engine(Config(model=model, devices=devices, cache_ram=cache, shards=shards, **sizes))


def prompt(talk: int, length: int) -> Prompt:
    tokens = np.random.default_rng(talk).integers(0, 2000, max(LENGTHS)).tolist()
    return Prompt(tuple(tokens[:length]), (Boundary(60, BoundaryKind.SYSTEM),))


class Asked:
    """One request and what became of it."""

    def __init__(self, built: Built, talk: int, length: int) -> None:
        self.events: list[Event] = []
        self._done = threading.Event()
        sampling = Sampling(temperature=0)
        built.engine.submit(Request(f"{id(self)}", prompt(talk, length), sampling, ANSWER, frozenset(), self._take))

    def _take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Finished | Failed):
            self._done.set()

    def wait(self) -> Finished | Failed | None:
        if not self._done.wait(PATIENCE):
            return None
        last = self.events[-1]
        assert isinstance(last, Finished | Failed)
        return last

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if isinstance(event, Token)]


class Client(threading.Thread):
    """Asks, and judges the answers, until told to stop."""

    def __init__(
        self, built: Built, known: dict[tuple[int, int], list[int]], seed: float, enough: threading.Event
    ) -> None:
        super().__init__(daemon=True)
        self.tally = Tally()
        self.answered_at = 0.0
        self._built, self._known, self._rng, self._enough = built, known, random.Random(seed), enough

    def run(self) -> None:
        while not self._enough.is_set():
            talk = self._rng.randrange(TALKS)
            for length in LENGTHS:
                asked = Asked(self._built, talk, length)
                self._judge(asked, asked.wait(), self._known[talk, length])

    def _judge(self, asked: Asked, end: Finished | Failed | None, expected: list[int]) -> None:
        if end is None:
            self.tally.hung += 1
        elif isinstance(end, Failed):
            clear = isinstance(end.error, StageLost) and "span" in str(end.error)
            self.tally.errors += clear
            self.tally.unclear += not clear
        else:
            self.answered_at = time.monotonic()
            self.tally.answers += 1
            self.tally.wrong += asked.tokens != expected
            self.tally.restored += end.cache.restored > 0


def reference(model: Path) -> dict[tuple[int, int], list[int]]:
    built = build(model, split=False)
    known = {}
    for talk in range(TALKS):
        for length in LENGTHS:
            asked = Asked(built, talk, length)
            assert isinstance(asked.wait(), Finished)
            known[talk, length] = asked.tokens
    built.stop()
    return known


def soak(model: Path, kills: int, seed: int) -> Tally:
    rng = random.Random(seed)
    known = reference(model)
    built = build(model, split=True)
    assert built.hosts is not None
    enough = threading.Event()
    clients = [Client(built, known, rng.random(), enough) for _ in range(CLIENTS)]
    tally = Tally()
    for client in clients:
        client.start()
    for _ in range(kills):
        time.sleep(rng.uniform(0.0, 1.0))
        killed_at = time.monotonic()
        os.kill(built.hosts.pid("lab"), signal.SIGKILL)
        tally.kills += 1
        while not any(client.answered_at > killed_at + 0.2 for client in clients):  # it is back, and answers
            time.sleep(0.05)
            if time.monotonic() > killed_at + PATIENCE:
                break
        tally.waits.append(round(time.monotonic() - killed_at, 2))
    enough.set()
    for client in clients:
        client.join()
        for name, value in asdict(client.tally).items():
            setattr(tally, name, getattr(tally, name) + value)
    status = built.engine.status()
    tally.leaked_slots = status.running + status.waiting
    built.stop()  # which gives up the slots that are kept
    tally.leaked_pages = sum(stage.pages().used for stage in built.engine.pipeline.stages)
    return tally


def is_bad(tally: Tally) -> bool:
    return any((tally.wrong, tally.unclear, tally.hung, tally.leaked_pages, tally.leaked_slots))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tally = soak(options.model, options.kills, options.seed)
    print(json.dumps(asdict(tally)))
    sys.exit(is_bad(tally))


if __name__ == "__main__":
    main()

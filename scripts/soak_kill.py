"""Kill a serving process at random moments, under load, and see that no answer and no stored snapshot is ever wrong.

    scripts/soak_kill.py MODEL [--kills 200] [--seed 0] [--patience 2]

A reference server without a cache answers every prompt first. Then a server with a cache folder is loaded with
growing conversations by several clients at once and killed (SIGKILL) a random time after a random number of answers; it
starts again on the same folder, and so on. Every answer that arrived whole must be the reference's; after every kill
`rekindle cache verify` must find every visible snapshot intact. Every tenth kill is told on stderr; the last line is
JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rekindle.bench.conversations import prose
from rekindle.bench.replay import OwnServer, ReplayFailed
from rekindle.snapshots.tools import verify_snapshots

CLIENTS = 3
TURNS = 4
ANSWER = 6  # tokens
MOST_ANSWERS_FIRST = 4  # a slow machine gives some, too, before its server is killed
SERVE = ("--context", "2048", "--sequences", "4", "--threads", "1", "--cache-ram", "4MiB")


@dataclass
class Tally:
    kills: int = 0
    answers: int = 0
    wrong: int = 0
    cut_off: int = 0  # answers that the kill prevented
    restored_from_disk: int = 0  # answers
    unreadable: int = 0  # snapshots

    def add(self, other: Tally) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


Conversation = list[tuple[list[dict[str, Any]], list[int]]]  # each request with the right answer's tokens


def conversations(server: OwnServer, count: int) -> list[Conversation]:
    """Growing conversations under one system prompt, and what a server that never stops answers."""
    made = []
    for number in range(count):
        messages: list[dict[str, Any]] = [{"role": "system", "content": prose(60, "system")}]
        conversation: Conversation = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": prose(30, f"{number} {turn}")})
            reply = server.ask(messages, ANSWER)
            conversation.append((list(messages), reply.answer))
            messages.append(reply.message if reply.message["content"] else reply.message | {"content": "."})
        made.append(conversation)
    return made


class Client(threading.Thread):
    """Walks through conversations until the server is gone."""

    def __init__(
        self, server: OwnServer, known: list[Conversation], answered: threading.Semaphore, rng: random.Random
    ) -> None:
        super().__init__(daemon=True)
        self.tally = Tally()
        self._answered = answered
        self._server = server
        self._known = known
        self._rng = rng

    def run(self) -> None:
        with contextlib.suppress(ReplayFailed):
            while True:
                for messages, expected in self._rng.choice(self._known):
                    self.tally.cut_off += 1
                    reply = self._server.ask(messages, ANSWER)
                    self.tally.cut_off -= 1
                    self.tally.answers += 1
                    self._answered.release()
                    self.tally.wrong += reply.answer != expected
                    self.tally.restored_from_disk += reply.restored["disk"] > 0


def soak(model: Path, kills: int, seed: int, patience: float) -> Tally:
    rng = random.Random(seed)
    tally = Tally()
    reference = OwnServer([str(model), *SERVE, "--cache-ram", "0", "--no-cache-dir"])
    known = conversations(reference, CLIENTS + 2)
    reference.stop()
    with tempfile.TemporaryDirectory(prefix="rekindle-soak-") as folder:
        for _ in range(kills):
            server = OwnServer([str(model), *SERVE, "--cache-dir", folder])
            answered = threading.Semaphore(0)
            clients = [Client(server, known, answered, random.Random(rng.random())) for _ in range(CLIENTS)]
            for client in clients:
                client.start()
            for _ in range(rng.randrange(MOST_ANSWERS_FIRST + 1)):
                answered.acquire(timeout=60)
            time.sleep(rng.uniform(0.05, patience))
            server.kill()
            for client in clients:
                client.join()
                tally.add(client.tally)
            tally.kills += 1
            tally.unreadable += sum(finding.fault is not None for finding in verify_snapshots(Path(folder)))
            if tally.kills % 10 == 0:
                print(json.dumps(asdict(tally)), file=sys.stderr, flush=True)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=2.0, help="most seconds between those answers and the kill")
    options = parser.parse_args()
    tally = soak(options.model, options.kills, options.seed, options.patience)
    print(json.dumps(asdict(tally)))
    sys.exit(tally.wrong > 0 or tally.unreadable > 0)


if __name__ == "__main__":
    main()

"""What a cold prompt pays for the snapshots inside it.

    python scripts/bench_lattice.py [MODEL] [--prompt 4096] [--rounds 7] [--threads N]

One engine computes random prompts without any boundary, in turn without and with points of the lattice. What counts is
the median, over the rounds, of the ratio of both times: seconds, and processor seconds where the machine is busy with
other work too. The last line is JSON; the exit status is 1 above the goal.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from rekindle.build import Built, build_engine
from rekindle.config import Config
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling
from rekindle.prefix.lattice import MOST
from rekindle.prompt import Prompt

GOAL = 1.03


class Cost(NamedTuple):
    seconds: float  # until the prompt is computed and its snapshots are published
    processor: float  # seconds of all threads


def cold(built: Built, tokens: int, points: int) -> Cost:
    """A prompt that nothing has seen, with so many even points at most."""
    prefixes, engine = built.engine.prefixes, built.engine
    prefixes.points = points
    drawn = tuple(random.randrange(built.model.spec.drawable) for _ in range(tokens))
    done, events = threading.Event(), list[Event]()

    def take(event: Event) -> None:
        events.append(event)
        if isinstance(event, Finished | Failed):
            done.set()

    began, worked = time.perf_counter(), time.process_time()
    engine.submit(Request("bench", Prompt(drawn), Sampling(temperature=0), 0, frozenset(), take))
    done.wait()
    while prefixes.known_length(drawn) < tokens:
        time.sleep(0.0005)
    cost = Cost(time.perf_counter() - began, time.process_time() - worked)
    assert isinstance(events[-1], Finished) and events[-1].cache.computed == tokens, events[-1]
    return cost


def measure(built: Built, tokens: int, rounds: int) -> dict[str, Any]:
    cold(built, tokens, MOST)  # the first steps of a process are slower
    pairs = [(cold(built, tokens, 0), cold(built, tokens, MOST)) for _ in range(rounds)]
    entries = len(built.engine.prefixes.entries())
    return {
        "ratio": round(statistics.median(with_points.seconds / plain.seconds for plain, with_points in pairs), 4),
        "cpu_ratio": round(
            statistics.median(with_points.processor / plain.processor for plain, with_points in pairs), 4
        ),
        "plain": [round(plain.seconds, 3) for plain, _ in pairs],
        "lattice": [round(with_points.seconds, 3) for _, with_points in pairs],
        "prompt": tokens,
        "points": (entries - 2 * rounds - 1) / (rounds + 1),
        "state_bytes": built.plan.snapshot_bytes.state,
        "goal": GOAL,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    context = options.prompt + 64
    built = build_engine(Config(model=options.model, threads=options.threads, context=context, sequences=1))
    told = measure(built, options.prompt, options.rounds)
    built.stop()
    print(json.dumps(told))
    return int(min(told["ratio"], told["cpu_ratio"]) > GOAL)


if __name__ == "__main__":
    sys.exit(main())

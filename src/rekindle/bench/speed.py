"""Prefill and decode speed of a built engine, through the same door that clients use."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from rekindle.build import Built
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling, Token
from rekindle.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Speed:
    """One row of the table: so many sequences at once, each with a prompt and an answer of this length."""

    prompt: int
    answer: int
    sequences: int
    prefill: float  # prompt tokens per second, all sequences together
    decode: float  # answer tokens per second, all sequences together


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    device: str
    rows: tuple[Speed, ...]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class _Clock:
    """When the first and the last token of one answer came."""

    def __init__(self) -> None:
        self.first = self.last = 0.0
        self.error: Exception | None = None
        self.done = threading.Event()

    def take(self, event: Event) -> None:
        now = time.perf_counter()
        if isinstance(event, Token):
            self.first = self.first or now
            self.last = now
        elif isinstance(event, Failed):
            self.error = event.error
            self.done.set()
        elif isinstance(event, Finished):
            self.done.set()


def run_bench(built: Built, shapes: Sequence[tuple[int, int, int]], repeats: int = 3) -> Report:
    """The best of `repeats` runs per (prompt, answer, sequences): what the machine can do when nothing else runs."""
    rng = np.random.default_rng(0)
    measure(built, rng, 16, 4, 1)
    rows = []
    for prompt, answer, sequences in shapes:
        runs = [measure(built, rng, prompt, answer, sequences) for _ in range(repeats)]
        best = (max(run.prefill for run in runs), max(run.decode for run in runs))
        rows.append(Speed(prompt, answer, sequences, *best))
    return Report(built.model.name, ", ".join(stage.device.name for stage in built.plan.stages), tuple(rows))


def measure(built: Built, rng: np.random.Generator, prompt: int, answer: int, sequences: int) -> Speed:
    """Prompts are fresh random tokens, so nothing is restored and every token is computed."""
    clocks = [_Clock() for _ in range(sequences)]
    started = time.perf_counter()
    for index, clock in enumerate(clocks):
        tokens = tuple(rng.integers(0, built.model.spec.vocab, prompt).tolist())
        built.engine.submit(
            Request(
                f"bench-{started}-{index}",
                Prompt(tokens),
                Sampling(temperature=0),
                max_tokens=answer,
                stop_tokens=frozenset(),
                sink=clock.take,
            )
        )
    for clock in clocks:
        clock.done.wait()
        if clock.error is not None:
            raise clock.error
    filled = max(clock.first for clock in clocks)
    last = max(clock.last for clock in clocks)
    decoded = sequences * (answer - 1)
    return Speed(
        prompt,
        answer,
        sequences,
        prefill=sequences * prompt / (filled - started),
        decode=decoded / (last - filled) if decoded and last > filled else 0.0,
    )

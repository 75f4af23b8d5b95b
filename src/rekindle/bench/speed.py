"""Prefill and decode speed of a built engine, through the `submit` that clients use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from rekindle.bench.traffic import bytes_per_token
from rekindle.build import Built
from rekindle.build.sizes import cpu_expands
from rekindle.engine.engine import Engine
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling, Token
from rekindle.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Speed:
    """One row of the table: so many sequences at once, each with a prompt and an answer of this length."""

    prompt: int
    answer: int
    sequences: int
    prefill: float  # prompt tokens per second, all sequences together
    decode: float  # answer tokens per second, all sequences together, while all of them decode
    traffic: float  # bytes that one answer token moves through memory

    def share(self, copy: float) -> float:
        """Of the speed that memory would allow, at so many bytes per second."""
        return self.decode * self.traffic / copy


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    device: str
    rows: tuple[Speed, ...]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Clock:
    """When each token of one answer came."""

    def __init__(self) -> None:
        self.times = list[float]()
        self.error: Exception | None = None
        self.done = threading.Event()

    def take(self, event: Event) -> None:
        if isinstance(event, Token):
            self.times.append(time.perf_counter())
        elif isinstance(event, Failed):
            self.error = event.error
            self.done.set()
        elif isinstance(event, Finished):
            self.done.set()


def run_bench(
    built: Built,
    shapes: Sequence[tuple[int, int, int]],
    repeats: int = 3,
    on_run: Callable[[str], None] = lambda what: None,
) -> Report:
    """The best of `repeats` runs per (prompt, answer, sequences): what the machine can do when nothing else runs.
    on_run: told of each before it begins."""
    rng, vocab = np.random.default_rng(0), built.model.spec.drawable
    measure(built.engine, vocab, rng, 16, 4, 1)
    rows = []
    for prompt, answer, sequences in shapes:
        runs = list[tuple[float, float]]()
        for run in range(1, repeats + 1):
            on_run(f"{sequences} × {prompt:,} + {answer:,} tokens, run {run} of {repeats}")
            runs.append(measure(built.engine, vocab, rng, prompt, answer, sequences))
        prefill, decode = (max(speeds) for speeds in zip(*runs, strict=True))
        traffic = _traffic(built, prompt + answer // 2, sequences)
        rows.append(Speed(prompt, answer, sequences, prefill, decode, traffic))
    return Report(built.model.name, ", ".join(stage.device.name for stage in built.plan.stages), tuple(rows))


def _traffic(built: Built, context: int, sequences: int) -> float:
    expanded = cpu_expands() and all(stage.device.name == "cpu" for stage in built.plan.stages)
    return bytes_per_token(built.model.file, expanded, built.plan.wishes.kv_type, context, sequences)


def measure(
    engine: Engine, vocab: int, rng: np.random.Generator, prompt: int, answer: int, sequences: int
) -> tuple[float, float]:
    """Prefill and decode in tokens per second, all sequences together. Prompts are fresh random tokens, so nothing is
    restored and every token is computed."""
    clocks = [Clock() for _ in range(sequences)]
    started = time.perf_counter()
    for index, clock in enumerate(clocks):
        tokens = tuple(rng.integers(0, vocab, prompt).tolist())
        engine.submit(
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
    filled = max(clock.times[0] for clock in clocks)
    return sequences * prompt / (filled - started), decode_speed([clock.times for clock in clocks])


def decode_speed(times: Sequence[Sequence[float]]) -> float:
    """Tokens per second while every sequence decodes: from the last one's first token to the first one's last."""
    begin, end = max(own[0] for own in times), min(own[-1] for own in times)
    if end <= begin:
        return 0.0
    return sum(begin < time <= end for own in times for time in own) / (end - begin)

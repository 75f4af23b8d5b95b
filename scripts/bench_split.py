"""What overlap is worth: two equal CPU stages in two processes, one core each, against the same two in turns.

    python scripts/bench_split.py [--prompt 4096] [--answer 48] [--repeats 3]

Stage one runs here, stage two in a shard; each process is pinned to a core of its own and uses one thread. Both ways
run in the same process on the same stages: with overlap, and with one batch at a time in the whole pipeline. The model
is random; how long its layers take is all that matters. It has many small experts, as the models have for which a split
is worth most: a decode step then costs by the row. Where it costs the same for two rows as for four (one dense matrix
that is read either way), sharing rows among the stages cannot gain anything. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, here and in the shard

import numpy as np
import torch

from rekindle.batch import Batch, Segment
from rekindle.bench.synth import SHAPES, Shape, _gated, _hybrid, write_synthetic
from rekindle.build import open_model
from rekindle.build.shards import Shards
from rekindle.build.stage import StageConfig, load_stage
from rekindle.config import Config, parse_shards
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling, Token
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import Prompt
from rekindle.spec import DeltaSpec, FfnSpec, Span
from rekindle.stages import Pipeline
from rekindle.stages.types import Stage

SHAPE = Shape(
    _hybrid("split", 8, 512, 512, _gated(8, 2, 64, 16), DeltaSpec(4, 8, 64, 64, 4), FfnSpec(0, 128, 8, 256, 256)),
    sections=(3, 3, 2, 0),
    first_special=500,
    first_thinking=503,
)
GRID = 256
GOALS = {"prefill": 1.7, "decode": 1.5}
SEQUENCES = 4
STEPS = 25


class InTurns(Pipeline):
    """The same stages, with one batch at a time on its way through them."""

    @property
    def depth(self) -> int:
        return 1

    def stop(self) -> None:
        """The stages are used again; only the lines end."""
        for line in self._lines:
            line.stop()


class Overlapping(Pipeline):
    def stop(self) -> None:
        for line in self._lines:
            line.stop()


@dataclass(frozen=True)
class Speeds:
    prefill: float  # tokens per second of one long prompt
    decode: float  # tokens per second of SEQUENCES answers together


class Clock:
    """When the tokens of one answer came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._done = threading.Event()
        self._error: Exception | None = None

    def take(self, event: Event) -> None:
        if isinstance(event, Token):
            self.times.append(time.perf_counter())
        elif isinstance(event, Failed):
            self._error = event.error
            self._done.set()
        elif isinstance(event, Finished):
            self._done.set()

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


def ask(engine: Engine, rng: np.random.Generator, length: int, answer: int) -> Clock:
    clock = Clock()
    prompt = Prompt(tuple(rng.integers(0, 256, length).tolist()))
    engine.submit(Request(str(id(clock)), prompt, Sampling(temperature=0), answer, frozenset(), clock.take))
    return clock


def measure(pipeline: Pipeline, prompt: int, answer: int, seed: int) -> Speeds:
    """Nothing is cached: every prompt is new and no snapshot is kept."""
    rng = np.random.default_rng(seed)
    engine = Engine(
        pipeline, PrefixCache(local_tiers(0)), EngineSettings(context=prompt + answer + GRID, grid=GRID)
    ).start()
    ask(engine, rng, GRID, 2).wait()
    begin = time.perf_counter()
    clock = ask(engine, rng, prompt, 1)
    clock.wait()
    prefill = prompt / (clock.times[0] - begin)
    clocks = [ask(engine, rng, GRID // 4, answer) for _ in range(SEQUENCES)]
    for each in clocks:
        each.wait()
    engine.stop()
    begin = max(each.times[0] for each in clocks)  # all of them decode from here …
    end = min(each.times[-1] for each in clocks)  # … to here
    tokens = sum(begin < t <= end for each in clocks for t in each.times)
    return Speeds(prefill, tokens / (end - begin))


def chunk_times(stages: list[Stage]) -> dict[str, float]:
    """What each stage takes for one chunk alone, so that a reader sees whether they are equal."""
    batch = Batch((Segment(0, 0, tuple(range(GRID))),))
    cost: dict[str, float] = {}
    hidden: torch.Tensor | None = None
    for index, each in enumerate(stages):
        each.open(0)
        begin = time.perf_counter()
        hidden = each.forward(batch, hidden).hidden
        cost[f"stage{index}_ms"] = round((time.perf_counter() - begin) * 1e3, 1)
        each.close(0)
    return cost


def step_times(stage: Stage) -> dict[str, float]:
    """What a decode step of the first stage takes, alone; the gain cannot be more than their ratio."""
    medians: dict[int, float] = {}
    for rows in (SEQUENCES // 2, SEQUENCES):
        rng, times = np.random.default_rng(rows), []
        for slot in range(rows):
            stage.open(slot)
        for position in range(STEPS):
            tokens = rng.integers(0, 256, rows).tolist()
            batch = Batch(tuple(Segment(slot, position, (token,)) for slot, token in enumerate(tokens)))
            begin = time.perf_counter()
            stage.forward(batch, None)
            times.append(time.perf_counter() - begin)
        for slot in range(rows):
            stage.close(slot)
        medians[rows] = statistics.median(times)
    half, whole = medians.values()
    named = {f"rows{rows}_ms": round(seconds * 1e3, 1) for rows, seconds in medians.items()}
    return named | {"decode_bound": round(whole / half, 2)}


def run(wishes: argparse.Namespace, folder: Path) -> dict[str, object]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("two stages at once need two cores")
    torch.set_num_threads(1)
    SHAPES["split"] = SHAPE
    path = write_synthetic(folder / "model.gguf", "split")
    model = open_model(path)
    layers, half = model.spec.layers, model.spec.layers // 2
    pages = -(-(wishes.prompt + wishes.answer + GRID) // 64) + 64
    orders = [StageConfig("cpu", span, 8, pages) for span in (Span(0, half), Span(half, layers))]
    command = f"taskset -c {cores[1]} {sys.executable} -m rekindle.cli shard {path}"
    shards = Shards(Config(model=path, threads=1, shards=parse_shards([f"b={command}"], [], [])))
    try:
        shards.start(["cpu", "cpu@b"], orders)
        os.sched_setaffinity(0, {cores[0]})
        stages: list[Stage] = [
            load_stage(model.file, orders[0]),
            shards.connect("cpu@b", orders[1], model.file.fingerprint()),
        ]
        return compare(wishes, stages)
    finally:
        shards.stop()


def compare(wishes: argparse.Namespace, stages: list[Stage]) -> dict[str, object]:
    chunk_times(stages)
    result: dict[str, object] = {**chunk_times(stages), **step_times(stages[0])}
    both: dict[str, list[Speeds]] = {"overlap": [], "in turns": []}
    for repeat in range(wishes.repeats):  # alternating, so that a busy minute hits both
        both["in turns"].append(measure(InTurns(stages), wishes.prompt, wishes.answer, repeat))
        both["overlap"].append(measure(Overlapping(stages), wishes.prompt, wishes.answer, repeat))
    for what, goal in GOALS.items():
        best = {name: max(getattr(speeds, what) for speeds in runs) for name, runs in both.items()}
        gain = best["overlap"] / best["in turns"]
        print(f"{what}: {best['in turns']:.0f} tokens/s in turns, {best['overlap']:.0f} overlapping: x{gain:.2f}")
        result |= {f"{what}_in_turns": round(best["in turns"], 1), f"{what}_overlap": round(best["overlap"], 1)}
        result |= {f"{what}_gain": round(gain, 2), f"{what}_goal": goal}
    stages[1].stop()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--answer", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    with tempfile.TemporaryDirectory() as folder:
        result = run(parser.parse_args(), Path(folder))
    print(json.dumps(result))


if __name__ == "__main__":
    main()

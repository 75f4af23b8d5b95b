"""Rekindle beside llama.cpp (the `xllamacpp` package) on this machine's CPU: the same files, the same work, in one run.

    .venv/bin/pip install --no-deps xllamacpp==2026.10.11549
    .venv/bin/python scripts/bench_peers.py [--model FILE …] [--shape NAME …] [--threads N] [--cpu-time]

Without --model and --shape: the embedded model, a dense hybrid of 1 B and a MoE hybrid of 2 B (written to --folder),
and the files named with --also. Each side is a process of its own on the same cores; they take turns, round by round,
with fresh random prompts. While one answers the other waits for a line; what it burns of a core meanwhile is in the
JSON as `awake`. One table has the medians and the share of the memory bandwidth: bytes a token moves · decode ÷ the
speed of copies in the same run. A speed is work divided by the time of whole calls: prefill is
PROMPT / t(PROMPT tokens, one answered), decode is ANSWER / (t(16 tokens, ANSWER + 1 answered) - t(16, 1)).
llama.cpp's threads spin while they wait for one another, so that beside other work its wall-clock speeds collapse:
--cpu-time divides by CPU seconds instead, with one thread each. Where xllamacpp is not installed Rekindle runs alone.
One line of JSON per model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.bench.speed import measure
from rekindle.bench.synth import write_synthetic
from rekindle.bench.traffic import bytes_per_token
from rekindle.build import build_engine, embedded_model, set_threads
from rekindle.build.probe import probe_device
from rekindle.config import Config
from rekindle.layers import load_span
from rekindle.stages import LocalStage
from rekindle.weights import open_weights

SHORT = 16  # prompt tokens before the answer that is timed
ROWS = 16  # of a block that is verified
SHAPES = ("hybrid-1b", "hybrid-2b-a0.3b")
OURS, THEIRS = "rekindle", "llama.cpp"
COPIED = 1 << 28  # bytes


class Server(Protocol):
    def facts(self) -> dict[str, float]: ...
    def answer(self, prompt: Sequence[int], count: int) -> None: ...


class Ours:
    def __init__(self, model: Path, threads: int, context: int) -> None:
        self.built = build_engine(
            Config(
                model=model, context=context, sequences=1, cache_ram=0, threads=threads, devices=("cpu",), draft="off"
            )
        )

    def facts(self) -> dict[str, float]:
        """Moved: bytes that a token in the middle of an answer of 64 moves through memory."""
        model, kv_type = self.built.model, self.built.plan.wishes.kv_type
        return {"vocab": model.spec.drawable, "moved": bytes_per_token(model.file, False, kv_type, SHORT + 32)}

    def answer(self, prompt: Sequence[int], count: int) -> None:
        rng = np.random.default_rng(int(prompt[0]))
        measure(self.built.engine, self.built.model.spec.drawable, rng, len(prompt), count, 1)


class Theirs:
    """llama.cpp's own server, as a library."""

    def __init__(self, model: Path, threads: int, context: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx, params.n_parallel, params.warmup = context, 1, True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self._server = xllamacpp.Server(params)

    def facts(self) -> dict[str, float]:
        return {}

    def answer(self, prompt: Sequence[int], count: int) -> None:
        body = {"n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        self._server.handle_completions({"prompt": list(prompt), **body})


SIDES: dict[str, Callable[[Path, int, int], Server]] = {OURS: Ours, THEIRS: Theirs}


def serve_side(wishes: argparse.Namespace) -> None:
    """The other end of `Side`: facts, then an answer per line of input; what libraries print goes to stderr."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    clock = time.process_time if wishes.cpu_time else time.perf_counter
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: wishes.threads])
    set_threads(wishes.threads)
    server = SIDES[wishes.side](wishes.model[0], wishes.threads, wishes.context)
    print(json.dumps(server.facts()), file=told, flush=True)
    burnt, slept = time.process_time(), time.perf_counter()
    for line in sys.stdin:
        idle = time.process_time() - burnt, time.perf_counter() - slept
        began = clock()
        server.answer(*json.loads(line))
        print(json.dumps([clock() - began, *idle]), file=told, flush=True)
        burnt, slept = time.process_time(), time.perf_counter()
    told.flush()
    os._exit(0)  # threads of either side may still wait for work


class Side:
    """One of the two, in a process of its own that sleeps between its turns."""

    def __init__(self, name: str, model: Path, wishes: argparse.Namespace) -> None:
        self.name, self._burnt, self._slept = name, 0.0, 0.0
        context = wishes.prompt + wishes.answer + SHORT + 64
        command = [sys.executable, __file__, "--side", name, "--model", str(model), "--context", str(context)]
        command += ["--threads", str(wishes.threads), *(["--cpu-time"] if wishes.cpu_time else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.facts = self._next()

    def _next(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} left with status {self._process.wait()}")
        return json.loads(line)

    def seconds(self, prompt: Sequence[int], count: int) -> float:
        assert self._process.stdin is not None
        print(json.dumps([list(prompt), count]), file=self._process.stdin, flush=True)
        seconds, burnt, slept = self._next()
        self._burnt, self._slept = self._burnt + burnt, self._slept + slept
        return float(seconds)

    @property
    def awake(self) -> float:
        """CPU seconds per second between its answers."""
        return self._burnt / max(self._slept, 1e-9)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass
class Speeds:
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    awake: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Of one model."""

    model: str
    speeds: dict[str, Speeds]
    moved: float  # bytes that a decoded token moves through memory
    copy: float  # bytes a second
    verify: float | None

    @property
    def share(self) -> float:
        """Of the measured memory bandwidth."""
        return statistics.median(self.speeds[OURS].decode) * self.moved / self.copy

    def cells(self) -> list[str]:
        ours, theirs = self.speeds[OURS], self.speeds.get(THEIRS)
        verify = "" if self.verify is None else f"{self.verify:.1f}"
        share = f"{100 * self.share:.0f} % of {self.copy / 1e9:.1f} GB/s"
        prefill = compared(ours.prefill, theirs.prefill if theirs else [])
        decode = compared(ours.decode, theirs.decode if theirs else [])
        return [self.model, *prefill, *decode, verify, f"{self.moved / 1e6:.0f}", share]

    def awake(self) -> str:
        return " / ".join(f"{100 * one.awake:.1f} %" for one in self.speeds.values())

    def as_dict(self) -> dict[str, object]:
        speeds = {name: vars(one) for name, one in self.speeds.items()}
        return {"model": self.model, **speeds, "verify": self.verify, "copy": self.copy, "share": self.share}


def compared(ours: Sequence[float], theirs: Sequence[float]) -> list[str]:
    """Both medians and their ratio."""
    median = statistics.median(ours)
    if not theirs:
        return [f"{median:.1f}", "", ""]
    return [f"{median:.1f}", f"{statistics.median(theirs):.1f}", f"{median / statistics.median(theirs):.2f}"]


def run_round(side: Side, wishes: argparse.Namespace, draw: Callable[[int], list[int]], speeds: Speeds) -> None:
    speeds.prefill.append(wishes.prompt / side.seconds(draw(wishes.prompt), 1))
    whole, start = side.seconds(draw(SHORT), wishes.answer + 1), side.seconds(draw(SHORT), 1)
    speeds.decode.append(wishes.answer / max(whole - start, 1e-9))


def verify_ratio(model: Path, rounds: int, cpu_time: bool) -> float:
    """How many times one row a block of ROWS takes; the best of a few rounds of each."""
    clock = time.process_time if cpu_time else time.perf_counter
    file = open_weights(model)
    stage = LocalStage(load_span(file, file.spec.whole, torch.device("cpu"), torch.float32), 1, 64, "f32")
    stage.open(0)
    best, position = {1: 9e9, ROWS: 9e9}, 0
    for _ in range(3 * rounds):
        for rows in best:
            batch = Batch((Segment(0, position, tuple(range(rows)), Wanted.ALL),), rewindable=True)
            began = clock()
            stage.forward(batch, None)
            best[rows] = min(best[rows], clock() - began)
            position += rows
    return best[ROWS] / best[1]


def compare(model: Path, wishes: argparse.Namespace) -> Outcome:
    sides = [Side(name, model, wishes) for name in ((OURS,) if wishes.alone else (OURS, THEIRS))]
    speeds, rng, facts = {side.name: Speeds() for side in sides}, np.random.default_rng(0), sides[0].facts

    def draw(count: int) -> list[int]:
        return [int(token) for token in rng.integers(0, facts["vocab"], count)]

    for side in sides:
        side.seconds(draw(SHORT), 2)
    for _ in range(wishes.rounds):
        for side in sides:
            run_round(side, wishes, draw, speeds[side.name])
            time.sleep(wishes.rest)
    for side in sides:
        speeds[side.name].awake = side.awake
        side.close()
    verify = verify_ratio(model, wishes.rounds, wishes.cpu_time) if wishes.verify else None
    return Outcome(model.stem, speeds, facts["moved"], copy_speed(wishes.cpu_time), verify)


def copy_speed(cpu_time: bool) -> float:
    """Bytes read and written per second of the same clock, by as many threads; the best of a few copies."""
    if not cpu_time:
        return probe_device("cpu", fresh=True).copy
    source, target = np.ones(COPIED, np.uint8), np.zeros(COPIED, np.uint8)

    def seconds() -> float:
        began = time.process_time()
        np.copyto(target, source)
        return time.process_time() - began

    return 2 * COPIED / min(seconds() for _ in range(8))


HEADER = ("model", "prefill", "llama.cpp", "ratio", "decode", "llama.cpp", "ratio", "rows", "MB a token", "bandwidth")


def show(models: Sequence[Path], wishes: argparse.Namespace) -> None:
    """One table of all models, in Markdown, row by row as they are measured; then all numbers as JSON."""
    unit = "tok per CPU second" if wishes.cpu_time else "tok/s"
    rounds = f"medians of {wishes.rounds} rounds, prompts of {wishes.prompt}, answers of {wishes.answer}"
    print(f"\n{unit}, {wishes.threads} threads, {rounds}; rows: {ROWS} rows verified ÷ one row\n")
    print("| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER), flush=True)
    outcomes = list[Outcome]()
    for model in models:
        outcomes.append(compare(model, wishes))
        print("| " + " | ".join(outcomes[-1].cells()) + " |", flush=True)
    print("\nawake between answers: " + ", ".join(outcome.awake() for outcome in outcomes))
    print("load " + ", ".join(f"{value:.1f}" for value in os.getloadavg()))
    for outcome in outcomes:
        print(json.dumps({"unit": unit, "threads": wishes.threads, **outcome.as_dict()}), flush=True)


def has_peer() -> bool:
    try:
        import xllamacpp  # noqa: F401
    except ImportError:
        print("xllamacpp is not installed: Rekindle alone")
        return False
    return True


def synthetic(shape: str, folder: Path) -> Path:
    path = folder / f"{shape}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_synthetic(path, shape)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, action="append", default=[], help="a GGUF file; may be given several times"
    )
    parser.add_argument("--also", type=Path, action="append", default=[], help="a file beside the three usual models")
    parser.add_argument(
        "--shape", action="append", default=[], help="of a synthetic model; may be given more than once"
    )
    parser.add_argument("--folder", type=Path, default=Path("."), help="where synthetic models are, or are written to")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rest", type=float, default=0.5, help="seconds after a turn, in which threads stop spinning")
    parser.add_argument("--cpu-time", action="store_true", help="divide by CPU seconds; with one thread")
    parser.add_argument("--verify", action="store_true", help=f"also what a block of {ROWS} rows costs")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # what this script starts for each of the two
    parser.add_argument("--context", type=int, default=0, help=argparse.SUPPRESS)
    wishes = parser.parse_args()
    if wishes.cpu_time:
        wishes.threads = 1
    if wishes.side:
        serve_side(wishes)
    wishes.alone = not has_peer()
    set_threads(wishes.threads)
    models = [*wishes.model, *(synthetic(shape, wishes.folder) for shape in wishes.shape)]
    models = models or [embedded_model(), *(synthetic(shape, wishes.folder) for shape in SHAPES), *wishes.also]
    show(models, wishes)


if __name__ == "__main__":
    main()

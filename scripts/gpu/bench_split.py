"""One model over several stages of a GPU machine, beside the same model in one stage.

    PYTHONPATH=src python3 scripts/gpu/bench_split.py [--shape qwen3.6-35b-a3b] [--cpu-layers 1] [--no-shard]
    python scripts/gpu/bench_split.py --device cpu --shape tiny-moe --prompt 96 --long 128   # without a GPU

Rows: one stage; two stages in one process; two stages of which the second is a shard over ipc; all but the last layers
on the GPU and the rest, with the output matrix, on the CPU. Each row answers the same two prompts greedily and is
compared with the first: the tokens of its own run, and its logits while it is given the first row's tokens. A snapshot
of the first row is restored on each split and one of each split on the first row, and both must go on with the same
tokens. Speeds go through the engine. The CPU computes in the same bfloat16 but in another order, so its row may differ
by rounding: there the distance counts. Weights are random; a table and one line of JSON come last.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.bench.speed import measure
from rekindle.bench.synth import write_synthetic
from rekindle.build.shards import Shards
from rekindle.build.stage import StageConfig, load_stage
from rekindle.config import Config, parse_shards
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.snapshots.types import Part
from rekindle.spec import Span
from rekindle.stages import Pipeline, Stage
from rekindle.weights import WeightFile, open_weights

PROMPTS, ANSWER = 2, 32
SLOTS = 8
AFTER = 8  # tokens that a restored run is followed for


@dataclass(frozen=True, slots=True)
class Run:
    """One greedy answer, or one along given tokens."""

    tokens: list[int]  # the likeliest at every step
    logits: torch.Tensor  # [steps, vocab] float32 on the host
    parts: tuple[Part, ...]  # the state behind the prompt


@dataclass(frozen=True, slots=True)
class Likeness:
    """How like the first row it is."""

    equal: int  # tokens of the free run that equal the first row's, up to the first that differs
    agree: int  # along the first row's tokens: likeliest token equal
    distance: float  # along the first row's tokens: mean |Δ log p|
    restored_here: int  # tokens equal after the first row's snapshot was restored on this split
    restored_there: int  # tokens equal after this split's snapshot was restored on the first row
    of: int  # tokens compared in `equal` and `agree`


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    load_s: float
    prefill: float  # tok/s of one long prompt
    decode: float  # tok/s of one sequence
    decode_4: float  # tok/s of four together
    beside: Likeness


class Bench:
    def __init__(self, wishes: argparse.Namespace, path: Path) -> None:
        self.wishes = wishes
        self.path = path
        self.file: WeightFile = open_weights(path)
        self._gpu = wishes.device != "cpu"
        rng = np.random.default_rng(0)
        most = min(self.file.spec.vocab, 200_000)
        self.prompts = [rng.integers(0, most, wishes.prompt).tolist() for _ in range(PROMPTS)]
        self.rows: list[Row] = []
        self._first: Pipeline | None = None
        self._runs: list[Run] = []

    def order(self, device: str, start: int, stop: int) -> StageConfig:
        pages = (self.wishes.long + 256) // 64 + SLOTS * (self.wishes.prompt // 64 + 4)
        kv_type, dtype = ("bf16", "bfloat16") if self._gpu else ("f32", "float32")
        return StageConfig(device, Span(start, stop), SLOTS, pages, kv_type=kv_type, dtype=dtype)

    def add(self, name: str, load: Callable[[], list[Stage]]) -> None:
        began = time.perf_counter()
        pipeline = Pipeline(load())
        load_s = time.perf_counter() - began
        if self._first is None:
            self._first = pipeline
            self._runs = [answer(pipeline, prompt, ANSWER) for prompt in self.prompts]
        self.rows.append(Row(name, round(load_s, 1), *self._speeds(pipeline), self._compare(pipeline)))
        print(json.dumps(asdict(self.rows[-1])), flush=True)

    def _speeds(self, pipeline: Pipeline) -> tuple[float, float, float]:
        settings = EngineSettings(context=self.wishes.long + 256, grid=2048)
        engine = Engine(Lent(pipeline), PrefixCache(local_tiers(0)), settings).start()  # type: ignore[arg-type]
        rng, vocab = np.random.default_rng(1), self.file.spec.vocab
        for prompt, sequences in ((self.wishes.long, 1), (16, 1), (16, 4)):  # records every step that will be timed
            measure(engine, vocab, rng, prompt, 4, sequences)
        prefill = max(measure(engine, vocab, rng, self.wishes.long, 1, 1)[0] for _ in range(2))
        decode = measure(engine, vocab, rng, 16, 64, 1)[1]
        decode_4 = measure(engine, vocab, rng, 16, 64, 4)[1]
        engine.stop()
        return round(prefill, 1), round(decode, 1), round(decode_4, 1)

    def _compare(self, pipeline: Pipeline) -> Likeness:
        assert self._first is not None, "the first row is what the others are compared with"
        equal = agree = here = there = 0
        distances = []
        for prompt, truth in zip(self.prompts, self._runs, strict=True):
            free = answer(pipeline, prompt, ANSWER)
            given = answer(pipeline, prompt, ANSWER, along=truth.tokens)
            equal += matching(free.tokens, truth.tokens)
            agree += sum(a == b for a, b in zip(given.tokens, truth.tokens, strict=True))
            distances.append(float((given.logits.log_softmax(-1) - truth.logits.log_softmax(-1)).abs().mean()))
            own = free.tokens[: AFTER + 1]
            here += matching(resume(pipeline, len(prompt), truth.parts, truth.tokens[0]), truth.tokens[1:])
            there += matching(resume(self._first, len(prompt), free.parts, own[0]), own[1:])
        distance = round(float(np.mean(distances)), 5)
        return Likeness(equal, agree, distance, here, there, PROMPTS * ANSWER)


class Lent:
    """A pipeline that outlives the engine which uses it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __getattr__(self, name: str) -> object:
        return getattr(self._pipeline, name)

    def stop(self) -> None: ...


def answer(pipeline: Pipeline, prompt: list[int], count: int, along: list[int] | None = None) -> Run:
    """`count` greedy steps behind the prompt; with `along` these tokens are consumed, whatever is likeliest."""
    slot = 0
    pipeline.open(slot)
    rows = [_step(pipeline, slot, 0, prompt)]
    parts = pipeline.capture(slot).result()
    for index in range(count - 1):
        token = int(rows[-1].argmax()) if along is None else along[index]
        rows.append(_step(pipeline, slot, len(prompt) + index, [token]))
    pipeline.close(slot)
    logits = torch.stack(rows)
    return Run(logits.argmax(-1).tolist(), logits, parts)


def resume(pipeline: Pipeline, position: int, parts: tuple[Part, ...], token: int) -> list[int]:
    """The tokens behind `token`, from a state that another split captured."""
    slot = 1
    pipeline.restore(slot, position, parts)
    tokens = [token]
    for index in range(AFTER):
        tokens.append(int(_step(pipeline, slot, position + index, [tokens[-1]]).argmax()))
    pipeline.close(slot)
    return tokens[1:]


def matching(a: list[int], b: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _step(pipeline: Pipeline, slot: int, position: int, tokens: list[int]) -> torch.Tensor:
    """[vocab] float32 on the host."""
    output = pipeline.forward(Batch((Segment(slot, position, tuple(tokens), Wanted.LAST),))).result()
    assert output.logits is not None, "the last row's logits were wanted"
    return output.logits[-1].float().cpu()


@contextmanager
def shard(bench: Bench, order: StageConfig) -> Iterator[Callable[[], Stage]]:
    """The stage in a process of its own, over ipc."""
    command = f"{sys.executable} -m rekindle.cli shard {bench.path}"
    shards = Shards(Config(model=bench.path, shards=parse_shards([f"b={command}"], [], [])))
    name = f"{order.device}@b"

    def load() -> Stage:
        shards.start([name], [order])
        return shards.connect(name, order, bench.file.fingerprint())

    try:
        yield load
    finally:
        shards.stop()


def run(bench: Bench) -> None:
    device, layers = bench.wishes.device, bench.file.spec.layers
    half, on_cpu = layers // 2, layers - bench.wishes.cpu_layers

    def local(where: str, start: int, stop: int) -> Stage:
        return load_stage(bench.file, bench.order(where, start, stop))

    bench.add(f"one stage on {device}", lambda: [local(device, 0, layers)])
    bench.add(f"two stages on {device}", lambda: [local(device, 0, half), local(device, half, layers)])
    if not bench.wishes.no_shard:
        with shard(bench, bench.order(device, half, layers)) as load:
            bench.add(f"two stages on {device}, one a shard", lambda: [local(device, 0, half), load()])
    bench.add(
        f"{on_cpu} layers on {device}, {layers - on_cpu} on cpu",
        lambda: [
            local(device, 0, on_cpu),
            local("cpu", on_cpu, layers),
        ],
    )


def show(rows: list[Row]) -> None:
    print(f"{'':44s} {'load':>6s} {'prefill':>9s} {'decode':>8s} {'of four':>8s}  equal  agree  |Δ log p|  restored")
    for row in rows:
        like = row.beside
        restored = f"{like.restored_here}+{like.restored_there} of {2 * PROMPTS * AFTER}"
        print(
            f"{row.name:44s} {row.load_s:5.1f}s {row.prefill:9.0f} {row.decode:8.1f} {row.decode_4:8.1f}  "
            f"{like.equal:2d}/{like.of}  {like.agree:2d}/{like.of}  {like.distance:9.5f}  {restored}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.6-35b-a3b")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of the prompts that are compared")
    parser.add_argument("--long", type=int, default=2048, help="tokens of the prompt whose prefill is timed")
    parser.add_argument("--cpu-layers", type=int, default=1, help="the last so many; each takes gigabytes expanded")
    parser.add_argument("--no-shard", action="store_true", help="leave out the row with a second process")
    wishes = parser.parse_args()
    path = wishes.folder / f"{wishes.shape}.gguf"
    if not path.exists():
        write_synthetic(path, wishes.shape)
    bench = Bench(wishes, path)
    try:
        run(bench)
    finally:
        show(bench.rows)
        result = {"shape": wishes.shape, "rows": [asdict(row) for row in bench.rows]}
        (Path(os.environ.get("OUT", ".")) / f"split-{wishes.shape}.json").write_text(json.dumps(result))
        print(json.dumps(result))


if __name__ == "__main__":
    main()

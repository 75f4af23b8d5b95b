"""The whole table of one model on a GPU, through the engine, as a client would see it.

    PYTHONPATH=src python3 scripts/gpu/bench_model.py --shape qwen3.6-35b-a3b [--profile]

Weights are random in the exact shape and the usual Q4_K_M mix, written to --folder first (twenty gigabytes in a
tmpfs). First the GPU path is checked against the float32 definition on tiny models; then prefill, decode by context
and batch, verify, capture and restore are timed. A short table comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.bench.speed import measure
from rekindle.bench.synth import write_synthetic
from rekindle.build.stage import StageConfig, load_stage
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.kernels.native.files import native_files
from rekindle.layers import load_span
from rekindle.pool import KvMode
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.types import Part, Snapshot, Stretch, wait_for
from rekindle.spec import PAGE
from rekindle.stages import LocalStage, Pipeline
from rekindle.weights import open_weights

LOG: list[str] = []
POOL = 4096  # tokens of a bounded pool on the device


def say(text: str) -> None:
    print(text, flush=True)
    LOG.append(text)


def check_tiny(folder: Path) -> None:
    """Small random models: the GPU path against the float32 definition, prefill and decode, outputs and states."""
    for shape in ("tiny", "tiny-moe"):
        path = write_synthetic(folder / f"{shape}.gguf", shape)
        file = open_weights(path)
        cpu = LocalStage(load_span(file, file.spec.whole, torch.device("cpu"), torch.float32), 4, 64, "f32")
        gpu = LocalStage(load_span(file, file.spec.whole, torch.device("cuda"), torch.bfloat16), 4, 64, "bf16")
        tokens = np.random.default_rng(1).integers(0, min(file.spec.vocab, 2000), 300).tolist()
        distance, same = [], 0
        edges = [200, *range(201, 240)]
        for start, stop in zip([0, *edges[:-1]], edges, strict=True):
            batch = Batch((Segment(1, start, tuple(tokens[start:stop]), Wanted.LAST),))
            a, b = (stage.forward(batch, None).logits for stage in (cpu, gpu))
            a, b = a[-1].log_softmax(-1), b[-1].float().cpu().log_softmax(-1)
            distance.append(float((a - b).abs().mean()))
            same += int(a.argmax() == b.argmax())
        say(f"check {shape}: mean |Δ log p| {np.mean(distance):.4f}, first token equal {same}/{len(edges)}")


class Told(dict[str, float]):
    """A table that says every row as it comes, so that a run cut short leaves what it had."""

    def __setitem__(self, name: str, value: float) -> None:
        super().__setitem__(name, value)
        print(f"  … {name} {value:.2f}", flush=True)


def seconds(call: Callable[[], object], repeats: int = 1) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


class Bench:
    def __init__(self, path: Path, slots: int, pages: int, grid: int) -> None:
        started = time.perf_counter()
        self.file = open_weights(path)
        order = StageConfig("cuda:0", self.file.spec.whole, slots, pages, 0, "bf16", dtype="bfloat16")
        self.stage = load_stage(self.file, order)
        torch.cuda.synchronize()
        self.load_s = time.perf_counter() - started
        settings = EngineSettings(context=pages * 64, grid=grid)
        self.engine = Engine(Pipeline([self.stage]), PrefixCache(local_tiers(0)), settings).start()
        self._rng = np.random.default_rng(0)
        began = time.perf_counter()
        self.run(16, 2)
        self.first_token_s = self.load_s + time.perf_counter() - began

    def run(self, prompt: int, answer: int, sequences: int = 1) -> tuple[float, float]:
        """Prefill and decode tok/s, all sequences together."""
        return measure(self.engine, self.file.spec.vocab, self._rng, prompt, answer, sequences)

    def verify(self, rows: int) -> float:
        """Milliseconds of one forward of so many rows behind 512 tokens, and of going back."""
        tokens = tuple(self._rng.integers(0, 1000, 512).tolist())
        self.stage.open(0)
        self.stage.forward(Batch((Segment(0, 0, tokens),)), None)
        batch = Batch((Segment(0, 512, tokens[:rows], Wanted.ALL),), rewindable=True)

        def step() -> None:
            self.stage.forward(batch, None)
            self.stage.rewind(0, 512)

        step()
        both = seconds(step, 10)
        self.stage.close(0)
        return both * 1000

    def one_row(self) -> float:
        """Milliseconds of one plain decode step behind 512 tokens."""
        tokens = tuple(self._rng.integers(0, 1000, 512).tolist())
        self.stage.open(0)
        self.stage.forward(Batch((Segment(0, 0, tokens),)), None)
        positions = iter(range(512, 1000))

        def step() -> None:
            self.stage.forward(Batch((Segment(0, next(positions), (5,), Wanted.LAST),)), None)

        step()
        took = seconds(step, 50)
        self.stage.close(0)
        return took * 1000

    def pooled(self, mode: KvMode, length: int, answer: int) -> float:
        """Decode tok/s at `length` tokens, of which POOL lie on the device."""
        stage = LocalStage(self.stage.model, 2, POOL // PAGE, "bf16", length // PAGE, mode)
        settings = EngineSettings(context=length, grid=POOL // 2)
        engine = Engine(Pipeline([stage]), PrefixCache(local_tiers(0)), settings).start()
        try:
            for prompt, tokens in ((2 * POOL, 2 * PAGE), (length - answer - PAGE, answer)):  # the first one records
                speed = measure(engine, self.file.spec.vocab, self._rng, prompt, tokens, 1)[1]
        finally:
            engine.stop()
        say(f"  {mode}: {stage.paging()}")
        return speed

    def snapshots(self, length: int, folder: Path) -> dict[str, float]:
        """Milliseconds to capture, to restore from RAM, to load from disk and restore, at `length` tokens."""
        tokens = self._rng.integers(0, 200_000, length).astype(np.int32)
        self.stage.open(0)
        grid = 4096

        def fill() -> None:
            for at in range(0, length, grid):
                stop = min(at + grid, length)
                self.stage.forward(Batch((Segment(0, at, tuple(tokens[at:stop].tolist()), Wanted.LAST),)), None)

        cold = seconds(fill)
        parts: list[Part] = []
        first = seconds(lambda: parts.extend(self.stage.capture(0)))
        wait_for(parts)
        again = seconds(lambda: self.stage.capture(0))
        logits = torch.zeros(self.file.spec.vocab)
        snapshot = Snapshot(tokens, tuple(parts), logits, grid, (Stretch(length, "prefill"),))
        self.stage.close(0)
        self.stage.restore(1, length, snapshot.parts)
        self.stage.close(1)
        ram = seconds(lambda: self.stage.restore(1, length, snapshot.parts))
        self.stage.close(1)
        shutil.rmtree(folder, ignore_errors=True)
        store = DiskStore(folder, "0123456789abcdef", 64 << 30)
        save_s = seconds(lambda: store.save(snapshot))
        id = store.records()[0].id
        store.close()
        disk, load, slabs = [], [], self.stage.slabs
        if slabs is not None:
            slabs.spare = lambda: 2 << 30  # as a RAM tier with so much left would say
        for _ in range(3):
            # A store that knows no living page, so every byte comes from the files, which the page cache holds.
            store = DiskStore(folder, "0123456789abcdef", 64 << 30, slabs=slabs, files=native_files())
            began = time.perf_counter()
            loaded = store.load(id)
            load.append(time.perf_counter() - began)
            self.stage.restore(1, length, loaded.parts)
            torch.cuda.synchronize()
            disk.append(time.perf_counter() - began)
            self.stage.close(1)
            store.close()
        shutil.rmtree(folder, ignore_errors=True)
        return {
            f"cold prefill {length} (ms)": cold * 1e3,
            f"capture {length}, all pages new (ms)": first * 1e3,
            f"capture {length}, no page new (ms)": again * 1e3,
            f"restore {length} from RAM (ms)": ram * 1e3,
            f"save {length} to disk (ms)": save_s * 1e3,
            f"load {length} from disk, page cache (ms)": min(load) * 1e3,
            f"load and restore {length} from disk (ms)": min(disk) * 1e3,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3.6-35b-a3b")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path, default=Path("/tmp/rekindle-bench-store"))
    parser.add_argument("--grid", type=int, default=4096)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--skip-check", action="store_true")
    options = parser.parse_args()
    out = Path(os.environ.get("OUT", "."))
    if not options.skip_check:
        check_tiny(options.folder)
    path = options.folder / f"{options.shape}.gguf"
    if not path.exists():
        say(f"wrote {path.name} in {seconds(lambda: write_synthetic(path, options.shape)):.1f} s")
    moe = "35b" in options.shape
    longest = 131_072 if moe else 32_768
    bench = Bench(path, 32, (longest + 16_384) // 64, options.grid)
    table: dict[str, float] = Told({"load (s)": bench.load_s, "start to first token (s)": bench.first_token_s})
    say(f"loaded in {bench.load_s:.1f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB on the device")
    try:
        fill_table(bench, table, moe, options)
    finally:
        if options.profile:
            profile(bench, out)
        for name, value in table.items():
            say(f"{name:48s} {value:12.2f}")
        (out / f"model-{options.shape}.json").write_text(json.dumps({"log": LOG, "table": table}))
        bench.engine.stop()


def fill_table(bench: Bench, table: dict[str, float], moe: bool, options: argparse.Namespace) -> None:
    for prompt in (512, 4096):
        bench.run(prompt, 2)
        table[f"prefill {prompt} (tok/s)"] = max(bench.run(prompt, 2)[0] for _ in range(2))
    bench.run(16, 8)
    table["decode, empty context (tok/s)"] = max(bench.run(16, 200)[1] for _ in range(2))
    for rows in (4, 8, 16, 32):
        bench.run(16, 8, rows)
        table[f"decode, batch of {rows} (tok/s)"] = bench.run(16, 100, rows)[1]
    for length in (32_768, 131_072) if moe else (32_768,):
        prefill, decode = bench.run(length - 128, 100)
        table[f"prefill {length} (tok/s)"] = prefill
        table[f"decode at {length} (tok/s)"] = decode
    one = table["one decode row (ms)"] = bench.one_row()
    for rows in (1, 4, 8, 16):
        table[f"verify {rows} rows and go back (ms)"] = bench.verify(rows)
    table["verify 16 rows ÷ one decode row"] = table["verify 16 rows and go back (ms)"] / one
    if moe:
        sparse = table[f"decode at 131072, sparse pool of {POOL} (tok/s)"] = bench.pooled("sparse", 131_072, 256)
        table["sparse pool at 131072 ÷ empty context"] = sparse / table["decode, empty context (tok/s)"]
        table[f"decode at 131072, exact pool of {POOL} (tok/s)"] = bench.pooled("exact", 131_072, 16)
        table |= bench.snapshots(32_768, options.disk)


def profile(bench: Bench, out: Path) -> None:
    """Where the time of decode steps and of a prefill chunk goes, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    calls = {"decode": (16, 10, 1), "batch8": (16, 10, 8), "batch32": (16, 10, 32), "prefill": (4096, 1, 1)}
    for name, shape in calls.items():
        with record(activities=[ProfilerActivity.CUDA]) as recorded:
            bench.run(*shape)
        averages = recorded.key_averages()
        text = averages.table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=60)
        (out / f"profile-{name}.txt").write_text(text)
        for row in sorted(averages, key=lambda row: -row.device_time_total)[:9]:
            say(f"  {name} {row.key[:58]:58s} {row.count:6d} {row.device_time_total / 1000:9.2f} ms")


if __name__ == "__main__":
    main()

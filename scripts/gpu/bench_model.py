"""The whole model on a GPU: checks it against the float32 definition, then times prefill and decode.

    PYTHONPATH=src python3 scripts/gpu/bench_model.py --shape qwen3.6-35b-a3b

Weights are random in the exact shape and are written to --folder first. Prints a short table last.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.bench.synth import write_synthetic
from rekindle.models import load_span
from rekindle.stages import LocalStage
from rekindle.weights import open_weights

LOG: list[str] = []


def say(text: str) -> None:
    print(text, flush=True)
    LOG.append(text)


def check_tiny(folder: Path) -> None:
    """Small random models: the GPU path against the float32 definition, prefill and decode, outputs and states."""
    for shape in ("tiny", "tiny-moe"):
        path = write_synthetic(folder / f"{shape}.gguf", shape)
        file = open_weights(path)
        cpu = LocalStage(load_span(file, file.spec.whole, torch.device("cpu"), torch.float32), 4, 64, torch.float32)
        gpu = LocalStage(load_span(file, file.spec.whole, torch.device("cuda"), torch.bfloat16), 4, 64, torch.bfloat16)
        tokens = np.random.default_rng(1).integers(0, min(file.spec.vocab, 2000), 300).tolist()
        worst, same, count = 0.0, 0, 0
        edges = [200, *range(201, 240)]
        for start, stop in zip([0, *edges[:-1]], edges, strict=True):
            batch = Batch((Segment(1, start, tuple(tokens[start:stop]), Wanted.LAST),))
            a = cpu.forward(batch, None).logits[-1].log_softmax(-1)
            b = gpu.forward(batch, None).logits[-1].float().cpu().log_softmax(-1)
            worst = max(worst, float((a - b).abs().mean()))
            same += int(a.argmax() == b.argmax())
            count += 1
        states = []
        for p, q in zip(cpu.capture(1), gpu.capture(1), strict=True):
            x, y = (p.state, q.state) if hasattr(p, "state") else (p.tail, q.tail.float())
            states.append(float((x - y.float()).norm() / x.norm().clamp_min(1e-9)))
        equal = f"first token equal {same}/{count}"
        say(f"check {shape}: mean |Δ log p| ≤ {worst:.4f}, {equal}, state error ≤ {max(states):.4f}")


def timed(call, repeats: int = 1) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


class Bench:
    def __init__(self, path: Path, slots: int, pages: int) -> None:
        started = time.perf_counter()
        self.file = open_weights(path)
        model = load_span(self.file, self.file.spec.whole, torch.device("cuda"), torch.bfloat16)
        self.stage = LocalStage(model, slots, pages, torch.bfloat16)
        torch.cuda.synchronize()
        self.load_s = time.perf_counter() - started
        self.rng = np.random.default_rng(0)

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.integers(0, 200_000, count).tolist())

    def prefill(self, count: int, chunk: int, slot: int = 0) -> float:
        self.stage.open(slot)
        tokens = self.tokens(count)

        def run() -> None:
            for at in range(0, count, chunk):
                self.stage.forward(Batch((Segment(slot, at, tokens[at : at + chunk], Wanted.LAST),)), None)

        return count / timed(run)

    def decode(self, rows: int, steps: int, at: int | None = None) -> float:
        """Tokens per second of `rows` sequences, each `at` tokens long (pages are pretended to be filled)."""
        for slot in range(rows):
            if at is not None:
                self.stage.open(slot)
                self.stage.pool.extend(self.stage._tables[slot], at)
                self.stage._tables[slot].position = at
        position = [self.stage._tables[slot].position for slot in range(rows)]

        def step() -> None:
            segments = tuple(Segment(slot, position[slot], (7,), Wanted.LAST) for slot in range(rows))
            logits = self.stage.forward(Batch(segments), None).logits
            logits.argmax(-1)
            for slot in range(rows):
                position[slot] += 1

        for _ in range(3):
            step()
        return rows / timed(step, steps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3.6-35b-a3b")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    out = Path(os.environ.get("OUT", "."))
    check_tiny(options.folder)
    path = options.folder / f"{options.shape}.gguf"
    if not path.exists():
        seconds = timed(lambda: write_synthetic(path, options.shape))
        say(f"wrote {path.name} in {seconds:.1f} s")
    long = 131072 if "35b" in options.shape else 32768
    bench = Bench(path, slots=32, pages=(long + 32 * 1024 + 8192) // 64)
    say(f"loaded in {bench.load_s:.1f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB on the device")
    table: dict[str, float] = {}
    table["first prefill 512"] = bench.prefill(512, 512)
    for count, chunk in ((512, 512), (4096, 2048), (4096, 4096)):
        bench.prefill(count, chunk)
        table[f"prefill {count} in chunks of {chunk}"] = bench.prefill(count, chunk)
    table["decode empty"] = bench.decode(1, 200, at=0)
    for rows in (4, 8, 16, 32):
        table[f"decode batch {rows}"] = bench.decode(rows, 50, at=0)
    for at in (32768, 131072):
        if at <= long:
            table[f"decode at {at}"] = bench.decode(1, 100, at=at)
    if options.profile:
        profile(bench, out)
    for name, value in table.items():
        say(f"{name:36s} {value:10.1f} tok/s")
    (out / f"model-{options.shape}.json").write_text(json.dumps({"log": LOG, "table": table}))


def profile(bench: Bench, out: Path) -> None:
    """Where the time of a decode step and of a prefill chunk goes, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    for name, call in (("decode", lambda: bench.decode(1, 5, at=0)), ("prefill", lambda: bench.prefill(4096, 4096))):
        with record(activities=[ProfilerActivity.CUDA]) as recorded:
            call()
        text = recorded.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60)
        (out / f"profile-{name}.txt").write_text(text)
        rows = sorted(recorded.key_averages(), key=lambda row: -row.device_time_total)[:12]
        for row in rows:
            say(f"  {name} {row.key[:58]:58s} {row.count:6d} {row.device_time_total / 1000:9.2f} ms")


if __name__ == "__main__":
    main()

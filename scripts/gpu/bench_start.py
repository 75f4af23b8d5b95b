"""From start to first token on a GPU: the first start, which compiles kernels, and the next one, which finds them.

    PYTHONPATH=src python3 scripts/gpu/bench_start.py --shape qwen3.6-35b-a3b

Each start is a process of its own over a file in the page cache, with random weights in the exact shape. Seconds are
counted from the moment the process is started. "late" are kernels that the server itself had to compile: there should
be none, and their names are said.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROWS = {
    "imports": "imports done",
    "loaded": "weights loaded",
    "kernels": "kernels compiled",
    "built": "engine ready",
    "first": "first token",
    "long": "then, prompt of 4,096: first token after",
    "batch": "then, 8 sequences: 8 tokens each after",
    "again": "then, the first prompt again, after",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="qwen3.6-35b-a3b")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--context", type=int, default=32_768)
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)  # when the process was started
    options = parser.parse_args()
    path = options.folder / f"{options.shape}.gguf"
    if options.child is not None:
        print(json.dumps(start(path, options)))
        return
    if not path.exists():
        from rekindle.bench.synth import write_synthetic

        began = time.perf_counter()
        write_synthetic(path, options.shape)
        print(f"wrote {path.name} in {time.perf_counter() - began:.1f} s", flush=True)
    cache = tempfile.mkdtemp(prefix="rekindle-start-")
    table = {name: run_child(cache) for name in ("first start", "next start")}
    shutil.rmtree(cache)
    show(options.shape, path.stat().st_size, table)
    (Path(os.environ.get("OUT", ".")) / f"start-{options.shape}.json").write_text(json.dumps(table))


def run_child(cache: str) -> dict[str, Any]:
    command = [sys.executable, *sys.argv, "--child", str(time.time())]
    done = subprocess.run(command, env=os.environ | {"TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"the start failed with exit status {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def show(shape: str, size: int, table: dict[str, dict[str, Any]]) -> None:
    print(f"{shape}, {size / 2**30:.1f} GiB, {len(os.sched_getaffinity(0))} cores; seconds")
    print(f"{'':44s}" + "".join(f"{name:>13s}" for name in table))
    for key, label in ROWS.items():
        print(
            f"{label:44s}" + "".join(f"{seen[key]:13.2f}" if key in seen else f"{'-':>13s}" for seen in table.values())
        )
    for name, seen in table.items():
        print(f"{name}: {seen['compiled']} kernels compiled ahead, {len(seen['late'])} late {seen['late'] or ''}")


def start(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One start, its first requests, and when what happened."""
    seen: dict[str, Any] = {"compiled": 0, "late": []}

    def mark(name: str) -> None:
        seen[name] = time.time() - options.child

    import triton

    from rekindle.build import build_engine
    from rekindle.config import Config

    mark("imports")

    def on_bytes(done: int, total: int) -> None:
        if done >= total:
            mark("loaded")

    def on_kernels(done: int, known: int) -> None:
        seen["compiled"] = known
        mark("kernels")

    def on_compile(src: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            seen["late"].append(src.name)

    triton.knobs.compilation.listener = on_compile
    config = Config(
        model=path, devices=("cuda:0",), context=options.context, sequences=options.sequences, grid=4096, cache_ram=0
    )
    built = build_engine(config, on_bytes, on_kernels)
    mark("built")
    answer(built, 16, 2)
    mark("first")
    for name, (prompt, tokens, sequences) in {"long": (4096, 1, 1), "batch": (16, 8, 8), "again": (16, 1, 1)}.items():
        began = time.perf_counter()
        answer(built, prompt, tokens, sequences)
        seen[name] = time.perf_counter() - began
    built.stop()
    return seen


def answer(built: Any, prompt: int, tokens: int, sequences: int = 1) -> None:
    """Waits for the answers of so many sequences."""
    from rekindle.engine.types import Event, Failed, Finished, Request, Sampling
    from rekindle.prompt import Prompt

    ended = [threading.Event() for _ in range(sequences)]
    errors = list[Exception]()

    def sink(place: int, event: Event) -> None:
        if isinstance(event, Failed):
            errors.append(event.error)
        if isinstance(event, Failed | Finished):
            ended[place].set()

    for place in range(sequences):
        request = Request(
            f"start-{time.time()}-{place}",
            Prompt(tuple(range(prompt))),
            Sampling(temperature=0),
            max_tokens=tokens,
            stop_tokens=frozenset(),
            sink=lambda event, place=place: sink(place, event),
        )
        built.engine.submit(request)
    for event in ended:
        event.wait()
    if errors:
        raise errors[0]


if __name__ == "__main__":
    main()

"""CPU time that a server's threads take for a token: the event loop's, which speaks HTTP, and that of all others.

    PYTHONPATH=src python scripts/bench_threads.py [MODEL] [--streams 32] [--answer 256] [--rounds 3]

Both share one interpreter lock, so that on a GPU, where the others hardly compute, each waits for the other. The model
computes here too, on one thread, so its own time is a part of what the others take; a tiny one says most. Everything
runs twice, and the first time does not count. Microseconds a token, of every round; the last line is JSON. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from rekindle.bench.client import LoadClient
from rekindle.bench.load import Load, rows_of, run_load
from rekindle.build import embedded_model

SERVE = "from rekindle.cli import main; main()"
TICK = os.sysconf("SC_CLK_TCK")


def start(model: Path, streams: int) -> tuple[subprocess.Popen[str], str]:
    options = ["--port", "0", "--sequences", str(streams), "--context", "2048", "--threads", "1", "--no-cache-dir"]
    command = [sys.executable, "-c", SERVE, "serve", str(model), *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"chat in a browser\s+(http://\S+?)/?\s*$", line):
            return server, found[1]
    raise SystemExit("the server did not start")


def seconds_of(process: int) -> tuple[float, float]:
    """Processor time of its main thread, and of all others together."""
    taken = dict[int, float]()
    for task in Path(f"/proc/{process}/task").iterdir():
        fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
        taken[int(task.name)] = (int(fields[11]) + int(fields[12])) / TICK
    main = taken.pop(process)
    return main, sum(taken.values())


def measure(url: str, process: int, load: Load) -> dict[str, float]:
    before = seconds_of(process)
    (row,) = rows_of(asyncio.run(run_load(LoadClient(url), load)))
    if row.failed:
        raise SystemExit(f"{row.failed} of {row.requests} requests failed: {row.failure}")
    loop, others = (after - since for after, since in zip(seconds_of(process), before, strict=True))
    return {
        "event_loop_us": round(1e6 * loop / row.answered, 1),
        "others_us": round(1e6 * others / row.answered, 1),
        "tokens_per_second": row.output_tokens_per_second,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="a GGUF file; the embedded model if left out")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--answer", type=int, default=256, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    server, url = start(given.model or embedded_model(), given.streams)
    try:
        load = {"prompts": (32,), "requests": given.streams, "concurrency": given.streams, "answer": given.answer}
        rounds = [measure(url, server.pid, Load(**load, vocab=300, seed=seed)) for seed in range(given.rounds + 1)][1:]
    finally:
        server.terminate()
        server.wait()
    for found in rounds:
        print(found)
    print(json.dumps({"streams": given.streams, "rounds": rounds}))


if __name__ == "__main__":
    main()

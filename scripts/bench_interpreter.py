"""How long a thread like the token loop waits for the interpreter's lock, by the turns that threads take.

    python scripts/bench_interpreter.py [--seconds 3] [--readers 0 --readers 6 --readers 16]

The thread waits 0.3 ms for a device, then makes 40 small calls into torch, each of which lets go of the lock. Another
thread writes JSON for 3 ms and waits for 0.5 ms, over and over, as the event loop does with tokens for many clients.
Readers do without the lock for 0.2 ms and need it for some 10 µs, as threads that load snapshots. A turn is the time
after which a waiting thread asks for the lock: 5 ms is Python's own, `rekindle serve` has the one that is marked.
Prints a table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable

import torch

from rekindle.cli.serve import TURN

TURNS = (0.005, 0.0005, TURN, 0.00002)  # seconds
CALLS, WAITED = 40, 0.0003

libc = ctypes.CDLL(None)


def step(values: torch.Tensor) -> float:
    began = time.perf_counter()
    libc.usleep(int(WAITED * 1e6))
    for _ in range(CALLS):
        values.add_(1)
        for _ in range(100):
            pass
    return time.perf_counter() - began


def write(stop: threading.Event, written: list[int]) -> None:
    while not stop.is_set():
        until = time.perf_counter() + 0.003
        while time.perf_counter() < until:
            json.dumps({"ids": [1, 2, 3] * 20, "text": "some" * 20})
            written[0] += 1
        time.sleep(0.0005)


def read(stop: threading.Event) -> None:
    while not stop.is_set():
        libc.usleep(200)
        for _ in range(300):
            pass


def measure(turn: float, readers: int, seconds: float) -> dict[str, float]:
    sys.setswitchinterval(turn)
    stop, written, values = threading.Event(), [0], torch.zeros(64)
    alone = sorted(step(values) for _ in range(20))
    works: list[Callable[[], None]] = [lambda: write(stop, written), *[lambda: read(stop)] * readers]
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    began, spent = time.perf_counter(), list[float]()
    while not spent or time.perf_counter() - began < seconds:
        spent.append(step(values))
    took = time.perf_counter() - began
    stop.set()
    for thread in threads:
        thread.join()
    spent.sort()
    return {
        "turn_us": turn * 1e6, "readers": readers, "alone_ms": 1e3 * alone[len(alone) // 2],
        "p50_ms": 1e3 * spent[len(spent) // 2], "p99_ms": 1e3 * spent[len(spent) * 99 // 100],
        "written_per_second": written[0] / took,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3.0, help="of each row")
    parser.add_argument("--readers", type=int, action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = list[dict[str, float]]()
    print("readers   turn   alone     p50     p99   written")
    for readers in options.readers or (0, 6, 16):
        for turn in TURNS:
            rows.append(row := measure(turn, readers, options.seconds))
            times = f"{row['alone_ms']:7.2f} {row['p50_ms']:7.2f} {row['p99_ms']:7.2f}"
            own = "  as served" if turn == TURN else ""
            print(f"{readers:7d} {row['turn_us']:6.0f} {times} {row['written_per_second']:9.0f}{own}")
    print("µs; ms of a step alone and beside the others; texts written a second")
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()

"""What lookup, publish and eviction cost as the number of snapshots grows, and what a disk hit costs.

    python scripts/bench_index.py [--megabytes 512]

Prints a table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from rekindle.kernels.native.files import native_files
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import BoundaryKind
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.slabs import Slabs
from rekindle.snapshots.types import Page, Part, Snapshot, Stretch
from rekindle.spec import PAGE

FINGERPRINT = "be" * 16
PROMPT = 4096
ROUNDS = 100


def small(tokens: np.ndarray) -> Snapshot:
    state = Part(0, {"state": torch.zeros(1, 2, 2), "window": torch.zeros(1, 2)})
    return Snapshot(tokens, (state,), torch.zeros(8), 512, (Stretch(len(tokens), "prefill"),))


def measure_index(population: int) -> dict[str, float]:
    """Conversations of 8 boundaries over PROMPT tokens under a shared beginning, until there are `population`."""
    random = np.random.default_rng(0)
    shared = random.integers(0, 100_000, PROMPT // 2).astype(np.int32)
    edges = np.linspace(PROMPT // 2 + 1, PROMPT, 8).astype(int)
    conversation = sum(small(np.zeros(edge, dtype=np.int32)).own_bytes for edge in edges)
    cache = PrefixCache(local_tiers(population // 8 * conversation))  # full: every further snapshot costs an eviction
    prompt = shared
    for _ in range(population // 8):
        prompt = np.concatenate([shared, random.integers(0, 100_000, PROMPT // 2).astype(np.int32)])
        for edge in edges:
            cache.publish(small(prompt[:edge]), BoundaryKind.MESSAGE)

    started, steps = time.perf_counter(), cache.steps
    for _ in range(ROUNDS):
        hit = cache.lookup(prompt).hit
        assert hit is not None, "the last conversation is there"
        hit.release()
    lookup, lookup_steps = time.perf_counter() - started, cache.steps - steps

    fresh = [small(np.concatenate([shared, random.integers(0, 100_000, 64).astype(np.int32)])) for _ in range(ROUNDS)]
    evicted = sum(cache.stats().evictions.values())
    started, steps = time.perf_counter(), cache.steps
    for snapshot in fresh:
        cache.publish(snapshot, BoundaryKind.MESSAGE)
    publish, publish_steps = time.perf_counter() - started, cache.steps - steps
    return {
        "snapshots": population,
        "lookup_us": round(lookup / ROUNDS * 1e6, 1),
        "lookup_steps": lookup_steps / ROUNDS,
        "publish_us": round(publish / ROUNDS * 1e6, 1),
        "publish_steps": publish_steps / ROUNDS,
        "evictions": sum(cache.stats().evictions.values()) - evicted,
    }


def large(megabytes: int) -> Snapshot:
    """Four attention layers of 256 KiB pages, and a recurrent state of an eighth of the whole."""
    random = np.random.default_rng(0)
    pages = max(1, megabytes * 7 // 8)  # a page of all four layers is 1 MiB
    tokens = random.integers(0, 100_000, pages * PAGE + 5).astype(np.int32)

    def values(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal(shape, dtype=np.float32))

    parts = [
        Part(layer, {"tail": values(2, 5, 4, 128)}, tuple(Page(values(2, PAGE, 4, 128)) for _ in range(pages)))
        for layer in (1, 3, 5, 7)
    ]
    state = Part(0, {"state": values(megabytes * 2, 128, 128 * 1), "window": values(3, 64)})
    return Snapshot(tokens, (state, *parts), values(1000), 512, (Stretch(len(tokens), "prefill"),))


def measure_load(megabytes: int) -> dict[str, float]:
    """A disk hit against plain reads of the same files, as Python gives memory for them and into memory that is used
    again; all from a warm page cache, best of five. Loads get what the RAM tier of a server gives them: memory of
    snapshots that left it."""
    with tempfile.TemporaryDirectory() as folder:
        slabs = Slabs()
        slabs.spare = lambda: 2 * megabytes << 20
        store = DiskStore(folder, FINGERPRINT, 1 << 40, slabs=slabs, files=native_files())
        id = store.save(large(megabytes)).id
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        bytes_read = sum(path.stat().st_size for path in files)
        memory = memoryview(bytearray(bytes_read))

        def plain() -> list[bytes]:
            return [path.read_bytes() for path in files]

        def again() -> None:
            left = memory
            for path in files:
                with path.open("rb", buffering=0) as file:
                    left = left[file.readinto(left) :]

        ways: dict[str, Callable[[], object]] = {"plain": plain, "again": again, "load": lambda: store.load(id)}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(5):
            for name, read in ways.items():
                started = time.perf_counter()
                held = read()
                times[name].append(time.perf_counter() - started)
                del held
        best = {name: min(its_times) for name, its_times in times.items()}
        store.close()
    return {
        "bytes": bytes_read,
        "plain_read_s": round(best["plain"], 4),
        "plain_read_again_s": round(best["again"], 4),
        "plain_read_first_s": round(times["plain"][0], 4),
        "verified_load_first_s": round(times["load"][0], 4),
        "verified_load_s": round(best["load"], 4),
        "ratio": round(best["load"] / best["plain"], 3),
        "ratio_again": round(best["load"] / best["again"], 3),
    }


def measure_chain(turns: int = 200) -> dict[str, float]:
    """Bytes on disk of a conversation of many turns, against pages once and one recurrent part per boundary."""
    random = np.random.default_rng(0)
    length = turns * 150
    tokens = random.integers(0, 100_000, length).astype(np.int32)
    sealed = tuple(
        Page(torch.from_numpy(random.standard_normal((2, PAGE, 2, 32), dtype=np.float32)))
        for _ in range(length // PAGE)
    )
    own = 0
    with tempfile.TemporaryDirectory() as folder:
        store = DiskStore(folder, FINGERPRINT, 1 << 40)
        for turn in range(1, turns + 1):
            position = turn * 150
            tail = torch.zeros(2, position % PAGE, 2, 32)
            matrices = torch.from_numpy(random.standard_normal((4, 64, 64), dtype=np.float32))
            state = Part(0, {"state": matrices, "window": torch.zeros(3, 64)})
            kv = Part(1, {"tail": tail}, sealed[: position // PAGE])
            snapshot = Snapshot(tokens[:position], (state, kv), torch.zeros(512), 512, (Stretch(position, "prefill"),))
            store.save(snapshot)
            own += snapshot.own_bytes - snapshot.tokens.nbytes
        written = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        store.close()
    ideal = sum(page.nbytes for page in sealed) + own
    return {"turns": turns, "bytes": written, "ideal_bytes": ideal, "ratio": round(written / ideal, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512, help="size of the snapshot that is loaded")
    parser.add_argument("--populations", type=int, nargs="+", default=[80, 800, 8000], help="entries of the index")
    options = parser.parse_args()
    rows = [measure_index(population) for population in options.populations]
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    load, chain = measure_load(options.megabytes), measure_chain()
    print("  ".join(f"{name} {value}" for name, value in load.items()))
    print("  ".join(f"{name} {value}" for name, value in chain.items()))
    print(json.dumps({"index": rows, "load": load, "chain": chain}))


if __name__ == "__main__":
    main()

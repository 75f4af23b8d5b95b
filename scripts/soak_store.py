"""Kill a process that saves snapshots, again and again, and check after each kill that only whole ones are left.

    python scripts/soak_store.py [--kills 200] [--seed 0]

Every child saves and evicts in one directory until SIGKILL comes at a random moment. Then the store is opened, every
snapshot in it is loaded and compared bit for bit with what it must be, and every save that was reported finished and
not evicted must be there. The last line is JSON; the exit status is 1 if a law was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.types import Page, Part, Snapshot, Stretch
from rekindle.spec import PAGE

FINGERPRINT = "50" * 16
KEPT = 12  # snapshots a child keeps; older ones it evicts


def snapshot_of(tokens: np.ndarray) -> Snapshot:
    """State as a function of the tokens, so that the checker knows what must be there."""

    def values(salt: int, upto: int, *shape: int) -> torch.Tensor:
        seed = [salt, upto, int(tokens[:upto].astype(np.int64).sum())]
        return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))

    n = len(tokens)
    pages = tuple(Page(values(1, (i + 1) * PAGE, 2, PAGE, 1, 16)) for i in range(n // PAGE))
    kv = Part(1, {"tail": values(2, n, 2, n % PAGE, 1, 16)}, pages)
    delta = Part(0, {"state": values(3, n, 2, 32, 32), "window": values(4, n, 3, 8)})
    return Snapshot(tokens, (delta, kv), values(5, n, 32), 512, (Stretch(n, "prefill"),))


def tokens_of(conversation: int, length: int) -> np.ndarray:
    return np.random.default_rng(conversation).integers(0, 50_000, length).astype(np.int32)


def save_for_ever(directory: str, seed: int, report: int) -> None:
    """The child: grows random conversations; tells the parent what is finished and what it is about to evict."""
    chance = random.Random(seed)
    store = DiskStore(directory, FINGERPRINT, 1 << 40)
    held = [record.id for record in store.records()]
    while True:
        snapshot = snapshot_of(tokens_of(chance.randrange(4), chance.randrange(1, 400)))
        id = store.save(snapshot).id
        os.write(report, f"+{id}\n".encode())
        held = [h for h in held if h != id] + [id]
        while len(held) > KEPT:
            victim = held.pop(0)
            os.write(report, f"-{victim}\n".encode())
            store.remove(victim)


def run_child(directory: str, seed: int, chance: random.Random) -> list[str]:
    """Everything the child reported before it was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        save_for_ever(directory, seed, writer)
    os.close(writer)
    select.select([reader], [], [], 30)  # it has begun
    time.sleep(chance.uniform(0, 0.08))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(reader) as lines:
        return lines.read().split()


def check(directory: str, must: set[str], doomed: set[str]) -> list[str]:
    """Faults found; `must` is updated to what is there."""
    faults = []
    store = DiskStore(directory, FINGERPRINT, 1 << 40)
    if store.bad_files:
        faults.append(f"{store.bad_files} manifests were quarantined")
    there = {record.id for record in store.records()}
    faults += [f"{id} was finished and is gone" for id in must - doomed - there]
    for id in there:
        loaded = store.load(id)
        wanted = snapshot_of(loaded.tokens)
        for ours, theirs in zip(tensors(loaded), tensors(wanted), strict=True):
            if not torch.equal(ours, theirs):
                faults.append(f"{id} differs")
                break
    on_disk = sum(p.stat().st_size for part in ("objects", "manifests") for p in (store.folder / part).iterdir())
    if on_disk != store.bytes:
        faults.append(f"{on_disk} bytes on disk, {store.bytes} in the account")
    store.close()
    must.clear()
    must.update(there)
    return faults


def tensors(snapshot: Snapshot) -> list[torch.Tensor]:
    delta, kv = snapshot.parts
    assert snapshot.logits is not None, "every snapshot of the soak has logits"
    return [*delta.tensors.values(), *kv.tensors.values(), snapshot.logits, *(page.data for page in kv.pages)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chance = random.Random(options.seed)
    must: set[str] = set()
    faults: list[str] = []
    saves = 0
    with tempfile.TemporaryDirectory() as directory:
        for kill in range(options.kills):
            lines = run_child(directory, options.seed * 100_003 + kill, chance)
            finished = {line[1:] for line in lines if line[0] == "+"}
            doomed = {line[1:] for line in lines if line[0] == "-"}
            saves += len(finished)
            must |= finished
            found = check(directory, must, doomed)
            faults += found
            for fault in found:
                print(f"after kill {kill + 1}: {fault}")
        left = sum(1 for _ in Path(directory).rglob("*.json"))
    print(json.dumps({"kills": options.kills, "saves": saves, "snapshots_left": left, "faults": len(faults)}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

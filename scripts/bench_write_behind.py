"""Decode speed while snapshots are written to disk all the time, beside the speed while nothing is written.

    python scripts/bench_write_behind.py [MODEL] [--prompt 512] [--slice 12] [--pairs 12] [--threads N]

Answers are decoded one after another by a real engine. In every second slice of them the disk writer saves a real
snapshot of the prompt, removes it and saves it again, without a pause: every page is hashed, written and synced each
time. Each busy slice is compared with the quiet ones beside it, so that what else the machine does falls on both; the
median of the ratios counts. The last line is JSON; the exit status is 1 below the goal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from rekindle.build import Built, build_engine
from rekindle.config import Config
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling, Token
from rekindle.prompt import BoundaryKind, Prompt
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.record import Record
from rekindle.snapshots.types import Snapshot
from rekindle.snapshots.writer import DiskWriter, Save

GOAL = 0.95
# Until there are as many pairs of slices as were asked for: beside other work on all cores the writer, whose priority
# is low, takes a second for each save.
MOST_ANSWERS = 400
FINGERPRINT = "bb" * 16


class BusyWriter:
    """The write-behind thread, which while `busy` always has a snapshot in hand and one waiting."""

    def __init__(self, folder: str, snapshot: Snapshot) -> None:
        self.busy = False
        self.store = DiskStore(folder, FINGERPRINT, 1 << 40)
        self.writer = DiskWriter(self.store)
        self._snapshot = snapshot

    def set(self, busy: bool) -> None:
        if busy and not self.busy:
            self._offer()
            self._offer()
        self.busy = busy

    @property
    def at_work(self) -> bool:
        return self.writer.waiting > 0

    def _offer(self) -> None:
        self.writer.offer(Save(self._snapshot, BoundaryKind.END, None, self._done))

    def _done(self, record: Record | None) -> None:
        assert record is not None, "the disk refused: this folder cannot be measured"
        self.store.remove(record.id)  # so that the next save hashes and writes every byte again
        if self.busy:
            self._offer()

    def close(self) -> None:
        self.busy = False
        self.writer.close()
        self.store.close()


class Slices:
    """Takes the tokens of answers and keeps the time of those whose slice was wholly busy or wholly quiet."""

    def __init__(self, writer: BusyWriter, length: int) -> None:
        self.done = threading.Event()  # with the answer under way
        self.seconds: list[list[float]] = [[]]  # by slice, quiet ones first: seconds per token
        self._writer = writer
        self._length = length
        self._tokens = 0
        self._last = 0.0
        self._was_at_work = False

    def begin_answer(self) -> None:
        self._tokens = 0  # the time before its first token counts for no slice
        self.done.clear()

    def take(self, event: Event) -> None:
        now = time.perf_counter()
        if isinstance(event, Finished | Failed):
            assert isinstance(event, Finished), event
            self.done.set()
        if not isinstance(event, Token):
            return
        at_work, index = self._writer.at_work, len(self.seconds) - 1
        if self._tokens and at_work == self._was_at_work == bool(index % 2):
            self.seconds[index].append(now - self._last)
        self._tokens += 1
        if len(self.seconds[index]) == self._length:
            self.seconds.append([])
            self._writer.set(bool((index + 1) % 2))
        self._last, self._was_at_work = time.perf_counter(), self._writer.at_work


def submit(built: Built, tokens: tuple[int, ...], answer: int, slices: Slices | None, id: str) -> threading.Event:
    done = slices.done if slices is not None else threading.Event()

    def take(event: Event) -> None:
        if isinstance(event, Finished | Failed):
            done.set()

    sink = slices.take if slices is not None else take
    built.engine.submit(
        Request(
            id,
            Prompt(tokens),
            Sampling(temperature=0),
            max_tokens=answer,
            stop_tokens=frozenset(),
            sink=sink,
        )
    )
    return done


def snapshot_of(built: Built, tokens: tuple[int, ...]) -> Snapshot:
    """What a server captures of this prompt."""
    submit(built, tokens, 1, None, "prompt").wait()
    while built.engine.prefixes.known_length(tokens) < len(tokens):
        time.sleep(0.01)  # it is published a moment after the last event
    found = built.engine.prefixes.lookup(tokens)
    assert found.hit is not None, "the prompt was just run"
    found.hit.release()
    return found.hit.snapshot


def decode(built: Built, tokens: tuple[int, ...], slices: Slices, wanted: int) -> None:
    """Answers, until so many slices are full."""
    for number in range(MOST_ANSWERS):
        slices.begin_answer()
        done = submit(built, tokens, built.context - len(tokens) - 1, slices, f"answer-{number}")
        while not done.wait(0.2) and len(slices.seconds) <= wanted:
            pass
        built.engine.cancel(f"answer-{number}")
        done.wait()
        if len(slices.seconds) > wanted:
            return
    sys.exit(f"{MOST_ANSWERS} answers gave {len(slices.seconds) - 1} slices instead of {wanted}: make --slice smaller")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="the embedded one if left out")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--slice", type=int, default=12, help="tokens that count, per slice")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    context = 32 * options.slice * options.pairs + options.prompt
    built = build_engine(Config(model=options.model, threads=options.threads, context=min(context, 8192), draft="off"))
    tokens = tuple(np.random.default_rng(0).integers(0, built.model.spec.drawable, options.prompt).tolist())
    snapshot = snapshot_of(built, tokens)
    with tempfile.TemporaryDirectory(prefix="rekindle-bench-") as folder:
        writer = BusyWriter(folder, snapshot)
        slices = Slices(writer, options.slice)
        decode(built, tokens, slices, 2 * options.pairs + 1)
        writer.close()
        saves, saved = writer.writer.saves, writer.writer.saved_bytes
    built.stop()
    means = [statistics.fmean(slice) for slice in slices.seconds if len(slice) == options.slice]
    busy = range(1, len(means) - 1, 2)
    ratios = [(means[i - 1] + means[i + 1]) / 2 / means[i] for i in busy]
    ratio = statistics.median(ratios)
    quiet = 1 / statistics.median(means[0::2])
    print(f"quiet {quiet:.2f} tok/s; while writing {1 / statistics.median(means[1::2]):.2f} tok/s; ratios", end=" ")
    print(" ".join(f"{ratio:.2f}" for ratio in ratios))
    print(json.dumps({"ratio": round(ratio, 3), "goal": GOAL, "saves": saves, "saved_mib": saved >> 20}))
    return int(ratio < GOAL)


if __name__ == "__main__":
    sys.exit(main())

"""Check, then time, captures and restores on a GPU: PYTHONPATH=src python3 scripts/gpu/check_snapshots.py

    [--shape qwen3.6-35b-a3b] [--tokens 32768] [--device cuda:0]

A stage with the state of the real shape and no weights: what a forward would write is written by hand. A capture must
hold the state of its moment though the slot runs on, is closed and its pages go to others before the copies begin;
restored, in RAM and through a disk, it must give back the very bytes. Then what a capture costs the engine's thread,
and what a restore takes. The last line is JSON. Exit code 1: a check failed. `--shape tiny --device cpu` runs anywhere.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch

from rekindle.bench.synth import SHAPES
from rekindle.kernels.native.files import native_files
from rekindle.layers.delta import DeltaState
from rekindle.layers.span import ModelSpan
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.slabs import Slabs
from rekindle.snapshots.types import Part, Snapshot, Stretch, copies_done, wait_for
from rekindle.spec import PAGE, Span
from rekindle.stages import LocalStage

GOALS = {"capture_ms": 3.0, "restore_ram_ms": 40.0, "restore_disk_ms": 250.0}
FINGERPRINT = "c5" * 16
CHUNK = 2048
# Between two captures a server runs a prefill of CHUNK tokens; the stage here has no weights, so its time is waited.
PREFILL = 0.1  # seconds
LOADS = 4
SLABS = 32  # what a plan gives a machine with 32 GiB of RAM or more
LATE = 400_000_000  # clock cycles that copies are held up by: a fifth of a second


class Hand:
    """A stage whose state is written by hand."""

    def __init__(self, shape: str, device: torch.device, pages: int, host_pages: int = 0) -> None:
        spec = SHAPES[shape].spec
        model = ModelSpan(spec, Span(0, spec.layers), device, torch.bfloat16, (), None, None)
        self.stage = LocalStage(model, 2, pages, "bf16", host_pages, slabs=SLABS)
        self.device = device
        self._draw = torch.Generator(device).manual_seed(0)

    @property
    def states(self) -> list[DeltaState]:
        return [state for state in self.stage._state.layers.values() if isinstance(state, DeltaState)]

    def run(self, slot: int, end: int) -> None:
        """What a forward up to `end` leaves behind, in some other numbers."""
        pool, table = self.stage.pool, self.stage._tables[slot]
        pool.tick([table])
        pool.extend(table, end)
        written = [page.place for page in table.pages[table.position // PAGE :]]
        places = torch.tensor(written, device=self.device)
        for layer in pool.kv:
            rows = torch.randn(layer[: len(written)].shape, generator=self._draw, device=self.device)
            keep = table.position % PAGE  # rows of the open page that are there already
            rows[0, :, :keep] = layer[written[0], :, :keep]
            layer[places] = rows.to(layer.dtype)
        for state in self.states:
            state.states[slot].normal_(generator=self._draw)
            state.windows[slot].normal_(generator=self._draw)
        table.position = end

    def hold_copies(self) -> None:
        """Copies to the host that are asked for now begin late."""
        stream = self.stage.pool.copies._stream
        if stream is not None:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LATE)

    def state(self, slot: int) -> list[torch.Tensor]:
        """All of it, by position, in memory of its own."""
        table = self.stage._tables[slot]
        places = torch.tensor([page.place for page in table.pages], device=self.device)
        found = [t for state in self.states for t in (state.states[slot].clone(), state.windows[slot].clone())]
        for layer in self.stage.pool.kv:
            rows = layer[places].transpose(0, 1).flatten(1, 2)  # [2, positions, kv_heads, row]
            found.append(rows[:, : table.position].clone())
        torch.cuda.synchronize() if self.device.type == "cuda" else None
        return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def snapshot_of(tokens: int, parts: list[Part]) -> Snapshot:
    wait_for(parts)
    ids = np.random.default_rng(tokens).integers(0, 100_000, tokens).astype(np.int32)
    return Snapshot(ids, tuple(parts), torch.zeros(8), 512, (Stretch(tokens, "prefill"),))


def save(folder: str, snapshot: Snapshot) -> str:
    store = DiskStore(folder, FINGERPRINT, 1 << 40)
    id = store.save(snapshot).id
    store.close()
    return id


def load(folder: str, id: str, slabs: Slabs | None) -> tuple[Snapshot, float]:
    """By a store that has no living page, so every byte comes from the files; and the milliseconds."""
    store = DiskStore(folder, FINGERPRINT, 1 << 40, slabs=slabs, files=native_files())
    start = time.perf_counter()
    loaded = store.load(id)
    took = (time.perf_counter() - start) * 1e3
    store.close()
    return loaded, took


def check(shape: str, device: torch.device) -> bool:
    good = True

    def say(name: str, holds: bool) -> None:
        nonlocal good
        good &= holds
        print(f"{'ok ' if holds else 'BAD'} {name}", flush=True)

    hand = Hand(shape, device, 100)
    stage, position = hand.stage, 70 * PAGE + 17  # more pages than are copied at once
    hand.run(0, 3 * PAGE + 9)
    first_truth = hand.state(0)
    hand.hold_copies()
    first = stage.capture(0)
    late = not copies_done(first)
    hand.run(0, position)
    truth = hand.state(0)
    hand.hold_copies()
    parts = stage.capture(0)
    hand.run(0, position + 40)  # the sequence runs on,
    stage.close(0)  # ends,
    hand.run(1, 90 * PAGE)  # and its pages are written by another one
    for state in hand.states:
        state.states.normal_()
        state.windows.normal_()
    stage.close(1)
    say("a capture does not wait for its copies", late or device.type == "cpu")
    stage.restore(1, position, parts)
    say("restored: the state at the capture, not what came after it", same(truth, hand.state(1)))
    stage.restore(0, 3 * PAGE + 9, first)
    say("restored beside it, from the chain's first snapshot", same(first_truth, hand.state(0)))
    with tempfile.TemporaryDirectory() as folder:
        loaded, _ = load(folder, save(folder, snapshot_of(position, parts)), stage.slabs)
    stage.close(0)
    stage.close(1)
    stage.restore(0, position, loaded.parts)
    say("restored from disk", same(truth, hand.state(0)))
    stage.close(0)
    stage.check()
    stage.stop()

    small = Hand(shape, device, 12, 24)
    small.run(0, 10 * PAGE)
    truth = small.state(0)
    small.hold_copies()
    small.run(1, 12 * PAGE)  # takes every place: those pages go away while their copies are late
    gone = sum(page.place is None for page in small.stage._tables[0].pages)
    small.stage.close(1)
    small.stage.pool.tick([small.stage._tables[0]])
    small.stage.pool.page_in(small.stage._tables[0])
    small.stage.pool.join()
    kv = len(truth) - len(small.stage.pool.kv)
    say(f"{gone} of 10 pages went away and came back", gone == 10 and same(truth[kv:], small.state(0)[kv:]))
    small.stage.stop()
    return good


def milliseconds(device: torch.device, what: Callable[[], object]) -> tuple[float, float]:
    """Until the call returns, and until the device has done it."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    synchronize()
    start = time.perf_counter()
    what()
    returned = time.perf_counter()
    synchronize()
    return (returned - start) * 1e3, (time.perf_counter() - start) * 1e3


class Longest:
    """The longest time between two launches of something small, as decode steps would be, while a capture goes on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._small = torch.zeros(1024, device=device)

    def after(self, capture: Callable[[], list[Part]]) -> tuple[float, float, float]:
        """Milliseconds: the call, then the longest of the launches, and until its copies are complete."""
        start = last = time.perf_counter()
        parts = capture()
        took, longest = time.perf_counter() - start, 0.0
        last = time.perf_counter()
        while not copies_done(parts):
            self._small.add_(1)
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        return took * 1e3, longest * 1e3, (last - start) * 1e3


def timings(shape: str, device: torch.device, tokens: int) -> dict[str, float]:
    hand = Hand(shape, device, tokens // PAGE + 2)
    stage, captures = hand.stage, list[float]()
    if stage.slabs is not None:
        stage.slabs.spare = lambda: 2 << 30  # as a RAM tier with so much left would say
    pause = PREFILL if device.type == "cuda" else 0.0
    kept: list[list[Part]] = []  # as the RAM tier keeps them
    for end in range(CHUNK, tokens + 1, CHUNK):
        hand.run(0, end)
        time.sleep(pause)
        captures.append(milliseconds(device, lambda: kept.append(stage.capture(0)))[0])
    time.sleep(pause)
    again = milliseconds(device, lambda: stage.capture(0))[0]
    snapshot = snapshot_of(tokens, kept[-1])
    truth = hand.state(0)

    def restore(parts: tuple[Part, ...]) -> float:
        stage.close(0)
        stage.close(1)
        return milliseconds(device, lambda: stage.restore(1, tokens, parts))[1]

    ram = [restore(snapshot.parts) for _ in range(6)]
    assert same(truth, hand.state(1)), "what was restored from RAM is what was captured"
    loads, disk = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        id = save(folder, snapshot)
        for _ in range(LOADS):
            loaded, took = load(folder, id, stage.slabs)
            loads.append(took)
            disk.append(restore(loaded.parts))
            assert same(truth, hand.state(1)), "what was restored from disk is what was captured"
    stage.stop()
    pages = sum(layer[: tokens // PAGE].nbytes for layer in stage.pool.kv)
    print(f"{tokens} tokens: pages {pages / 1e6:.0f} MB, the rest {snapshot.own_bytes / 1e6:.0f} MB")
    print(f"capture of {CHUNK} new tokens, until it returns: median {statistics.median(captures):.2f} ms", end=", ")
    print(f"longest {max(captures):.2f} ms; without new pages {again:.2f} ms")
    print(f"restore from RAM: first {ram[0]:.1f} ms, then median {statistics.median(ram[1:]):.1f} ms")
    print("from disk, load + restore:", *(f"{a:.0f} + {b:.0f} ms" for a, b in zip(loads, disk, strict=True)))
    return {
        "capture_ms": round(statistics.median(captures), 3),
        "capture_longest_ms": round(max(captures), 3),
        "restore_ram_ms": round(statistics.median(ram[1:]), 2),
        "capture_no_page_ms": round(again, 3),
        "load_disk_first_ms": round(loads[0], 2),
        "load_disk_ms": round(statistics.median(loads), 2),
        "restore_disk_ms": round(statistics.median(map(sum, zip(loads, disk, strict=True))), 2),
    }


def long_captures(shape: str, device: torch.device, tokens: int) -> dict[str, float]:
    """Of whole prompts at once: before there is a stock, then in memory that the one before gave back."""
    hand = Hand(shape, device, tokens // PAGE + 2)
    stage, longest, figures = hand.stage, Longest(device), dict[str, float]()
    if stage.slabs is not None:
        stage.slabs.spare = lambda: 2 << 30
    longest.after(lambda: [])
    for name in ("dry", "again", "third"):
        hand.run(0, tokens)
        truth = hand.state(0)
        parts: list[Part] = []

        def capture(parts: list[Part] = parts) -> list[Part]:
            parts += stage.capture(0)
            return parts

        took, gap, complete = longest.after(capture)
        print(f"capture of {tokens} new tokens, {name}: returns after {took:.2f} ms", end="")
        print(f", complete after {complete:.0f} ms; launches meanwhile take {gap:.2f} ms at most", flush=True)
        stage.close(0)
        stage.restore(1, tokens, parts)
        assert same(truth, hand.state(1)), "what was restored is what was captured"
        stage.close(1)
        figures |= {f"long_capture_{name}_ms": round(took, 2), f"long_capture_{name}_gap_ms": round(gap, 2)}
    stage.stop()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3.6-35b-a3b", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda:0"))
    options = parser.parse_args()
    gc.collect()
    gc.freeze()  # as the server does
    good = check(options.shape, options.device)
    figures = timings(options.shape, options.device, options.tokens)
    figures |= long_captures(options.shape, options.device, options.tokens)
    print(json.dumps({"ok": good, **figures, "goals": GOALS}))
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())

"""Check, then time, the KV pool on a GPU: PYTHONPATH=src python3 scripts/gpu/check_pool.py

Reading a pool smaller than the sequence against one that holds it all: a tiny model in a stage whose copies are held
up; the same with a pool that is lent expert slots and gives them back while steps are recorded, and with one that has
the memory of sequence slots until sequences come; then both modes, paging and snapshots included, with hand-made
queries and keys; then what streaming costs at the attention shape of the 27B model. The table comes last. Exit code 1:
a check failed. --stage stops after the tiny models; --device cpu does too, and tries that part of this script.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.bench.synth import write_synthetic
from rekindle.experts import ExpertSet, RoutingCounts, SpanExperts
from rekindle.kernels.attention import store_kv
from rekindle.kernels.attention.rows import KV_DTYPES, row_size
from rekindle.kernels.device_memory import DeviceMemory, PagePlaces
from rekindle.kernels.pinning import pin
from rekindle.kernels.ragged import Ragged
from rekindle.layers import load_span
from rekindle.layers.base import page_shapes
from rekindle.layers.slot_memory import state_slots
from rekindle.pool import KvMode, PagePool, PoolReader
from rekindle.snapshots.slabs import Slabs
from rekindle.spec import PAGE
from rekindle.stages import LocalStage
from rekindle.weights import open_weights

CUDA = torch.device("cuda:0")
LATE = 100_000_000  # clock cycles that copies to the host are held up by: a twentieth of a second
NEAR = 0.05  # of the largest logit: other splits of the pages round differently …
NEAR_FLOAT32 = 0.005  # … and these in float32, beside KV in 16 bits


class Hand:
    """One sequence whose queries, keys and values are given instead of computed."""

    def __init__(
        self, shape: tuple[int, int, int, int], places: int, host: int, mode: KvMode = "exact", kv_type: str = "bf16"
    ) -> None:
        self.layers, self.heads, self.kv_heads, self.dim = shape
        row = row_size(kv_type, self.dim)
        self.pool = PagePool(places, self.layers, self.kv_heads, row, KV_DTYPES[kv_type], CUDA, host)
        self.reader = PoolReader(self.pool, mode)
        self.table = self.pool.new_table()

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        position, rows = self.table.position, len(q)
        self.reader.prepare([Segment(0, position, (0,) * rows)], [self.table], rewindable=False)

        def int32(values: object) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=CUDA)

        (pages,) = self.reader.segment_pages()
        positions = torch.arange(position, position + rows, dtype=torch.int32, device=CUDA)
        ragged = Ragged(
            starts=int32([0, rows]),
            slots=int32([0]),
            row_positions=positions,
            row_places=positions - pages.skipped * PAGE,
            row_segments=int32([0] * rows),
            tables=int32(pages.places.tolist()),
            lengths=(rows,),
            noted=None if pages.noted is None else int32([[pages.noted], [pages.table]]),
            far=pages.far,
            coming=pages.coming,
        )
        outs = []
        for layer in range(self.layers):
            store_kv(self.pool.kv[layer], k + layer, v - layer, ragged)
            outs.append(self.reader.attend(layer, q, ragged, self.dim**-0.5))
        self.table.position += rows
        self.reader.advance()
        return torch.stack(outs)


def rows_of(hand: Hand, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator(CUDA).manual_seed(seed)

    def values(heads: int) -> torch.Tensor:
        return torch.randn(count, heads, hand.dim, generator=draw, device=CUDA, dtype=torch.bfloat16)

    return values(hand.heads), values(hand.kv_heads), values(hand.kv_heads)


def drive(hand: Hand, pages: int, decode: int) -> list[torch.Tensor]:
    """Prefill in chunks of 512, then decode; the outputs of all decode rows and of the last chunk."""
    outs = []
    for at in range(0, pages * PAGE, 512):
        outs = [hand.run(*rows_of(hand, 512, at))]
    return outs + [hand.run(*rows_of(hand, 1, 10_000_000 + i)) for i in range(decode)]


def worst(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x.float() - y.float()).abs().max()) for x, y in zip(a, b, strict=True))


def check() -> bool:
    shape, good = (2, 8, 2, 128), True

    def say(name: str, off: float, bound: float) -> None:
        nonlocal good
        good &= off <= bound
        print(f"{'ok ' if off <= bound else 'BAD'} {name}: off by {off:.2e}, bound {bound:.0e}", flush=True)

    full = drive(Hand(shape, 200, 0), 160, 130)
    for places in (10, 40, 161):
        small = Hand(shape, places, 200)
        say(f"exact, 160 pages in {places} places", worst(full, drive(small, 160, 130)), 2e-2)
        small.pool.check()
        print("   ", small.pool.counts)
    one = (1, *shape[1:])  # in sparse mode a layer has a pool of its own
    plain, roomy = (drive(Hand(one, 200, 0, mode), 160, 130) for mode in ("exact", "sparse"))
    say("sparse, pool as large as the sequence", worst(plain, roomy), 0)
    sparse = Hand(one, 20, 200, "sparse")
    drive(sparse, 160, 130)
    print("    sparse in 20 places:", sparse.pool.counts)
    good &= sparse.pool.counts.skipped > 0
    packed = drive(Hand(shape, 60, 0, kv_type="q8"), 48, 5)
    pooled = drive(Hand(shape, 10, 60, kv_type="q8"), 48, 5)
    say("q8, 48 pages in 10 places, against q8 in full", worst(packed, pooled), 2e-2)
    say("q8 against bf16", worst(packed, drive(Hand(shape, 60, 0), 48, 5)), 5e-2)
    hand = Hand(shape, 24, 100)
    drive(hand, 16, 0)
    table = hand.table
    before = [[layer[page.place].clone() for layer in hand.pool.kv] for page in table.pages]
    other = hand.pool.new_table()
    hand.pool.tick([other])
    hand.pool.extend(other, 24 * PAGE)
    for layer in hand.pool.kv:
        layer.zero_()
    gone = sum(page.place is None for page in table.pages)
    hand.pool.clear(other)
    hand.pool.page_in(table)
    hand.pool.join()
    now = [[layer[page.place] for layer in hand.pool.kv] for page in table.pages]
    same = all(torch.equal(a, b) for x, y in zip(before, now, strict=True) for a, b in zip(x, y, strict=True))
    print(f"{'ok ' if same and gone == 16 else 'BAD'} {gone} of 16 pages went and came back with the same bytes")
    return good and same and gone == 16


def run_stage(stage: LocalStage, length: int, decode: int) -> list[torch.Tensor]:
    """The last logits of every chunk and step. The host waits for none of them; pages that leave do so late."""
    tokens = np.random.default_rng(3).integers(0, 500, length + decode).tolist()
    ends = [*range(128, length + 1, 128), *range(length + 1, length + decode + 1)]
    outs = list[torch.Tensor]()
    for start, end in zip([0, *ends], ends, strict=False):
        if stage.model.device.type == "cuda":
            with torch.cuda.stream(stage.pool.copies._stream):
                torch.cuda._sleep(LATE)
        logits = stage.forward(Batch((Segment(0, start, tuple(tokens[start:end]), Wanted.LAST),)), None).logits
        assert logits is not None, "logits were wanted"
        outs.append(logits[-1])
    return outs


def poison_and_pin(device: torch.device, address: int, nbytes: int) -> Callable[[], object] | None:
    """Memory in which every bf16 is no number, so that whoever reads it too early is found out."""
    ctypes.memset(address, 255, nbytes)
    return pin(device, address, nbytes)


def check_stage(device: torch.device) -> bool:
    """A sequence in a pool of a sixteenth of it: what leaves at one chunk is attended in the same chunk, and must not
    be read before its copy is there."""
    kind, dtype = ("f32", torch.float32) if device.type == "cpu" else ("bf16", torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        file = open_weights(write_synthetic(Path(folder) / "tiny.gguf", "tiny"))
        model = load_span(file, file.spec.whole, device, dtype)
    length, decode = 2048, 8  # 33 pages
    pooled, full = LocalStage(model, 1, 2, kind, 40), LocalStage(model, 1, 40, kind)
    if device.type == "cuda":
        pooled.pool.copies.stop()  # it has made some slabs already
        pooled.pool.copies._use(Slabs(pin=partial(poison_and_pin, device)))
    got, truth = (torch.stack(run_stage(stage, length, decode)).float() for stage in (pooled, full))
    off = float((got - truth).abs().max() / truth.abs().max())
    good = off <= NEAR and pooled.paging().page_outs >= length // PAGE - 2
    print(f"{'ok ' if good else 'BAD'} a stage, 33 pages in 2 places, late copies: off by {off:.4f}, bound {NEAR}")
    print("   ", pooled.paging(), flush=True)
    pooled.check()
    for stage in (pooled, full):
        stage.stop()
    return good


class Whims:
    """Lends all units for a few steps, then none for a few."""

    def __init__(self, units: int) -> None:
        self.units, self.asked = units, 0

    def decide(self, *_: object) -> int:
        self.asked += 1
        return self.units if self.asked // 5 % 2 == 0 else self.units // 3 if self.asked % 2 else 0


def check_trade(device: torch.device) -> bool:
    """Memory changes hands every few steps, recorded or not; the answers are those of all hot and full KV."""
    kind, dtype = "f32" if device.type == "cpu" else "f16", torch.float32  # a rounded router would choose other experts
    with tempfile.TemporaryDirectory() as folder:
        file = open_weights(write_synthetic(Path(folder) / "tiny-moe.gguf", "tiny-moe"))
        spec = file.spec
        shapes = page_shapes(spec, spec.whole, kind)
        pages = PagePlaces(next(iter(shapes.values())).page_bytes, len(shapes), 5)
        memory = DeviceMemory(pages, 1 << 26, device)
        experts, used = spec.ffn.experts, spec.ffn.used
        plan = SpanExperts(
            [range(experts - used)] * spec.layers, [used] * spec.layers, RoutingCounts(spec.layers, experts),
            lendable=[experts - 2 * used] * spec.layers, memory=memory,
        )  # fmt: skip
        cold = load_span(file, spec.whole, device, dtype, experts=plan)
        full = load_span(file, spec.whole, device, dtype)
    length, decode = 1024, 64
    traded = LocalStage(cold, 1, 4, kind, 40, table_width=20, memory=memory)
    plain = LocalStage(full, 1, 40, kind)
    assert traded._trade is not None, "it shares memory"
    traded._trade._trader = Whims(len(traded._trade._units))  # type: ignore[assignment]
    got, truth = (torch.stack(run_stage(stage, length, decode)).float() for stage in (traded, plain))
    off = float((got - truth).abs().max() / truth.abs().max())
    moves, steps = traded._trade.moves, traded.work()
    good = (
        off <= NEAR_FLOAT32
        and min(moves.values()) > 0
        and (device.type == "cpu" or steps["step:recorded"] > decode // 2)
    )
    print(f"{'ok ' if good else 'BAD'} memory that changes hands: off by {off:.4f}, bound {NEAR_FLOAT32}")
    print(f"    places {dict(moves)}, {steps['step:recorded']} steps recorded", flush=True)
    traded.check()
    for ffn in traded.model.routed:
        if isinstance(ffn, ExpertSet):
            ffn.residency.check()
    for stage in (traded, plain):
        stage.stop()
    return good


def come_and_go(stage: LocalStage, slots: int, length: int, decode: int) -> list[torch.Tensor]:
    """One long sequence, beside which others are opened, restored and closed. The last logits of all of them."""
    tokens = np.random.default_rng(4).integers(0, 500, length + decode).tolist()
    outs = list[torch.Tensor]()

    def run(slot: int, start: int, end: int) -> None:
        logits = stage.forward(Batch((Segment(slot, start, tuple(tokens[start:end]), Wanted.LAST),)), None).logits
        assert logits is not None, "logits were wanted"
        outs.append(logits[-1])

    stage.open(0)
    for start in range(0, length, 128):
        run(0, start, start + 128)
    for step in range(decode):
        slot = 1 + step % (slots - 1)
        if step % 3 == 2:
            stage.restore(slot, length + step, stage.capture(0))
            run(slot, length + step, length + step + 1)
        else:
            stage.open(slot)
            run(slot, 0, 70)
        run(0, length + step, length + step + 1)
        if step % 2:  # else it stays until its turn comes again
            stage.close(slot)
    return outs


def fill_with_no_numbers(stage: LocalStage) -> None:
    """Whenever memory changes hands, before the other side writes there."""
    idle = stage._idle
    assert idle is not None, "it lends its slots"
    lend, take_back = idle.lend, idle.take_back

    def lend_filled(slot: int) -> None:
        if slot not in idle:
            for layer in stage.pool.kv:
                layer[list(idle._places[slot])] = torch.nan
        lend(slot)

    def take_back_filled(slot: int) -> None:
        lent = slot in idle
        take_back(slot)
        for state in stage._state.layers.values() if lent else ():
            for tensor in state.cleared(slot):
                tensor.fill_(torch.nan)

    idle.lend, idle.take_back = lend_filled, take_back_filled  # type: ignore[method-assign]


def check_idle_slots(device: torch.device) -> bool:
    """Sequences come into slots whose memory holds pages; the answers are those of memory that is there for good."""
    kind, slots, dtype = "f32" if device.type == "cpu" else "f16", 8, torch.float32
    with tempfile.TemporaryDirectory() as folder:
        file = open_weights(write_synthetic(Path(folder) / "tiny.gguf", "tiny"))
        model = load_span(file, file.spec.whole, device, dtype)
    shapes = page_shapes(file.spec, file.spec.whole, kind)
    pages = PagePlaces(next(iter(shapes.values())).page_bytes, len(shapes), 13)
    memory = DeviceMemory(pages, 0, device, state_slots(file.spec, file.spec.whole, slots))
    lends, plain = (
        LocalStage(model, slots, 12, kind, 200, table_width=20, memory=memory),
        LocalStage(model, slots, 200, kind),
    )
    fill_with_no_numbers(lends)
    length, decode = 1024, 24
    got, truth = (torch.stack(come_and_go(stage, slots, length, decode)).float() for stage in (lends, plain))
    off = float((got - truth).abs().max() / truth.abs().max())
    moved, steps = lends.paging(), lends.work()
    good = off <= NEAR_FLOAT32 and moved.page_outs > 0 and (device.type == "cpu" or steps["step:recorded"] > decode)
    print(
        f"{'ok ' if good else 'BAD'} slots that hold pages until sequences come: off by {off:.4f}, bound {NEAR_FLOAT32}"
    )
    print(f"    {moved}, {steps['step:recorded']} steps recorded", flush=True)
    lends.check()
    for stage in (lends, plain):
        stage.stop()
    return good


def hands_of(shape: tuple[int, int, int, int], places: int, host: int, mode: KvMode) -> list[Hand]:
    """All layers of one sequence: in one pool, or in sparse mode, where a layer chooses its pages, in one each."""
    if mode == "exact":
        return [Hand(shape, places, host, mode)]
    return [Hand((1, *shape[1:]), places, host, mode) for _ in range(shape[0])]


def milliseconds(hands: list[Hand], times: int = 20) -> float:
    """Of one decode row in all layers."""
    rows = rows_of(hands[0], 1, 5)
    spent = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for hand in hands:
            hand.run(*rows)
        torch.cuda.synchronize()
        spent.append((time.perf_counter() - start) * 1e3)
    return statistics.median(spent)


def timings() -> None:
    link = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    to = torch.empty_like(link, device=CUDA)
    to.copy_(link)
    torch.cuda.synchronize()
    start = time.perf_counter()
    to.copy_(link)
    torch.cuda.synchronize()
    print(f"one copy of 1 GiB from pinned memory: {link.nbytes / (time.perf_counter() - start) / 1e9:.1f} GB/s")
    shape, pages = (4, 24, 4, 256), 512
    page_bytes = 2 * PAGE * 4 * 256 * 2
    lines = []
    timed: tuple[tuple[KvMode, int], ...] = (
        ("exact", 600), ("exact", 256), ("exact", 64), ("sparse", 64), ("sparse", 256),
    )  # fmt: skip
    for mode, places in timed:
        hands = hands_of(shape, places, 700, mode)
        start = time.perf_counter()
        for hand in hands:
            drive(hand, pages, 3)
        torch.cuda.synchronize()
        filled = time.perf_counter() - start
        took = milliseconds(hands)
        away = sum(page.place is None for page in hands[0].table.pages) if mode == "exact" else 0
        rate = away * page_bytes * shape[0] / took / 1e6
        lines.append(
            f"{mode:6} {places:4} places: {took:7.2f} ms a decode row of 4 layers, {away} pages streamed "
            f"({rate:5.1f} GB/s); prefill of 32,768 tokens {filled:5.2f} s"
        )
    print("one sequence of 512 pages, 24/4 heads of 256, bf16, 4 attention layers, attention alone")
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default=str(CUDA))
    parser.add_argument("--stage", action="store_true")
    given = parser.parse_args()
    passed = check_stage(torch.device(given.device))
    passed &= check_trade(torch.device(given.device))
    passed &= check_idle_slots(torch.device(given.device))
    if given.device != "cpu" and not given.stage:
        passed &= check()
        timings()
    sys.exit(0 if passed else 1)

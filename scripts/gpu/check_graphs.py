"""Recorded steps against the same steps unrecorded: PYTHONPATH=src python3 scripts/gpu/check_graphs.py

A tiny random model. Chunks of many lengths, behind one another, behind a restore, of several prompts at once and in
sections, with steps of others in between (to the bit); decode alone and beside others, sparse decode over page edges,
blocks to verify with every way back; bf16 and q8 KV. Blocks of several sequences, whose recorded steps have other
numbers of rows, are computed in float32, so that a fault does not pass for rounding. So are chunks whose cold experts
pass through the staging area while experts change places; the experts of all layers alone, one behind the other, have
the very bits of unrecorded ones. On a GPU also draws, with the tokens of unrecorded ones, and steps that wait for pages
under way, handed over far ahead of the device. The last line says how many of the checks failed; exit code 1 if any
did. With --device cpu the steps are run again instead of replayed, which tries this script itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.bench.synth import write_synthetic
from rekindle.engine.recorded_draws import RecordedDraws
from rekindle.engine.sampler import draw
from rekindle.engine.token_counts import TokenCounts
from rekindle.engine.types import Sampling
from rekindle.experts import CostModel, ExpertSet, RoutingCounts, SpanExperts
from rekindle.layers import load_span
from rekindle.layers.span import ModelSpan
from rekindle.pool import Recorder
from rekindle.pool.page_ins import PageIns
from rekindle.snapshots.types import Part, wait_for
from rekindle.stages import LocalStage
from rekindle.stages.graphs import GraphRecorder
from rekindle.weights import open_weights

NEAR = 0.05  # of the largest logit: other splits and row counts round differently …
NEAR_FLOAT32 = 0.005  # … and these in float32, beside KV in 16 bits
TOKENS = np.random.default_rng(3).integers(0, 500, 4096).tolist()


def again(step: Callable[[], None], warm: Callable[[], None] | None = None) -> Callable[[], None]:
    step()
    return step


class Pair:
    """A stage that records and one that does not, fed alike; says how far apart their logits come."""

    def __init__(self, model: ModelSpan, kv_type: str, **options: object) -> None:
        cpu = model.device.type == "cpu"
        made = {"slots": 4, "pages": 64, "kv_type": kv_type, "record": again if cpu else None, **options}
        self.recorded, self.plain = LocalStage(model, **made), LocalStage(model, **made)  # type: ignore[arg-type]
        self.plain._recording = None
        self.worst = 0.0

    def run(self, *segments: Segment, rewindable: bool = False) -> None:
        batch = Batch(segments, rewindable)
        a, b = (stage.forward(batch, None).logits for stage in (self.recorded, self.plain))
        if a is not None and b is not None:
            off = (a.float() - b.float()).abs().max() / b.float().abs().max()
            self.worst = max(self.worst, float(off)) if off.isfinite() else float("inf")

    def prefill(self, slot: int, length: int) -> None:
        for at in range(0, length, 256):
            self.run(Segment(slot, at, tuple(TOKENS[at : min(at + 256, length)]), Wanted.LAST))

    def decode(self, *at: tuple[int, int]) -> None:
        self.run(*(Segment(slot, position, (TOKENS[position],), Wanted.LAST) for slot, position in at))

    def verify(self, slot: int, position: int, rows: int, keep: int) -> None:
        self.run(Segment(slot, position, tuple(TOKENS[position : position + rows]), Wanted.ALL), rewindable=True)
        for stage in (self.recorded, self.plain):
            stage.rewind(slot, position + keep)

    def verify_all(self, at: list[int], rows: list[int], keep: list[int]) -> None:
        """Blocks of slots 0, 1, … in one step."""
        texts = [tuple(TOKENS[start : start + count]) for start, count in zip(at, rows, strict=True)]
        blocks = (Segment(slot, at[slot], text, Wanted.ALL) for slot, text in enumerate(texts))
        self.run(*blocks, rewindable=True)
        for stage in (self.recorded, self.plain):
            for slot, count in enumerate(keep):
                stage.rewind(slot, at[slot] + count)


def alone(pair: Pair) -> None:
    pair.prefill(1, 120)
    for at in range(120, 200):
        pair.decode((1, at))


def beside(pair: Pair) -> None:
    for slot, length in enumerate((70, 1100, 5)):
        pair.prefill(slot, length)
    for step in range(10):
        pair.decode(*((slot, length + step) for slot, length in enumerate((70, 1100, 5))))


def chunks(pair: Pair) -> None:
    """Of 2 to 512 rows, behind one another; one that runs again behind a restore has the same bits."""
    for slot, lengths in enumerate((range(2, 60, 3), (63, 64, 65, 95, 97, 128, 129, 130), (191, 255, 384, 500, 512))):
        at = 0
        for rows in lengths:
            pair.run(Segment(slot, at, tuple(TOKENS[at : at + rows]), Wanted.LAST))
            at += rows
        pair.decode((slot, at))
        parts = pair.recorded.capture(slot)
        chunk = tuple(TOKENS[at + 1 : at + 101])
        straight, again = (
            pair.recorded.forward(Batch((Segment(s, at + 1, chunk, Wanted.LAST),)), None).logits
            for s in (slot, _restored(pair, at + 1, parts))
        )
        if straight is None or again is None or not torch.equal(straight, again):
            pair.worst = float("inf")
        pair.recorded.close(3)


def shared(pair: Pair) -> None:
    """Chunks of two to four prompts in one step, behind one another."""
    at = [0, 0, 0, 0]
    for lengths in ((64, 512), (100, 3, 200), (512, 512, 512, 512), (1, 77, 9, 30)):
        pair.run(*(Segment(slot, at[slot], _text(at[slot], n), Wanted.LAST) for slot, n in enumerate(lengths)))
        for slot, count in enumerate(lengths):
            at[slot] += count
    pair.decode(*enumerate(at))


def paused(pair: Pair) -> None:
    """Chunks in sections, between which others decode and verify, have the bits of whole ones; so has the state."""
    stage, beside, at = pair.recorded, 60, 0
    pair.prefill(2, beside)
    for rows in (64, 200, 512, 1000, 130):
        segments = [Segment(slot, at, _text(at, rows), Wanted.LAST) for slot in (0, 1)]
        whole = stage.forward(Batch((segments[0],)), None).logits
        forward = stage.begin(Batch((segments[1],)))
        while forward.left:
            forward.go_on(1)
            pair.verify(2, beside, 5, 3)
            pair.decode((2, beside + 3))
            beside += 4
        ended = forward.result().logits
        if whole is None or ended is None or not torch.equal(whole, ended):
            pair.worst = float("inf")
        at += rows
    captured = [stage.capture(slot) for slot in (1, 0)]
    wait_for([part for those in captured for part in those])
    for ours, theirs in zip(*captured, strict=True):
        if not all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in theirs.tensors):
            pair.worst = float("inf")


def _text(at: int, count: int) -> tuple[int, ...]:
    return tuple(TOKENS[at : at + count])


def whole(pair: Pair) -> None:
    """Chunks without padding, so that a choice of experts does not hang on how many rows are multiplied; and rows of
    two sequences before any of one."""
    for slot in (0, 1):
        at = 0
        for rows in (8, 32, 64, 128, 256, 512):
            pair.run(Segment(slot, at, tuple(TOKENS[at : at + rows]), Wanted.LAST))
            at += rows
    for step in range(4):
        pair.decode((0, at + step), (1, at + step))
    pair.decode((0, at + 4))


def streamed(pair: Pair) -> None:
    """Chunks without padding, whose cold experts are those that are chosen, all that are missing or whole groups."""
    at = 0
    for turn, rows in enumerate((16, 32, 64, 256, 512, 16, 256, 64, 32)):
        exchange(cold_sets(pair.plain.model), turn)
        pair.run(Segment(0, at, _text(at, rows), Wanted.LAST))
        at += rows


def cold_sets(model: ModelSpan) -> list[ExpertSet]:
    return [ffn for ffn in model.routed if isinstance(ffn, ExpertSet)]


def exchange(layers: Sequence[ExpertSet], turn: int) -> None:
    """One hot expert of every layer that has any, for a cold one."""
    for number, experts in enumerate(layers):
        hot = experts.residency.hot
        cold = [expert for expert in range(experts.residency.experts) if expert not in hot]
        if hot:
            experts.swap(hot[(turn + number) % len(hot)], cold[turn % len(cold)])


@torch.inference_mode()
def experts_alone(model: ModelSpan) -> bool:
    """The experts of all layers, one behind the other, as one recorded step that is replayed while they change places:
    nothing is between the layers, so that copies and products meet in the staging area as often as can be."""
    layers = cold_sets(model)
    record = again if model.device.type == "cpu" else GraphRecorder(model.device)
    for rows in (16, 64, 300):
        h = torch.randn(rows, model.spec.hidden, device=model.device)
        out = torch.empty_like(h)

        def step(h: torch.Tensor = h, out: torch.Tensor = out) -> None:
            for experts in layers:
                experts.begin(h.shape[0])
            x = h
            for experts in layers:
                x = h + experts.forward(x)
            out.copy_(x)

        replay = record(step)
        for turn in range(12):
            exchange(layers, turn)
            h.normal_()
            replay()
            recorded = out.clone()
            step()
            if not (recorded.isfinite().all() and torch.equal(recorded, out)):
                return False
    return True


def _restored(pair: Pair, position: int, parts: list[Part]) -> int:
    pair.recorded.restore(3, position, parts)
    return 3


def blocks(pair: Pair) -> None:
    at = 55
    pair.prefill(2, at)
    for rows in range(1, 25):
        for keep in {0, rows // 2, rows}:
            pair.verify(2, at, rows, keep)
            at += keep
        pair.decode((2, at))
        at += 1


def together(pair: Pair) -> None:
    """Blocks of several sequences in one step, each gone back into by itself."""
    at = [55, 130, 7]
    for slot, start in enumerate(at):
        pair.prefill(slot, start)
    for step in range(24):
        widths = [1 + (5 * step + 7 * slot) % 16 for slot in range(3)]
        keeps = [1 + (step + slot) % width for slot, width in enumerate(widths)]
        pair.verify_all(at, widths, keeps)
        at = [start + keep for start, keep in zip(at, keeps, strict=True)]
        pair.decode(*enumerate(at))
        at = [start + 1 for start in at]


def edges(pair: Pair) -> None:
    pair.prefill(0, 1500)
    for at in range(1500, 1640):
        pair.decode((0, at))
    for at in range(1640, 1800, 10):
        pair.verify(0, at, 16, 10)


def under_way(device: torch.device, record: Recorder) -> bool:
    """Replays that wait for what is handed over, several of them while the device still sleeps: each finds its own.

    (An event that was looked at when a graph runs, not when it is launched, would be waited for by the replay before,
    or by nobody.) record: who records the handing over.
    """
    returns = PageIns(1, device)
    page, seen = torch.zeros(1, device=device), torch.zeros(1, device=device)

    def fetch() -> None:
        torch.cuda._sleep(2_000_000)  # clock cycles: a millisecond
        page.add_(1)
        returns.all_handed_over(0)

    def step() -> None:
        returns.wait_for(0)
        seen.copy_(page)

    with returns.handing_over():
        bring = record(fetch)
    returns.join()
    replay, found, before = GraphRecorder(device)(step), list[torch.Tensor](), int(page)
    torch.cuda._sleep(200_000_000)
    for _ in range(8):
        returns.join()
        with returns.handing_over():
            bring()
        replay()
        found.append(seen.clone())
    ahead = not torch.cuda.current_stream(device).query()
    return ahead and [int(value) - before for value in found] == list(range(1, 9))


@dataclass
class PaperRow:
    """A row to draw from, of a sequence of its own."""

    sampling: Sampling
    position: int
    mask: np.ndarray | None = None
    drafted: tuple[int, ...] = ()
    in_block: bool = False
    forced: int | None = None
    prompt_length: int = 40
    tokens: list[int] = field(default_factory=lambda: list(TOKENS[:60]))
    token_counts: TokenCounts = field(default_factory=TokenCounts)


def paper_row(dice: np.random.Generator, top_k: int, vocab: int) -> PaperRow:
    penalty = float(dice.choice([0.0, 1.5]))
    sampling = Sampling(
        temperature=float(dice.choice([0.0, 0.7, 1.3])),
        top_k=top_k,
        top_p=0.9,
        min_p=0.01,
        seed=int(dice.integers(1 << 40)),
        presence_penalty=penalty,
        repetition_penalty=1 + penalty / 5,
    )
    mask = dice.integers(-(2**31), 2**31, -(-vocab // 32)).astype(np.int32) if dice.random() < 0.4 else None
    return PaperRow(sampling, 60, mask, forced=7 if dice.random() < 0.1 else None)


def draws(device: torch.device, vocab: int = 100_003) -> bool:
    """Recorded draws against unrecorded ones, of fresh sequences and of the same ones a token later."""
    dice, record = np.random.default_rng(5), again if device.type == "cpu" else GraphRecorder(device)
    recorded = RecordedDraws(record, device, vocab, slots=8)
    for trial in range(24):
        rows = [paper_row(dice, (0, 20, 64)[trial % 3], vocab) for _ in range(int(dice.integers(1, 9)))]
        twins = [replace(row, token_counts=TokenCounts()) for row in rows]
        for position in (60, 61):
            logits = 4 * torch.randn(len(rows), -(-vocab // 4) * 4, device=device)[:, :vocab]
            for row in (*rows, *twins):
                row.position = position
            ours, theirs = recorded(logits, rows), draw(logits, twins)
            if not torch.equal(ours, theirs):
                return False
            for row, token in zip((*rows, *twins), (*ours.tolist(), *theirs.tolist()), strict=True):
                row.tokens.append(token)
    return True


def load(
    shape: str, device: torch.device, dtype: torch.dtype, hot: Sequence[int] | None = None, cache_slots: int = 0
) -> ModelSpan:
    """hot: experts of every layer; None: all."""
    with tempfile.TemporaryDirectory() as folder:
        file = open_weights(write_synthetic(Path(folder) / f"{shape}.gguf", shape))
        layers, plan = file.spec.layers, None
        if hot is not None:
            counts = RoutingCounts(layers, file.spec.ffn.experts)
            cost = CostModel.same_memory()  # so that the CPU is never chosen
            plan = SpanExperts([hot] * layers, [cache_slots] * layers, counts, cost, use_cpu=False)
        return load_span(file, file.spec.whole, device, dtype, experts=plan)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="of the checks of one model, those with these names; by commas")
    parser.add_argument("--draws", action="store_true", help="nothing but these")
    options = parser.parse_args()
    device, only = torch.device(options.device), options.only.split(",")
    if options.draws:
        good = draws(device)
        print(f"{'ok ' if good else 'BAD'} draws, with penalties, masks and forced tokens")
        sys.exit(not good)
    coarse = torch.float32 if device.type == "cpu" else torch.bfloat16
    model, experts = (load(shape, device, coarse) for shape in ("tiny", "tiny-moe"))
    sparse = {"pages": 12, "host_pages": 60, "kv_mode": "sparse", "rewind_rows": 16}
    failed = 0
    for kv_type in ("f32" if device.type == "cpu" else "bf16", "q8"):
        known = {"table_width": 64}  # so that chunks are recorded
        for work, choices in (
            (alone, {}),
            (beside, known),
            (whole, known),
            (chunks, known),
            (shared, known),
            (paused, known | {"rewind_rows": 16}),
            (blocks, {}),
            (edges, sparse),
        ):
            if options.only and work.__name__ not in only:
                continue
            pair = Pair(model, kv_type, **choices)
            work(pair)
            good = pair.worst <= NEAR
            failed += not good
            print(f"{'ok ' if good else 'BAD'} {work.__name__:7} {kv_type:4} off by {pair.worst:.4f}", flush=True)
    more = (
        ("whole, with experts", whole, experts, "f32" if device.type == "cpu" else "bf16", {"table_width": 64}, NEAR),
        (
            "blocks together, float32",
            together,
            load("tiny", device, torch.float32),
            "f16",
            {"rewind_rows": 16},
            NEAR_FLOAT32,
        ),
    )
    few, none = (load("tiny-moe", device, torch.float32, *cold) for cold in (((0, 3), 2), ((), 0)))
    for name, span in (("some cold", few), ("all cold", none)):
        more = *more, (f"streamed, {name}, float32", streamed, span, "f16", {"table_width": 64}, NEAR_FLOAT32)
        good = experts_alone(span)
        failed += not good
        print(f"{'ok ' if good else 'BAD'} experts alone, {name}, float32", flush=True)
    for name, work, span, kv_type, choices, near in more:
        pair = Pair(span, kv_type, **choices)
        work(pair)
        good = pair.worst <= near
        failed += not good
        print(f"{'ok ' if good else 'BAD'} {name}, off by {pair.worst:.4f}", flush=True)
    if device.type == "cuda":
        good = draws(device)
        failed += not good
        print(f"{'ok ' if good else 'BAD'} draws, with penalties, masks and forced tokens", flush=True)
    for how, record in (("one by one", again), ("recorded", GraphRecorder(device))) if device.type == "cuda" else ():
        good = under_way(device, record)
        failed += not good
        print(f"{'ok ' if good else 'BAD'} steps wait for their own pages under way, handed over {how}")
    print(f"{failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

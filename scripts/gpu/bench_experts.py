"""Cold experts on a GPU, 35B-A3B shape: checks that the answer stays, then times decode and prefill of the whole model.

    PYTHONPATH=src python3 scripts/gpu/bench_experts.py [--seconds 195] [--folder /dev/shm]

1. One layer: speed of the link by copy engine and by kernel, of the CPU threads, and of every split between the two.
2. Every way of one layer against all experts hot, on the same inputs.
3. The whole model (random weights, 20 GB, written first) with all, half and none of the 256 experts of a layer hot and
   a cache of 16, and with 80 hot and a cache of 64, as many slots as half has: logits against all hot; decode of forced
   random tokens through recorded steps, with the split as measured, with the link alone and with the CPU alone;
   prefill in chunks of 2,048 and 4,096.

Choices are uniform as the random routers make them; "skewed" scales the rows of each router by rank^-0.3, so that an
expert of low rank has large logits and is chosen often. The hot half are then the 128 of the lowest ranks, what counts
would choose. "As in use" follows a trace: an expert's logit is what the router gives (deviation 1), plus what this
conversation has for it (drawn once, deviation 1.17), plus what drifts (deviation 1.42, correlation 0.907 from token to
token). Cut to 128 experts, such a trace is found in least-recently-used caches of 8, 24, 49 and 81 experts 31, 75, 87
and 95 times of 100 over 256 tokens; 37, 74, 89 and 96 were counted with Qwen3-30B-A3B (pull request 1374 of kekzl/imp).
It is not known beforehand which experts a conversation uses: the hot ones are as good as drawn by lot there, and what
helps is the expert cache. The share of choices that missed is measured and shown.

Rows are said as they come; a phase that would begin after --seconds is left out and named. The short table comes last,
everything as JSON in $OUT.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from rekindle.batch import Batch, Segment, Wanted
from rekindle.bench.synth import write_synthetic
from rekindle.experts import CostModel, ExpertSet, RoutedFfn, RoutingCounts, SpanExperts, Way
from rekindle.experts import triton as cold_kernels
from rekindle.experts.counts import ROUND, LayerCounter
from rekindle.experts.packed import PackedWeights
from rekindle.experts.routed import make_expert_set
from rekindle.experts.stored import StoredExperts, StoredPart
from rekindle.experts.triton import fetch
from rekindle.kernels.matmul import make_matrix
from rekindle.kernels.matmul.packing import FORMATS
from rekindle.kernels.moe import SharedExpert, make_stack
from rekindle.kernels.moe import router as moe_kernels
from rekindle.kernels.moe.router import store_logits
from rekindle.layers import load_span
from rekindle.layers.span import ModelSpan
from rekindle.stages import LocalStage
from rekindle.weights import WeightFile, open_weights

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
EXPERTS, USED, HIDDEN, WIDTH, CACHE_SLOTS = 256, 8, 2048, 512, 16
SKEWS = {"skewed": 0.3, "skewed more": 0.45, "skewed most": 0.6}  # a router's rows shrink with this power of their rank
SLOW = CostModel(pcie=1e-6, host_call=0, host_expert=0, host_pair=0, device_pair=0)  # so that the CPU is chosen
FAST = CostModel.same_memory()
PEER = {"half": {"decode": 106, "prefill": 1467}, "none": {"decode": 69, "prefill": 1066}}
HOT = {
    "all": (EXPERTS, 0),
    "half": (128, CACHE_SLOTS),
    "none": (0, CACHE_SLOTS),
    "half, large cache": (80, 64),
}  # hot, cache
LIKED, DRIFT, KEPT = 1.17, 1.42, 0.907  # of the trace
FILLING = 200  # steps of the trace in which the cache fills
LOG: list[str] = []
STARTED = time.perf_counter()


def say(text: str) -> None:
    text = f"{time.perf_counter() - STARTED:6.1f} s  {text}" if text else ""
    print(text, flush=True)
    LOG.append(text)


def timed(work: Callable[[], object], repeats: int, warm: int = 2) -> float:
    """Seconds of one call."""
    for _ in range(warm):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


# ---- routers that follow a trace ----------------------------------------------------------------------------------


@triton.jit
def _lifted_logits(  # type: ignore[no-untyped-def]
    h, router, logits, rows, experts, hidden,
    BE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The logits, and for a single row what stands behind the router: a number for every expert."""
    store_logits(h, router, logits, rows, experts, hidden, BE, BM, BK, PDL)
    if BM == 1:
        tl.debug_barrier()
        e = tl.program_id(0) * BE + tl.arange(0, BE)
        logit = tl.load(logits + e, e < experts, other=0.0, cache_modifier=".cg")
        tl.store(logits + e, logit + tl.load(router + experts * hidden + e, e < experts, other=0.0), e < experts)


moe_kernels.store_logits = cold_kernels.store_logits = _lifted_logits


def lifted(router: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The router with a number for every expert behind it, which are nought; and those numbers."""
    room = torch.zeros(router.numel() + EXPERTS, device=CUDA)
    room[: router.numel()] = router.flatten()
    return room[: router.numel()].view(router.shape), room[router.numel() :]


def make_trace(layers: int, steps: int) -> torch.Tensor:
    """What is added to the logits: float32 [steps, layers, experts]."""
    rng = np.random.default_rng(11)
    liked, drift = (rng.standard_normal((layers, EXPERTS)) for _ in range(2))
    rows = np.empty((steps, layers, EXPERTS), np.float32)
    for row in rows:
        drift = KEPT * drift + (1 - KEPT**2) ** 0.5 * rng.standard_normal((layers, EXPERTS))
        row[:] = LIKED * liked + DRIFT * drift
    return torch.from_numpy(rows).to(CUDA)


# ---- one layer ---------------------------------------------------------------------------------------------------


def random_part(type: str, rows: int, columns: int, experts: int = EXPERTS) -> StoredPart:
    """Random codes and integer scales, with factors that make weights of about 1 / sqrt(columns)."""
    form = FORMATS[type]
    rng = np.random.default_rng(rows)
    raw = rng.integers(0, 256, (experts * rows * columns // form.weights, form.nbytes), dtype=np.uint8)
    size = 1 / (columns**0.5 * {"Q4_K": 200, "Q6_K": 1300}[type])
    for start in {"Q4_K": [0, 2], "Q6_K": [208]}[type]:
        factors = (size * rng.uniform(0.5, 1.5, (len(raw), 1))).astype(np.float16)
        raw[:, start : start + 2] = factors.view(np.uint8)
    return StoredPart(raw.reshape(experts * rows, -1), type, (experts, rows, columns))


class OneLayer:
    """The weights of one layer; `hot` and `cold` place them."""

    def __init__(self) -> None:
        gate, up = random_part("Q4_K", WIDTH, HIDDEN), random_part("Q4_K", WIDTH, HIDDEN)
        self.stored = StoredExperts((gate, up, random_part("Q6_K", HIDDEN, WIDTH)))
        one = [
            random_part("Q4_K", WIDTH, HIDDEN, 1),
            random_part("Q4_K", WIDTH, HIDDEN, 1),
            random_part("Q6_K", HIDDEN, WIDTH, 1),
        ]
        gate_, up_, down_ = (make_matrix(p.raw, p.type, p.shape[1:], CUDA, BF16) for p in one)
        self.shared = SharedExpert(gate_, up_, down_, torch.randn(HIDDEN, device=CUDA) / 45)
        self.router, _ = lifted(torch.randn(EXPERTS, HIDDEN, device=CUDA) / HIDDEN**0.5)

    def hot(self) -> RoutedFfn:
        gate, up, down = (make_stack(p.raw, p.type, p.shape, CUDA, BF16) for p in self.stored.parts)
        return RoutedFfn(self.router, USED, gate, up, down, self.shared)

    def cold(self, hot: list[int], cost: CostModel | None = FAST, use_cpu: bool = True) -> ExpertSet:
        counts = RoutingCounts(1, EXPERTS)
        plan = SpanExperts([hot], [CACHE_SLOTS], counts, cost, use_cpu=use_cpu)
        counter = LayerCounter(counts, 0, CUDA)
        return make_expert_set(self.stored, plan, 0, counter, self.router, USED, self.shared, CUDA, BF16)


def inputs(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed)).to(BF16)


def links(layer: OneLayer) -> None:
    """Bytes per second over the link, by copy engine and by a kernel that reads host memory; and by the CPU."""
    size = 256 << 20
    here = torch.empty(size, dtype=torch.uint8, device=CUDA)
    pinned = torch.zeros(size, dtype=torch.uint8).pin_memory()
    seconds = timed(partial(here.copy_, pinned, non_blocking=True), 5)
    say(f"link, copy engine: {size / seconds / 1e9:.1f} GB/s")
    experts = layer.cold([], None)
    weights = experts.weights
    assert isinstance(weights, PackedWeights)
    for count in (1, 4, 8):
        some = weights.at_place[:count]
        seconds = timed(partial(fetch, weights._to_staging[0], some, weights.places), 30)
        speed = count * weights.expert_bytes / seconds
        say(f"link, kernel, {count} experts of {weights.expert_bytes / 1e6:.2f} MB: "
            f"{seconds * 1e6:.0f} µs, {speed / 1e9:.1f} GB/s")  # fmt: skip
    seconds = timed(weights.fill_staging, 30)
    speed = weights.fill_staging() / seconds
    say(f"link, kernel of few programs, a part of the staging area: {seconds * 1e6:.0f} µs, {speed / 1e9:.1f} GB/s")
    helper = weights.cpu_experts
    if helper is None:
        say("the CPU takes no share: nothing gained, or no compiler")
        return
    x, total = torch.randn(1, HIDDEN, device="cuda"), torch.zeros(1, HIDDEN, device="cuda")
    for count in (1, 4, 8):
        slots, even = torch.full((1, count), -1, dtype=torch.int32, device="cuda"), torch.ones(1, count, device="cuda")
        turns = cycle(weights.at_place.split(count)[: weights.cold // count])  # others each time: no cache has them

        def ask(slots: Tensor = slots, even: Tensor = even, turns: Iterator[Tensor] = turns) -> None:
            helper.ask(x, next(turns)[None], slots.clone(), even)  # which it changes
            helper.collect(total)

        seconds = timed(ask, 30)
        speed = count * weights.expert_bytes / seconds
        say(f"CPU, {helper.stage.threads.threads} threads, {count} experts, asked by the device: "
            f"{seconds * 1e6:.0f} µs, {speed / 1e9:.1f} GB/s")  # fmt: skip
    say(f"measured: of 0, 1, … missing the CPU takes {helper.takes.tolist()}; {experts.cost}")


def ways(layer: OneLayer) -> bool:
    """Every way against all hot, on the same inputs."""
    all_hot, fine = layer.hot(), True
    cases: list[tuple[str, Way, CostModel, float, int]] = [
        ("cache", Way.CACHE, FAST, 0, 1),
        ("cache", Way.CACHE, FAST, 0, 4),
        ("cache + CPU", Way.CACHE, FAST, 0.5, 1),
        ("cache + CPU", Way.CACHE, FAST, 0.5, 4),
        ("cache, all by CPU", Way.CACHE, FAST, 1, 1),
        ("cache, all by CPU", Way.CACHE, FAST, 1, 2),
        ("stream", Way.STREAM, FAST, 0, 20),
        ("stream", Way.STREAM, FAST, 0, 512),
        ("stream", Way.STREAM, FAST, 0, 2048),
        ("host", Way.HOST, SLOW, 0, 2),
    ]
    shared_by_all = layer.cold(list(range(64)))
    for name, way, cost, share, rows in cases:
        helping = shared_by_all.weights.cpu_experts is not None
        if share and not helping:
            continue
        cold = shared_by_all if way is not Way.HOST else layer.cold(list(range(64)), cost, use_cpu=False)
        if cold.weights.cpu_experts is not None:
            cold.weights.cpu_experts.takes.copy_(taking(share, cold.weights.cpu_experts.box.pairs))
        assert cold.way(rows) is way, f"{rows} rows go by {cold.way(rows)}, not {way}"
        worst, same = 0.0, True
        for seed in range(6 if way is Way.CACHE else 3):
            if seed == 2:  # in the middle, someone is promoted
                cold.swap(cold.residency.hot[5], next(e for e in range(EXPERTS) if e not in cold.residency.hot))
            h = inputs(rows, 1000 + seed)
            cold.begin(rows)
            want, have = all_hot.forward(h), cold.forward(h)
            worst = max(worst, float((want.float() - have.float()).norm() / want.float().norm()))
            same = same and torch.equal(want, have)
            cold.poll(0)
        cold._finish_arrival()
        cold.residency.check()
        right = worst < 1.5e-2 and (same or name != "cache" or rows > 2)  # in one turn the same kernel reads the planes
        fine = fine and right
        verdict = "" if right else "  WRONG"
        say(f"check {name}, {rows} rows: relative error {worst:.1e}, same bits {same}{verdict}")
    say(f"two experts change places in {timed(partial(exchange_two, shared_by_all), 20) * 1e6:.0f} µs")
    return fine


def taking(share: float, pairs: int) -> torch.Tensor:
    """Of 0, 1, … missing experts the CPU takes this share."""
    return torch.tensor([int(share * missing) for missing in range(pairs + 1)], dtype=torch.int32)


def exchange_two(experts: ExpertSet) -> None:
    cold = next(e for e in range(EXPERTS) if e not in experts.residency.hot)
    experts.swap(experts.residency.hot[0], cold)


# ---- the whole model ---------------------------------------------------------------------------------------------


class Placed:
    """The model with so many experts of each layer hot."""

    def __init__(self, file: WeightFile, hot: int, cache_slots: int = CACHE_SLOTS) -> None:
        spec = file.spec
        plan = None
        if hot < EXPERTS:
            hots = [list(range(hot)) for _ in range(spec.layers)]
            plan = SpanExperts(hots, [cache_slots] * spec.layers, RoutingCounts(spec.layers, EXPERTS))
        self.span: ModelSpan = load_span(file, spec.whole, CUDA, BF16, experts=plan)
        torch.cuda.synchronize()
        self.lifts = []
        for ffn in self.span.routed:
            router, lift = lifted(ffn.router)
            object.__setattr__(ffn, "router", router)  # one of them is frozen
            self.lifts.append(lift)
        self.plain = [ffn.router.clone() for ffn in self.span.routed]
        self.rng = np.random.default_rng(0)
        self.vocab = spec.vocab
        self.stage = LocalStage(self.span, 2, 160, "bf16")

    @property
    def cold_layers(self) -> list[ExpertSet]:
        return [ffn for ffn in self.span.routed if isinstance(ffn, ExpertSet)]

    def skew(self, exponent: float) -> None:
        """In place, so that recorded steps see it; 0 is as it was."""
        for ffn, plain in zip(self.span.routed, self.plain, strict=True):
            rank = torch.arange(1, EXPERTS + 1, device=CUDA, dtype=torch.float32)
            ffn.router.copy_(plain * rank[:, None] ** -exponent)

    @property
    def takes(self) -> torch.Tensor | None:
        """Of 0, 1, … missing experts the CPU takes so many: one table for all layers, which recorded steps read too."""
        helpers = [ffn.weights.cpu_experts for ffn in self.cold_layers]
        return helpers[0].takes if helpers and helpers[0] is not None else None

    def log_chances(self, chunk: int = 512) -> torch.Tensor:
        """After a prompt of 512 and then each of 24 forced tokens: float32 [25, vocab], on the host."""
        rng = np.random.default_rng(5)
        tokens = rng.integers(0, self.vocab, 512 + 24).tolist()
        self.stage.open(0)
        rows = []
        for start, stop in [(at, at + chunk) for at in range(0, 512, chunk)] + [(at, at + 1) for at in range(512, 536)]:
            batch = Batch((Segment(0, start, tuple(tokens[start:stop]), Wanted.LAST),))
            found = self.stage.forward(batch, None).logits
            assert found is not None, "the last stage gives logits"
            if stop >= 512:
                rows.append(found[-1].float().cpu())
        self.stage.close(0)
        return torch.stack(rows).log_softmax(-1)

    def decode(self, traced: bool = False) -> tuple[float, float]:
        """(tok/s of forced random tokens, share of choices that missed). Along the trace counts move experts once, as
        they do every 256 tokens; else they stay where they are."""
        stage, position = self.stage, 0
        filling, looks, steps = (FILLING, 24, ROUND) if traced else (24, 8, 160)
        for ffn in self.cold_layers:
            ffn.counter.forget()
        tokens = self.rng.integers(0, self.vocab, steps + filling + 2 * looks + 8).tolist()
        trace = make_trace(len(self.lifts), len(tokens)) if traced else None
        stage.open(1)

        def step() -> None:
            nonlocal position
            if trace is not None:
                torch._foreach_copy_(self.lifts, list(trace[position]))
            stage.forward(Batch((Segment(1, position, (tokens[position],), Wanted.LAST),)), None)
            position += 1

        for _ in range(filling):
            step()
        missed = [self._missed_in(step) for _ in range(looks)] if self.cold_layers else [0.0]
        seconds = timed(step, steps, warm=4)
        stage.close(1)
        torch._foreach_zero_(self.lifts)
        return 1 / seconds, float(np.mean(missed))

    def along_trace(self) -> None:
        """Routers whose logits have a deviation of one."""
        for ffn, plain in zip(self.span.routed, self.plain, strict=True):
            ffn.router.copy_(plain / plain.norm(dim=1, keepdim=True))

    def _missed_in(self, step: Callable[[], None]) -> float:
        tables = torch.stack([ffn.residency.table for ffn in self.cold_layers])
        before = torch.stack([ffn.counter.tally for ffn in self.cold_layers])
        step()
        chosen = torch.stack([ffn.counter.tally for ffn in self.cold_layers]) - before
        if (chosen < 0).any():  # the tally was handed over in between
            return self._missed_in(step)
        return float(chosen[tables < 0].sum() / chosen.sum())

    def prefill(self, tokens: int, chunk: int) -> float:
        """tok/s of one prompt."""

        def prompt() -> None:
            self.stage.open(0)
            drawn = self.rng.integers(0, self.vocab, tokens).tolist()
            for start in range(0, tokens, chunk):
                segment = Segment(0, start, tuple(drawn[start : start + chunk]), Wanted.LAST)
                self.stage.forward(Batch((segment,)), None)

        seconds = timed(prompt, 2, warm=1)
        self.stage.close(0)
        return tokens / seconds


def whole_model(
    path: Path, placements: list[str], brief: bool, late: Callable[[str], bool], rows: list[dict[str, Any]]
) -> bool:
    """Whether the answers are those of all hot; the figures go into `rows`.

    Forty random layers amplify rounding, and near ties of a router flip experts. So the bound is taken from the model
    itself: cold experts may move log-probabilities by one and a half times what another chunk size moves them all hot.
    """
    file = open_weights(path)
    truth, floor, fine = torch.empty(0), 0.0, True
    for name in placements:
        if late(f"{name} hot"):
            break
        begin = time.perf_counter()
        placed = Placed(file, *HOT[name])
        takes = None if placed.takes is None else placed.takes[: USED + 1].tolist()
        say(f"{name} hot: loaded in {time.perf_counter() - begin:.1f} s, of 0, 1, … missing the CPU takes {takes}, "
            f"{torch.cuda.memory_allocated() / 2**30:.1f} GiB on the device")  # fmt: skip
        found = placed.log_chances()
        if name == "all":
            truth, found = found, placed.log_chances(chunk=128)
        off, same = float((truth - found).abs().mean()), int((truth.argmax(-1) == found.argmax(-1)).sum())
        floor = off if name == "all" else floor
        what = "chunks of 128 against one of 512" if name == "all" else "against all hot"
        say(f"check {name} hot: mean |Δ log p| {off:.4f} {what}, first token equal {same}/{len(truth)}")
        fine = fine and off <= 1.5 * floor
        rows.append({"hot": name, "choices": "uniform", "how": "as measured", **figures(placed)})
        say(f"{rows[-1]}")
        others(placed, name, brief, late, rows)
        del placed
        gc.collect()
        torch.cuda.empty_cache()
    return fine


def figures(placed: Placed, prefill: bool = True, traced: bool = False) -> dict[str, Any]:
    speed, missed = placed.decode(traced=traced)
    found: dict[str, Any] = {"decode": speed, "missed": missed}
    if prefill:
        found["prefill 2048"] = placed.prefill(2048, 2048)
        found["prefill 4096"] = placed.prefill(4096, 2048)
        found["prefill 4096, one chunk"] = placed.prefill(4096, 4096)
    return found


def others(placed: Placed, name: str, brief: bool, late: Callable[[str], bool], rows: list[dict[str, Any]]) -> None:
    """Skewed choices; then other splits between link and CPU."""
    for choices, exponent in SKEWS.items() if name in ("all", "half") else ():
        if late(f"{name} hot, {choices}"):
            break
        placed.skew(exponent)
        rows.append({"hot": name, "choices": choices, "how": "as measured", **figures(placed, prefill=False)})
        say(f"{rows[-1]}")
    if not late(f"{name} hot, as in use"):
        placed.along_trace()
        found = figures(placed, prefill=False, traced=True)
        rows.append({"hot": name, "choices": "as in use", "how": "as measured", **found})
        say(f"{rows[-1]}")
    placed.skew(0.0)
    takes = placed.takes
    if brief or takes is None:
        return
    for how, share in {"link alone": 0, "half by CPU": 0.5, "CPU alone": 1}.items():
        if late(f"{name} hot, {how}"):
            break
        takes.copy_(taking(share, len(takes) - 1))
        rows.append({"hot": name, "choices": "uniform", "how": how, **figures(placed, prefill=False)})
        say(f"{rows[-1]}")


def report(rows: list[dict[str, Any]]) -> None:
    say("")
    base = {row["choices"]: row["decode"] for row in rows if row["hot"] == "all"}
    print(
        "hot              choices         how           missed  decode tok/s  of all hot  of llama.cpp   "
        "prefill 2048 / 4096 / one chunk"
    )
    for row in rows:
        peer = PEER.get(row["hot"].split(",")[0], {})
        part = f"{row['decode'] / base[row['choices']]:.2f}" if row["choices"] in base else ""
        ratio = f"{row['decode'] / peer['decode']:.2f}" if peer else ""
        keys = ("prefill 2048", "prefill 4096", "prefill 4096, one chunk")
        prefill = " / ".join(f"{row[key]:,.0f}" for key in keys if key in row)
        if peer and prefill:
            prefill += f" ({row['prefill 2048'] / peer['prefill']:.2f} of llama.cpp's)"
        line = (
            f"{row['hot']:16s} {row['choices']:15s} {row['how']:13s} {row['missed']:6.0%} {row['decode']:13.0f} "
            f"{part:>11s} {ratio:>13s}   {prefill}"
        )
        print(line, flush=True)
        LOG.append(line)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--seconds", type=float, default=195)
    parser.add_argument("--hot", default="all;half;half, large cache;none", help="placements of the model, all first")
    parser.add_argument("--brief", action="store_true", help="only the whole model, as measured at load")
    options = parser.parse_args()
    placements = options.hot.split(";")
    if placements[0] != "all" or not set(placements) <= set(HOT):
        parser.error(f'--hot {options.hot}: "all" comes first, the rest is compared to it; known: {"; ".join(HOT)}')
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    left_out: list[str] = []

    def late(what: str) -> bool:
        if time.perf_counter() - STARTED < options.seconds:
            return False
        left_out.append(what)
        return True

    fine = True
    if not options.brief:
        layer = OneLayer()
        links(layer)
        fine = ways(layer)
        del layer
        gc.collect()
        torch.cuda.empty_cache()
    path = options.folder / "qwen3.6-35b-a3b.gguf"
    if not path.exists():
        write_synthetic(path, "qwen3.6-35b-a3b")
        say("the model is written")
    rows: list[dict[str, Any]] = []
    try:
        fine = whole_model(path, placements, options.brief, late, rows) and fine
    finally:
        report(rows)
        say(f"checks {'passed' if fine else 'FAILED'}; left out: {', '.join(left_out) or 'nothing'}")
        out = Path(os.environ.get("OUT", "."))
        (out / "bench_experts.json").write_text(json.dumps({"log": LOG, "rows": rows, "left_out": left_out}))
    raise SystemExit(0 if fine else 1)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

"""Cold experts on a GPU, in the expert shapes of 35B-A3B: checks that the answer stays, then times decode and prefill.

    PYTHONPATH=src:carry python3 scripts/gpu/bench_experts.py

Four MoE layers with random weights (half of them with down in Q4_K, half in Q6_K, as in a Q4_K_M file) run by
themselves, with all, half or none (only the 8 of the floor, and the ring) of the 256 experts hot; uniform or skewed
choices. The time of a whole token is not measured but put together, and said so: an all-hot model of 40 layers
(extrapolated from files of 4 and 8 layers) plus 40 times what a cold layer takes longer than a hot one. The short table
comes last.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.bench import synth
from rekindle.experts import CostModel, ExpertSet, RoutedFfn, RoutingCounts, SpanExperts, Way
from rekindle.experts.counts import LayerCounter
from rekindle.experts.packed import PackedWeights
from rekindle.experts.routed import make_expert_set
from rekindle.experts.stored import StoredExperts, StoredPart
from rekindle.experts.triton import fetch
from rekindle.kernels.matmul import make_matrix
from rekindle.kernels.matmul.packing import FORMATS
from rekindle.kernels.moe import SharedExpert, make_stack, route
from rekindle.models import load_span
from rekindle.stages import LocalStage
from rekindle.weights import open_weights

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
EXPERTS, USED, HIDDEN, WIDTH, RING, LAYERS = 256, 8, 2048, 512, 16, 4
STEPS = 150  # decode steps behind one figure
SLOW = CostModel(link=1e-6, host_call=0, host_expert=0, host_pair=0, device_pair=0)  # so that the CPU is chosen
FAST = CostModel.same_memory()
PEER = {("half", "decode"): 106, ("none", "decode"): 69, ("half", "prefill"): 1467, ("none", "prefill"): 1066}
LOG: list[str] = []


def say(text: str) -> None:
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


# ---- data --------------------------------------------------------------------------------------------------------


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


class Layers:
    """The weights of a few layers; `build` places them."""

    def __init__(self) -> None:
        gate, up = random_part("Q4_K", WIDTH, HIDDEN), random_part("Q4_K", WIDTH, HIDDEN)
        downs = [random_part(type, HIDDEN, WIDTH) for type in ("Q4_K", "Q6_K")]
        self.stored = [StoredExperts((gate, up, downs[i % 2])) for i in range(LAYERS)]
        one = [
            random_part("Q4_K", WIDTH, HIDDEN, 1),
            random_part("Q4_K", WIDTH, HIDDEN, 1),
            random_part("Q6_K", HIDDEN, WIDTH, 1),
        ]
        matrices = [make_matrix(p.raw, p.type, p.shape[1:], CUDA, BF16) for p in one]
        self.shared = SharedExpert(*matrices, torch.randn(HIDDEN, device=CUDA) / 45)
        generator = torch.Generator(CUDA).manual_seed(1)
        self.plain = [
            torch.randn(EXPERTS, HIDDEN, device=CUDA, generator=generator) / HIDDEN**0.5 for _ in range(LAYERS)
        ]

    def routers(self, skewed: bool) -> list[torch.Tensor]:
        """The first hidden value is always one, so the first column of a router is a bias: how popular an expert is."""
        routers = []
        for i, plain in enumerate(self.plain):
            router = plain.clone()
            rank = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(i)).to(CUDA) + 1
            router[:, 0] = -torch.log(rank.float()) if skewed else 0.0
            routers.append(router)
        return routers

    def hot_sets(self, routers: list[torch.Tensor], count: int) -> list[list[int]]:
        """The most chosen of other rows than those that are timed."""
        sets = []
        for router in routers:
            ids, _ = route(inputs(4096, seed=99), router, USED)
            counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
            sets.append(counts.argsort(descending=True)[:count].tolist())
        return sets

    def all_hot(self, routers: list[torch.Tensor]) -> list[Any]:
        made = []
        for stored, router in zip(self.stored, routers, strict=True):
            stacks = [make_stack(p.raw, p.type, p.shape, CUDA, BF16) for p in stored.parts]
            made.append(RoutedFfn(router, USED, *stacks, self.shared))
        return made

    def cold(
        self, routers: list[torch.Tensor], hot: list[list[int]], cost: CostModel | None, keep: int = 0
    ) -> list[Any]:
        counts = RoutingCounts(LAYERS, EXPERTS)
        plan = SpanExperts(hot, [RING] * LAYERS, counts, cost, keep)
        return [
            make_expert_set(stored, plan, i, LayerCounter(counts, i, CUDA), router, USED, self.shared, CUDA, BF16)
            for i, (stored, router) in enumerate(zip(self.stored, routers, strict=True))
        ]


def inputs(rows: int, seed: int) -> torch.Tensor:
    h = torch.randn(rows, HIDDEN, device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed))
    h[:, 0] = 1.0
    return h.to(BF16)


# ---- runs --------------------------------------------------------------------------------------------------------


def decode(layers: list[Any], recorded: bool, steps: int = STEPS) -> tuple[float, float]:
    """(µs per layer of a single row, share of choices that were not on the device)."""
    pool = torch.stack([inputs(LAYERS, seed) for seed in range(steps + 40)])[:, :, None]  # [step, layer, 1, hidden]
    now = torch.empty_like(pool[0])

    def run() -> None:
        for layer, h in zip(layers, now, strict=True):
            layer.forward(h)

    now.copy_(pool[0])
    for _ in range(2):
        run()
    replay: Callable[[], None] = run
    if recorded:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
    turn, missed = [0], [0, 0]

    def step() -> None:
        now.copy_(pool[turn[0] % len(pool)])
        turn[0] += 1
        replay()

    for _ in range(20):
        step()
    before = [layer.residency.owner.clone() for layer in layers if isinstance(layer, ExpertSet)]
    for _ in range(20 if before else 0):
        step()
        after = [layer.residency.owner.clone() for layer in layers if isinstance(layer, ExpertSet)]
        missed[0] += sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
        missed[1] += LAYERS * USED
        before = after
    seconds = timed(step, steps, warm=0)
    return seconds * 1e6 / LAYERS, missed[0] / missed[1] if missed[1] else 0.0


def on_host(layers: list[Any]) -> float:
    """µs per layer of a single row whose cold experts are computed on the CPU."""

    def step() -> None:
        for i, layer in enumerate(layers):
            layer.forward(inputs(1, 700 + i))

    return timed(step, 1, warm=1) * 1e6 / LAYERS


def prefill(layers: list[Any], rows: int) -> float:
    """µs per layer of one chunk."""
    chunks = [inputs(rows, 500 + i) for i in range(4)]
    turn = [0]

    def step() -> None:
        turn[0] += 1
        for layer in layers:
            layer.forward(chunks[turn[0] % 4])

    return timed(step, 4) * 1e6 / LAYERS


def check(layers: Layers) -> None:
    """Every way against all hot, on the same inputs."""
    for skewed in (False, True):
        routers = layers.routers(skewed)
        hot = layers.all_hot(routers)
        for name, cost, rows in (
            ("ring", FAST, 1),
            ("ring", FAST, 2),
            ("ring", FAST, 4),
            ("stream", FAST, 17),
            ("stream", FAST, 512),
            ("host", SLOW, 2),
        ):
            cold = layers.cold(routers, layers.hot_sets(routers, 64), cost)
            assert cold[0].way(rows) is Way[name.upper()], f"{rows} rows go by {cold[0].way(rows)}"
            worst, same = 0.0, True
            for seed in range(5 if name == "ring" else 2):
                for a, b in zip(hot, cold, strict=True):
                    if seed == 3:  # in the middle, someone is promoted
                        b.swap(b.residency.hot[5], next(e for e in range(EXPERTS) if e not in b.residency.hot))
                    h = inputs(rows, 1000 + seed)
                    want, have = a.forward(h), b.forward(h)
                    worst = max(worst, float((want.float() - have.float()).norm() / want.float().norm()))
                    same = same and torch.equal(want, have)
            for b in cold:
                b._finish_arrival()
                b.residency.check()
            kind = "skewed" if skewed else "uniform"
            say(f"check {kind} {name} {rows} rows: relative error {worst:.1e}, same bits {same}")
            assert worst < 1.5e-2, "a cold expert changed the answer"
            if name == "ring" and rows < 3:  # in one turn, the same kernel reads the same planes
                assert same, "the ring changed bits"


def links(layers: Layers) -> None:
    """Bytes per second over the link: by copy engine, pinned and pageable, and by a kernel that reads host memory."""
    size = 256 << 20
    pageable, here = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8, device=CUDA)
    pinned = pageable.pin_memory()
    for name, source in (("pinned", pinned), ("pageable", pageable)):
        seconds = timed(partial(here.copy_, source, non_blocking=True), 5)
        say(f"link, copy engine, {name}: {size / seconds / 1e9:.1f} GB/s")
    cold = layers.cold(layers.routers(False), [[]] * LAYERS, None)
    weights = cold[0].weights
    assert isinstance(weights, PackedWeights)
    moved = weights.fill_staging()
    speed = moved / timed(weights.fill_staging, 20)
    say(f"link, kernel, 8 experts of {weights.expert_bytes / 1e6:.2f} MB: {speed / 1e9:.1f} GB/s")
    some = weights._at_place[:1]
    alone = timed(lambda: fetch(weights._to_staging[0], some, weights.places), 50)
    say(f"link, kernel, 1 expert: {alone * 1e6:.1f} µs, {weights.expert_bytes / alone / 1e9:.1f} GB/s")
    say(f"measured costs: {cold[0].cost}")


def all_hot_model(folder: Path) -> dict[str, float]:
    """Seconds of a decoded token and of a chunk of 512 in 40 layers, from files of 4 and 8."""
    found: dict[int, dict[str, float]] = {}
    shape = synth.SHAPES["qwen3.6-35b-a3b"]
    for count in (4, 8):
        spec = replace(shape.spec, mixers=shape.spec.mixers[:count])
        synth.SHAPES["few-layers"] = replace(shape, spec=spec)
        path = synth.write_synthetic(folder / f"few-{count}.gguf", "few-layers")
        file = open_weights(path)
        stage = LocalStage(load_span(file, spec.whole, CUDA, BF16), 2, 64, "bf16")

        def chunk(stage: LocalStage = stage) -> None:
            stage.open(0)
            stage.forward(Batch((Segment(0, 0, tuple(range(512)), Wanted.LAST),)), None)

        position = [0]

        def step(stage: LocalStage = stage, position: list[int] = position) -> None:
            stage.forward(Batch((Segment(1, position[0], (7,), Wanted.LAST),)), None)
            position[0] += 1

        stage.open(1)
        found[count] = {"prefill": timed(chunk, 5), "decode": timed(step, 200, warm=5)}
        path.unlink()
        del stage, file
        gc.collect()
        torch.cuda.empty_cache()
    return {work: found[4][work] + 9 * (found[8][work] - found[4][work]) for work in ("decode", "prefill")}


def main() -> None:
    started = time.perf_counter()
    out = Path(os.environ.get("OUT", "/tmp"))
    layers = Layers()
    links(layers)
    check(layers)
    say(f"checked after {time.perf_counter() - started:.0f} s")
    rows: list[dict[str, Any]] = []
    for skewed in (False, True):
        routers = layers.routers(skewed)
        hot = layers.all_hot(routers)
        base = {
            "decode": decode(hot, recorded=True)[0],
            "prefill": prefill(hot, 512),
            "prefill 2048": prefill(hot, 2048),
        }
        eager = decode(hot, recorded=False)[0]
        del hot
        rows.append({"choices": skewed, "hot": "all", **base, "eager": eager})
        for name, count in (("half", 128), ("none", 8)):
            cold = layers.cold(routers, layers.hot_sets(routers, count), FAST)
            fast, missed = decode(cold, recorded=True)
            figures = {
                "decode": fast,
                "missed": missed,
                "prefill": prefill(cold, 512),
                "prefill 2048": prefill(cold, 2048),
            }
            for layer in cold:
                layer.cost = SLOW
            figures["host"] = on_host(cold)
            rows.append({"choices": skewed, "hot": name, **figures})
            del cold
            gc.collect()
            torch.cuda.empty_cache()
    say(f"timed after {time.perf_counter() - started:.0f} s")
    model = all_hot_model(Path("/dev/shm"))
    report(rows, model)
    say(f"all in {time.perf_counter() - started:.0f} s")
    (out / "bench_experts.json").write_text(json.dumps({"log": LOG, "rows": rows, "model": model}))


def report(rows: list[dict[str, Any]], model: dict[str, float]) -> None:
    say("\nlayer alone, µs           decode 1   missed   by CPU   prefill 512   prefill 2048")
    for row in rows:
        label = f"{'skewed' if row['choices'] else 'uniform'}, {row['hot']} hot"
        missed, host = row.get("missed"), row.get("host")
        say(
            f"  {label:22s} {row['decode']:9.1f} {'' if missed is None else f'{missed:.0%}':>8s} "
            f"{'' if host is None else f'{host:.0f}':>8s} {row['prefill']:13.0f} {row['prefill 2048']:14.0f}"
        )
    say("\n40 layers, put together   decode tok/s   of all hot   of llama.cpp   prefill 512 tok/s   of llama.cpp")
    for row in rows:
        base = next(other for other in rows if other["choices"] == row["choices"] and other["hot"] == "all")
        token = model["decode"] + 40e-6 * (row["decode"] - base["decode"])
        chunk = model["prefill"] + 40e-6 * (row["prefill"] - base["prefill"])
        peers = [PEER.get((row["hot"], work)) for work in ("decode", "prefill")]
        shares = [
            f"{speed / peer:.2f}" if peer else "" for speed, peer in zip((1 / token, 512 / chunk), peers, strict=True)
        ]
        label = f"{'skewed' if row['choices'] else 'uniform'}, {row['hot']} hot"
        say(
            f"  {label:22s} {1 / token:13.0f} {model['decode'] / token:12.2f} {shares[0]:>14s} "
            f"{512 / chunk:19.0f} {shares[1]:>14s}"
        )


if __name__ == "__main__":
    with torch.inference_mode():
        main()

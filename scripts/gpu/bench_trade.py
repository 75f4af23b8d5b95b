"""One budget for experts and KV, 35B-A3B shape: decode with memory that is traded, against fixed pools.

    PYTHONPATH=src python3 scripts/gpu/bench_trade.py [--seconds 340] [--folder /dev/shm] [--budgets 22.1] [--only mix]

For a device held to 22.1 and to 14.5 GiB, and for a pool that is traded (no --pool), of 8,192, of 65,536 and of 131,072
tokens: decode of one sequence at 1,024, 16,384, 65,536 and 131,072 tokens, with random routing and with a skewed one
(the rows of each router scaled by rank^-0.3; the plan knows the ranks). Contexts are made, not computed: pages of
zeros. Two sequences at once, of 65,536 and of 1,024 tokens, are the mix: tokens per second of both together, random
routing. Then, traded only, a conversation that grows by a page per step from 1,024 to 65,536 tokens, and after it a
short one: the longest step over the median, and the seconds until the short one is as fast as before. --only mix
measures the mix and nothing else.

With more than half of the experts cold the same point differs by 6 % from one load to the next. So the stages of one
budget are loaded beside each other, each held to that budget (the card must have room for all, and RAM for their
experts), and every point is measured in turns: some steps of each stage, then of each again. A fixed pool takes part
where it holds the context: else it reads pages over the link at every step, at a tenth to a quarter of the speed.

The table comes last, everything as JSON in $OUT. What would begin after --seconds is left out and named. Exit code 1:
some figure misses its goal (0.97 of the best fixed pool, of the mix 0.95; 3 × the median; 2 s). --device cpu runs the
script on a tiny model, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.bench.synth import write_synthetic
from rekindle.buffers import STOCK
from rekindle.build.sizes import loaded_sizes
from rekindle.build.stage import StageConfig, load_stage, stage_configs
from rekindle.experts import ExpertSet, RoutingCounts
from rekindle.placement import Device, Machine, Plan, Wishes, card_named, make_plan
from rekindle.placement.expect import expected
from rekindle.spec import PAGE, ModelSpec
from rekindle.stages import LocalStage
from rekindle.weights import WeightFile, open_weights

GIB = 1 << 30
BUDGETS = (22.1, 14.5)
POOLS = (None, 8192, 65_536, 131_072)
CONTEXTS = (1024, 16_384, 65_536, 131_072)
SKEW = 0.3  # a router's rows shrink with this power of their rank
MIX = (65_536, 1024)  # tokens of two sequences that run at once
GOAL, MIX_GOAL, LONGEST, BACK = 0.97, 0.95, 3.0, 2.0  # of the best fixed pool; times the median; seconds
# The skewed one first: the plan chose the hot experts for it, and a random one would exchange them before that.
ROUTINGS = (("skewed", SKEW), ("uniform", 0.0))
STEPS, ROUNDS = 40, 6  # of every stage at every point
WARM = 5  # steps of a stage that come before those of its round: others have run meanwhile
SETTLING = 10  # times as many steps, at most, before the first round
MOST_STEPS = 2 * STEPS * SETTLING + ROUNDS * (WARM + STEPS)  # of one point
STARTED = time.perf_counter()
Row = dict[str, Any]
Points = dict[str, tuple[float, tuple[int, ...]]]  # the routing's exponent, and the tokens of every sequence


def say(text: str) -> None:
    print(f"{time.perf_counter() - STARTED:6.1f} s  {text}", flush=True)


class Bench:
    """One loaded stage."""

    def __init__(self, file: WeightFile, config: StageConfig, counts: RoutingCounts) -> None:
        self.stage: LocalStage = load_stage(file, config, counts=counts)
        self.vocab, self.rng = file.spec.vocab, np.random.default_rng(1)
        self.plain = [ffn.router.clone() for ffn in self.stage.model.routed if isinstance(ffn.router, torch.Tensor)]

    def skew(self, exponent: float) -> None:
        for ffn, plain in zip(self.stage.model.routed, self.plain, strict=False):
            ranks = torch.arange(1, len(plain) + 1, device=plain.device, dtype=plain.dtype)
            ffn.router.copy_(plain * ranks[:, None] ** -exponent)

    @property
    def taken(self) -> list[int]:
        """Of 0, 1, … 8 missing experts, how many the CPU takes, as it was measured when the stage was loaded."""
        shares = (ffn.weights.cpu_experts for ffn in self.stage.model.routed if isinstance(ffn, ExpertSet))
        return next((share.takes[:9].tolist() for share in shares if share is not None), [])

    def grow(self, slot: int, end: int) -> None:
        """The sequence holds `end` positions from now on, of zeros: as if it had been prefilled in chunks."""
        table, pool = self.stage._tables[slot], self.stage.pool
        with self.stage._on_device():
            while table.position < end:
                to = min(end, table.position + 2048)
                if self.stage._trade is not None:
                    self.stage._trade.before([table], table.missing(to), rows=1)
                pool.tick([table])
                known = len(table.pages)
                pool.extend(table, to)
                for page in table.pages[known:]:
                    for layer in pool.kv:
                        layer[page.place].zero_()
                table.position = to

    def step(self, *slots: int) -> float:
        """Seconds of one decode step, with a row of each slot."""
        tokens = (int(self.rng.integers(0, self.vocab)) for _ in slots)
        positions = (self.stage._tables[slot].position for slot in slots)
        rows = zip(slots, positions, tokens, strict=True)
        batch = Batch(tuple(Segment(slot, position, (token,), Wanted.LAST) for slot, position, token in rows))
        start = time.perf_counter()
        self.stage.forward(batch, None)
        if self.stage.model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def hold(self, contexts: Sequence[int], steps: int) -> range:
        """Sequences of about these lengths live, the expert cache has filled, and memory lies where it stays; their
        slots. Behind the steps to come they are no longer than that, unless they are short, so that a pool of as many
        tokens holds them."""
        for slot, context in enumerate(contexts):
            self.stage.open(slot)
            self.grow(slot, context - min(MOST_STEPS, context // 16))
        slots = range(len(contexts))
        self.settle(slots, 2 * steps)
        return slots

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.stage.close(slot)

    def settle(self, slots: Sequence[int], steps: int) -> None:
        """So many steps, and on until as many have changed nothing: units come back one by one."""
        for _ in range(SETTLING):
            lent = self.lent
            for _ in range(steps):
                self.step(*slots)
            if self.lent == lent:
                return

    @property
    def lent(self) -> int:
        return 0 if self.stage._trade is None else self.stage._trade.lent

    def conversation(self, first: int, last: int, steps: int) -> Row:
        """One that grows by a page per step; then a short one, until it is as fast as before."""
        held = self.hold([first], steps)
        before = statistics.median(self.step(*held) for _ in range(steps))
        self.release(held)
        self.stage.open(0)
        self.grow(0, first)
        spent = list[float]()
        while self.stage._tables[0].position < last:
            self.grow(0, self.stage._tables[0].position + PAGE - 1)
            spent.append(self.step(0))
        self.stage.close(0)
        self.stage.open(1)
        self.grow(1, first)
        began, short = time.perf_counter(), [self.step(1)]
        while statistics.median(short[-20:]) > before / GOAL and time.perf_counter() - began < 2 * BACK:
            short.append(self.step(1))
        back = time.perf_counter() - began
        self.stage.close(1)
        usual = spent[len(spent) // 20 :]  # the first steps record what they run
        longest = max(*usual, *short) / statistics.median(usual)
        slow = sorted(enumerate([*spent, *short]), key=lambda each: -each[1])[:6]
        return {
            "steps": len(spent), "longest over median": longest, "seconds until short is fast": back,
            "slowest, ms": {number: round(seconds * 1e3, 1) for number, seconds in slow},
        }  # fmt: skip


def plan_of(file: WeightFile, budget: float, pool: int | None, ranked: bool) -> Plan:
    """As `rekindle serve` would plan it, which lends idle slots too unless a pool is named."""
    machine = Machine((Device("cuda:0", "cuda", int(budget * GIB), rates=card_named("H200").rates),), 256 * GIB)
    traded, counts = pool is None, ranks(file.spec) if ranked else None
    wishes = Wishes(131_072, sequences=16, chunk=2048, pool=pool, lends=traded, lends_slots=traded, counts=counts)
    return make_plan(machine, file.spec, loaded_sizes(file, torch.bfloat16), wishes)


def ranks(spec: ModelSpec) -> list[list[float]]:
    return [[1 / (rank + 1) for rank in range(spec.ffn.experts)]] * spec.layers


def tiny_config(spec: ModelSpec) -> StageConfig:
    """For the script itself, on a CPU."""
    layers, experts = spec.layers, spec.ffn.experts
    hot, cache = tuple(range(experts)), spec.ffn.used
    return StageConfig(
        "cpu", spec.whole, 2, 8, 100, "f32", hot=(hot[: experts - cache],) * layers, cache_slots=(cache,) * layers,
        lendable=(max(0, experts - cache - 1),) * layers, slot_pages=1,
    )  # fmt: skip


def holds(pool: int | None, tokens: int) -> bool:
    """Whether a pool holds so many tokens, or nearly all of a mix."""
    return pool is None or tokens <= pool + MIX[1]


def speeds(benches: Sequence[Bench], contexts: Sequence[int], steps: int, rounds: int) -> list[list[float]]:
    """Of each stage, round by round, the median tokens per second of sequences of these lengths at once."""
    held = [bench.hold(contexts, steps) for bench in benches]
    spent: list[list[float]] = [[] for _ in benches]
    turns = list(zip(benches, held, spent, strict=True))
    for _ in range(rounds):
        for bench, slots, own in turns:
            for _ in range(WARM):
                bench.step(*slots)
            own.append(statistics.median(bench.step(*slots) for _ in range(steps)))
        turns.append(turns.pop(0))  # another begins
    for bench, slots in zip(benches, held, strict=True):
        bench.release(slots)
    return [[len(contexts) / seconds for seconds in own] for own in spent]


def measure(benches: Mapping[int | None, Bench], rows: Mapping[int | None, Row], points: Points, steps: int) -> None:
    """Every point in turns by all stages whose pool holds it; its speed is the median of the rounds."""
    for key, (exponent, contexts) in points.items():
        pools = [pool for pool in benches if holds(pool, sum(contexts))]
        for pool in pools:
            benches[pool].skew(exponent)
        found = speeds([benches[pool] for pool in pools], contexts, steps, ROUNDS)
        for pool, rounds in zip(pools, found, strict=True):
            rows[pool][key] = statistics.median(rounds)
            rows[pool].setdefault("rounds", {})[key] = [round(speed, 1) for speed in rounds]
        say(f"{key}: " + "; ".join(f"{pool or 'traded'} {rows[pool]['rounds'][key]}" for pool in pools))


def points_of(contexts: Sequence[int], mix: Sequence[int], only: str) -> Points:
    single = {
        f"{name} {context}": (exponent, (context,)) for name, exponent in ROUTINGS for context in contexts
    }  # fmt: skip
    return ({} if only == "mix" else single) | {"mix": (0.0, tuple(mix))}


def missed_goals(rows: Sequence[Row]) -> list[str]:
    """Prints the table; what is below its goal."""
    missed = list[str]()
    keys = [key for key in rows[0] if key == "mix" or key.startswith(("uniform", "skewed"))] if rows else []
    print("budget  pool     " + "  ".join(f"{key:>14}" for key in keys))
    for budget in dict.fromkeys(row["budget"] for row in rows):
        mine = [row for row in rows if row["budget"] == budget]
        for row in mine:
            print(f"{budget!s:7} {row['pool']!s:8} " + "  ".join(f"{row.get(key, math.nan):14.0f}" for key in keys))
        fixed = [row for row in mine if row["pool"] != "traded"]
        traded = next(row for row in mine if row["pool"] == "traded")
        if fixed:
            shares = {key: traded[key] / max(row.get(key, 0.0) for row in fixed) for key in keys}
            print("        of best  " + "  ".join(f"{shares[key]:14.2f}" for key in keys))
            goals = {key: MIX_GOAL if key == "mix" else GOAL for key in keys}
            missed += [f"{budget} GiB, {key}: {share:.2f}" for key, share in shares.items() if share < goals[key]]
        if (talk := traded.get("conversation")) is None:
            continue
        print(f"        a conversation that grows, then a short one: {talk}")
        if talk["longest over median"] > LONGEST or talk["seconds until short is fast"] > BACK:
            missed.append(f"{budget} GiB: {talk}")
    return missed


def on_cpu(folder: Path, only: str) -> int:
    file = open_weights(write_synthetic(folder / "tiny-moe.gguf", "tiny-moe"))
    bench = Bench(file, tiny_config(file.spec), RoutingCounts(file.spec.layers, file.spec.ffn.experts))
    row: Row = {"budget": 0, "pool": "traded"}
    measure({None: bench}, {None: row}, points_of((128, 512), (512, 128), only), 2)
    if not only:
        row["conversation"] = bench.conversation(128, 512, 2)
    bench.stage.check()
    told([row], [])
    return 0


def told(rows: Sequence[Row], left_out: Sequence[str]) -> int:
    """Prints and writes everything; the exit code."""
    missed = missed_goals(rows)
    print(f"missed: {'; '.join(missed) or 'nothing'}. Left out: {'; '.join(left_out) or 'nothing'}")
    kept = {"rows": rows, "missed": missed, "left_out": left_out}
    (Path(os.environ.get("OUT", ".")) / "bench_trade.json").write_text(json.dumps(kept))
    return 1 if missed else 0


def on_gpu(folder: Path, seconds: float, budgets: Sequence[float], only: str) -> int:
    path = folder / "qwen3.6-35b-a3b.gguf"
    if not path.exists():
        write_synthetic(path, "qwen3.6-35b-a3b")
        say("the model is written")
    file, rows, left_out = open_weights(path), list[Row](), list[str]()
    for budget in budgets:
        if time.perf_counter() - STARTED > seconds:
            left_out.append(f"{budget} GiB")
            continue
        benches, own = dict[int | None, Bench](), dict[int | None, Row]()
        for pool in POOLS:
            plan = plan_of(file, budget, pool, ranked=True)
            (config,) = stage_configs(plan, "bfloat16")
            # Nothing is captured here: pinned memory for it would only be made amid the steps.
            config = replace(config, slabs=STOCK)
            benches[pool] = Bench(file, config, RoutingCounts(file.spec.layers, file.spec.ffn.experts))
            even = plan_of(file, budget, pool, ranked=False)
            said = (expected(even, loaded_sizes(file, torch.bfloat16), context) for context in CONTEXTS)
            own[pool] = {
                "budget": budget,
                "pool": pool or "traded",
                "cold": plan.cold,
                "CPU takes": benches[pool].taken,
            }
            own[pool]["expected"] = [round(each.tokens_per_second) for each in said if each is not None]
            say(f"{own[pool]}")
        measure(benches, own, points_of(CONTEXTS, MIX, only), STEPS)
        if not only:
            own[None]["conversation"] = benches[None].conversation(1024, 65_536, 2 * STEPS)
            say(f"{own[None]['conversation']}; {benches[None].stage.work()}")
        rows += own.values()
        for bench in benches.values():
            bench.stage.check()
            bench.stage.stop()
        del benches, bench
        gc.collect()
        torch.cuda.empty_cache()
    return told(rows, left_out)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--seconds", type=float, default=340)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)), help="GiB")
    parser.add_argument("--only", default="", choices=("", "mix"))
    options = parser.parse_args()
    budgets = [float(budget) for budget in options.budgets.split(",")]
    with torch.inference_mode():
        if options.device == "cpu":
            return on_cpu(options.folder, options.only)
        return on_gpu(options.folder, options.seconds, budgets, options.only)


if __name__ == "__main__":
    sys.exit(main())

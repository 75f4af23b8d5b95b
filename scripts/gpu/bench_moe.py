"""Check, then time, the routed experts of 33 to 2,048 rows on a GPU, in the shape of 35B-A3B.

    PYTHONPATH=src python3 scripts/gpu/bench_moe.py [--rows 64,512] [--down Q4_K,Q6_K] [--skew 0] [--parts]

1. All kernels are compiled by worker processes, as before a server's first request.
2. Every form against the definition in float64: uniform choices; all rows on a few experts; with the shared expert.
   What is allocated holds no numbers until it is written.
3. A timing is the median of replayed graphs: a chain of layers, each on weights that the L2 no longer holds, with
   choices of its own, from the chosen experts to the sum (no router). --skew: what an expert is liked by, as the
   deviation of its logit. --parts: the time of every launch too, as torch's profiler has it.

"tiled" is the form of any GPU (`groups`); "now" is what the dispatcher takes. The short table (microseconds a
layer) comes last; all goes to $OUT/bench_moe.txt. Exit code 1: something was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import silu

from rekindle.kernels.matmul import naive
from rekindle.kernels.matmul.packing import FORMATS, pack
from rekindle.kernels.matmul.types import Matrix, Packed
from rekindle.kernels.moe import triton as fast
from rekindle.kernels.moe.along_outputs import AlongConfig
from rekindle.kernels.moe.types import ExpertStack, SharedExpert

EXPERTS, USED, HIDDEN, WIDTH = 256, 8, 2048, 512
ROWS = 33, 64, 128, 200, 256, 384, 512, 768, 1024, 1536, 2048
LAYERS = 3  # of 450 MB each: the L2 holds 50 MB
LINKS = 6  # of a chain
SECONDS = 75.0  # after this nothing more is timed
BOUND = 8e-3  # relative error: what lies between the products is in bfloat16
BF16 = torch.bfloat16
OUT = Path(os.environ.get("OUT", "/tmp"))

Run = Callable[["Layer", Tensor, Tensor, Tensor, SharedExpert | None], Tensor]

# Warps, tiles, n-tiles, spread, registers for codes of 4 bits and for longer ones; the rows that try them.
CONFIGS: dict[AlongConfig, tuple[int, int]] = {
    AlongConfig(4, 2, 1, 2, 128, 128): (33, 256),
    AlongConfig(4, 1, 1, 2, 96, 128): (33, 128),
    AlongConfig(8, 1, 1, 2, 96, 128): (33, 256),
    AlongConfig(4, 2, 2, 2, 168, 128): (64, 768),
    AlongConfig(4, 1, 2, 2, 128, 128): (64, 768),
    AlongConfig(8, 1, 2, 2, 128, 128): (64, 768),
    AlongConfig(8, 1, 2, 4, 128, 128): (200, 768),
    AlongConfig(4, 1, 4, 2, 168, 168): (256, 2048),
    AlongConfig(4, 1, 4, 4, 128, 128): (384, 2048),
    AlongConfig(8, 1, 4, 2, 128, 128): (256, 2048),
    AlongConfig(4, 2, 4, 2, 255, 168): (512, 2048),
    AlongConfig(4, 1, 8, 2, 255, 255): (768, 2048),
}


class Layer:
    """Routed experts and a shared one."""

    def __init__(self, stacks: tuple[Packed, Packed, Packed], shared: tuple[Packed, Packed, Packed], scale: Tensor):
        up, down = (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
        self.gate, self.up = (ExpertStack(up, packed=part) for part in stacks[:2])
        self.down = ExpertStack(down, packed=stacks[2])
        matrices = [Matrix((part.rows, part.columns), packed=part) for part in shared]
        self.shared = SharedExpert(matrices[0], matrices[1], matrices[2], scale)
        self.planes = shared

    @property
    def stacks(self) -> tuple[ExpertStack, ExpertStack, ExpertStack]:
        return self.gate, self.up, self.down


# ---- forms ---------------------------------------------------------------------------------------------------------


def tiled(layer: Layer, h: Tensor, ids: Tensor, weights: Tensor, shared: SharedExpert | None) -> Tensor:
    return fast.by_group(h, ids, weights, *layer.stacks, shared, expanding=False)


def now(layer: Layer, h: Tensor, ids: Tensor, weights: Tensor, shared: SharedExpert | None) -> Tensor:
    return fast.moe(h, ids, weights, *layer.stacks, shared)


def along(config: AlongConfig) -> Run:
    def run(layer: Layer, h: Tensor, ids: Tensor, weights: Tensor, shared: SharedExpert | None) -> Tensor:
        return fast.by_group_along_outputs(h, ids, weights, *layer.stacks, shared, config)

    return run


def forms(rows: int) -> Iterator[tuple[str, Run]]:
    yield "tiled", tiled
    yield "now", now
    for config, (least, most) in CONFIGS.items():
        if least <= rows <= most:
            yield ",".join(map(str, config)), along(config)


# ---- data ----------------------------------------------------------------------------------------------------------


def random_packed(type: str, rows: int, columns: int) -> Packed:
    """Random codes and integer scales, with factors that make weights of about 1 / sqrt(columns)."""
    form = FORMATS[type]
    raw = torch.randint(0, 256, (rows * columns // form.weights, form.nbytes), dtype=torch.uint8, device="cuda")
    size = 1 / (columns**0.5 * {"Q4_K": 200, "Q5_K": 400, "Q6_K": 1300}[type])
    for start in [208] if type == "Q6_K" else [0, 2]:
        factors = size * (0.5 + torch.rand(raw.shape[0], 1, device="cuda"))
        raw[:, start : start + 2] = factors.half().view(torch.uint8)
    return pack(raw.view(rows, -1), type, columns)


def empty_packed(type: str, rows: int, columns: int) -> Packed:
    """The same without values."""

    def plane(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="cuda:0")

    above = {"Q4_K": None, "Q5_K": torch.int32, "Q6_K": torch.int64}[type]
    return Packed(
        type, rows, columns, plane(rows, columns // 32, 4),
        None if above is None else plane(rows, columns // 32, dtype=above),
        plane(rows, columns // 32, dtype=torch.int16),
        plane(rows, columns // 256, dtype=torch.float32 if type == "Q6_K" else torch.int32),
    )  # fmt: skip


def make_layer(make: Callable[[str, int, int], Packed], down: str) -> Layer:
    stacks = (
        make("Q4_K", EXPERTS * WIDTH, HIDDEN), make("Q4_K", EXPERTS * WIDTH, HIDDEN),
        make(down, EXPERTS * HIDDEN, WIDTH),
    )  # fmt: skip
    shared = make("Q4_K", WIDTH, HIDDEN), make("Q4_K", WIDTH, HIDDEN), make(down, HIDDEN, WIDTH)
    return Layer(stacks, shared, torch.randn(HIDDEN, device="cuda") / HIDDEN**0.5)


def choices(rows: int, skew: float, experts: int = EXPERTS) -> tuple[Tensor, Tensor]:
    """ids int32 and weights float32, both [rows, USED], among the first `experts`."""
    dice = torch.rand(rows, experts, device="cuda").clamp(1e-9, 1 - 1e-6)
    chance = -(-dice.log()).log() + skew * torch.randn(experts, device="cuda")
    weights, ids = torch.softmax(chance, 1).topk(USED)
    return ids.int(), weights / weights.sum(1, keepdim=True)


def expected(layer: Layer, h: Tensor, ids: Tensor, weights: Tensor, shared: bool) -> Tensor:
    """Expert by expert in float64."""
    gate, up, down = (naive.packed_values(part.planes).view(part.shape) for part in layer.stacks)
    total = torch.zeros(h.shape, dtype=torch.float64, device="cuda")
    for expert in ids.unique().tolist():
        row, place = torch.nonzero(ids == expert, as_tuple=True)
        x = h[row].double()
        inner = silu(x @ gate[expert].double().T) * (x @ up[expert].double().T)
        total.index_add_(0, row, weights[row, place].double()[:, None] * (inner @ down[expert].double().T))
    if shared:
        s_gate, s_up, s_down = (naive.packed_values(part).double() for part in layer.planes)
        x = h.double()
        part = torch.sigmoid(x @ layer.shared.scale.double())[:, None]
        total += part * ((silu(x @ s_gate.T) * (x @ s_up.T)) @ s_down.T)
    return total


# ---- compiling -----------------------------------------------------------------------------------------------------


def compile_ahead(target: list[Any], downs: list[str], rows: list[int]) -> None:
    """In a process that has not touched the GPU: every launch, run over tensors without memory, and compiled."""
    from triton.backends.compiler import GPUTarget

    from rekindle.warmup.launches import CompileWorkers, recording
    from rekindle.warmup.outline import DeviceWithoutMemory

    workers = CompileWorkers(min(16, len(os.sched_getaffinity(0))), GPUTarget(*target))
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    jobs, given = [], 0
    with DeviceWithoutMemory(), recording() as launches:
        for down in downs:
            layer = make_layer(empty_packed, down)
            for count in rows:
                h = torch.empty(count, HIDDEN, dtype=BF16, device="cuda:0")
                ids = torch.empty(count, USED, dtype=torch.int32, device="cuda:0")
                weights = torch.empty(count, USED, device="cuda:0")
                for _, run in forms(count):
                    for shared in (None, layer.shared):
                        run(layer, h, ids, weights, shared)
                fresh = list(launches)[given:]
                given += len(fresh)
                jobs += [workers.compile(launch) for launch in fresh]
    for job in jobs:
        job.result()
    workers.stop()


def compiled_elsewhere(options: argparse.Namespace) -> bool:
    from triton.runtime import driver

    target = driver.active.get_current_target()
    job = json.dumps([target.backend, target.arch, target.warp_size])
    command = [sys.executable, __file__, "--compile", job, "--rows", options.rows, "--down", options.down]
    return subprocess.run(command).returncode == 0


# ---- checks and timing ---------------------------------------------------------------------------------------------


@contextmanager
def poisoned() -> Iterator[None]:
    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            values = make(*args, **kwargs)
            return values.fill_(float("nan")) if values.is_floating_point() else values

        return made

    with mock.patch("torch.empty", filled(torch.empty)), mock.patch("torch.empty_like", filled(torch.empty_like)):
        yield


def complaints(layer: Layer, down: str, rows: list[int]) -> Iterator[str]:
    for count, experts, beside in (
        *((count, EXPERTS, False) for count in rows if count in (rows[0], rows[-1], 512)),
        *((count, 11, True) for count in rows if count in (rows[0], 200)),
    ):
        h = torch.randn(count, HIDDEN, device="cuda").to(BF16)
        ids, weights = choices(count, 0.0, experts)
        right = expected(layer, h, ids, weights, beside)
        for name, run in forms(count):
            with poisoned():
                out = run(layer, h, ids, weights, layer.shared if beside else None)
            error = float((out.double() - right).norm() / right.norm())
            if not error < BOUND:
                yield f"WRONG {name}, {count} rows on {experts} experts, down {down}: error {error:.1e}"


def chain(layers: list[Layer], rows: int, skew: float, run: Run, shared: bool) -> Callable[[], None]:
    h = torch.randn(rows, HIDDEN, device="cuda").to(BF16)
    chosen = [choices(rows, skew) for _ in range(LINKS)]

    def links() -> None:
        for link, (ids, weights) in enumerate(chosen):
            layer = layers[link % len(layers)]
            run(layer, h, ids, weights, layer.shared if shared else None)

    return links


def microseconds(links: Callable[[], None]) -> float:
    """Of one link, by replays of the chain."""
    links()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        links()
    graph.replay()
    times = []
    for _ in range(9):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / LINKS)
    return statistics.median(times)


def parts(links: Callable[[], None]) -> str:
    """Microseconds of a link by launch."""
    from torch.profiler import ProfilerActivity, profile

    links()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        links()
        torch.cuda.synchronize()
    return ", ".join(f"{each.key[:40]} {each.self_device_time_total / LINKS:.0f}" for each in found.key_averages())


def table(rows: list[int], found: dict[tuple[str, int, bool], float]) -> Iterator[str]:
    names = list(dict.fromkeys((name, shared) for name, _, shared in found))
    yield "rows".rjust(32) + "".join(f"{count:7d}" for count in rows)
    for name, shared in names:
        cells = [found.get((name, count, shared)) for count in rows]
        label = name + (" + shared" if shared else "")
        yield label.rjust(32) + "".join("      –" if cell is None else f"{cell:7.0f}" for cell in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--down", default="Q4_K,Q6_K", help="types of down that are tried")
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--parts", action="store_true", help="of what the house takes, every launch")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows, downs = [int(count) for count in options.rows.split(",")], options.down.split(",")
    if options.compile:
        compile_ahead(json.loads(options.compile), downs, rows)
        return 0
    begin = time.perf_counter()
    full = (OUT / "bench_moe.txt").open("w")
    wrong = 0

    def log(text: str) -> None:
        print(text, flush=True)
        print(text, file=full, flush=True)

    log(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, choices skewed by {options.skew}")
    if not compiled_elsewhere(options):
        log("compiling ahead failed; kernels are compiled as they are launched")
    log(f"compiled after {time.perf_counter() - begin:.0f} s")
    tables: list[str] = []
    for down in downs:
        layers = [make_layer(random_packed, down) for _ in range(LAYERS)]
        for problem in complaints(layers[0], down, rows):
            log(problem)
            wrong += 1
        log(f"down {down}: checked after {time.perf_counter() - begin:.0f} s")
        found: dict[tuple[str, int, bool], float] = {}
        for count in rows:
            for name, run in forms(count):
                for shared in (False, True) if name in ("tiled", "now") else (False,):
                    if time.perf_counter() - begin > SECONDS:
                        log(f"no time left for {name}, {count} rows")
                        continue
                    links = chain(layers, count, options.skew, run, shared)
                    found[name, count, shared] = microseconds(links)
                    if options.parts and name == "now" and not shared:
                        log(f"{count} rows: {parts(links)}")
        tables += [f"down {down}", *table(rows, found)]
        del layers
    log(f"timed after {time.perf_counter() - begin:.0f} s")
    for line in tables:
        log(line)
    log(f"{wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())

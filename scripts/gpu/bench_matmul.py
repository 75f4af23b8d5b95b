"""Check, then time, the matrix and expert kernels on a GPU, in the shapes of the 27B and 35B-A3B models.

    PYTHONPATH=src:carry python3 scripts/gpu/bench_matmul.py [only these cases ...]

Weights are random. Every timing is a replayed graph of launches over more bytes than the L2 holds. The short table
comes last (the best variant of each case, and in brackets the time of the first); all go to $OUT/bench_matmul.txt.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rekindle.kernels import moe
from rekindle.kernels.matmul import naive, nvidia
from rekindle.kernels.matmul import triton as fast
from rekindle.kernels.matmul.packing import FORMATS, pack
from rekindle.kernels.matmul.types import Matrix, Packed
from rekindle.kernels.moe import naive as moe_naive
from rekindle.kernels.moe import nvidia as moe_nvidia
from rekindle.kernels.moe import triton as fast_moe
from rekindle.kernels.moe.types import ExpertStack, SharedExpert

BANDWIDTH = 4.3e12  # bytes a second, copy, as measured on this card
ROTATED = 300e6  # bytes of distinct weights behind one timing
COMPILERS = 14
CUDA = torch.device("cuda")
BF16 = torch.bfloat16
OUT = Path(os.environ.get("OUT", "/tmp"))


Built = tuple[Sequence[Callable[[], object]], float, float]  # calls to rotate through; bytes, operations of each


class Variant(NamedTuple):
    """One way of doing a case."""

    case: str
    label: str
    build: Callable[[], Built]


# ---- data --------------------------------------------------------------------------------------------------------


def random_packed(type: str, rows: int, columns: int) -> Packed:
    """Random codes and integer scales, with factors that make weights of about 1 / sqrt(columns)."""
    form = FORMATS[type]
    raw = torch.randint(0, 256, (rows * columns // form.weights, form.nbytes), dtype=torch.uint8, device=CUDA)
    spread = {"Q4_K": 200, "Q5_K": 400, "Q6_K": 1300, "Q8_0": 74, "Q4_0": 4.6, "Q4_1": 4.6, "Q5_0": 9, "Q5_1": 9}
    size = 1 / (columns**0.5 * spread.get(type, 70 if type == "IQ4_NL" else 1200))
    for start in {"Q6_K": [208], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q4_1": [0, 2], "Q5_1": [0, 2]}.get(type, [0]):
        factors = size * (0.5 + torch.rand(raw.shape[0], 1, device=CUDA))
        raw[:, start : start + 2] = factors.half().view(torch.uint8)
    return pack(raw.view(rows, -1), type, columns)


@functools.lru_cache(maxsize=4)
def copies(type: str, rows: int, columns: int, share: int = 1) -> list[Packed]:
    """Enough distinct matrices to leave the L2 behind; `share` of them are used by one call."""
    first = random_packed(type, rows, columns)
    count = max(2, min(16, round(ROTATED / (first.nbytes * share)) + 1)) * share
    return [first, *(random_packed(type, rows, columns) for _ in range(count - 1))]


def drawn(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device=CUDA, dtype=BF16)


# ---- checks ------------------------------------------------------------------------------------------------------


def error(out: Tensor, expected: Tensor) -> float:
    if not bool(out.isfinite().all()):
        return float("nan")
    return float((out.double() - expected).norm() / expected.norm())


class Checks:
    """Every kernel against the definition, on fresh inputs, twice for the same bits; one method call is one part."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self.log = log
        self.worst: dict[str, float] = {}

    def compare(self, name: str, run: Callable[[], Tensor], expected: Tensor, bound: float) -> None:
        first, second = run(), run()
        found = error(first, expected)
        self.worst[name] = max(self.worst.get(name, 0.0), found)
        if not found < bound or not torch.equal(first, second):
            same = torch.equal(first, second)
            self.log(f"WRONG {name}: error {found:.2e}, bound {bound:.0e}, same bits {same}")

    def one_type(self, type: str) -> None:
        weight, other = random_packed(type, 1000, 2304), random_packed(type, 1000, 2304)
        values, others = naive.packed_values(weight).double(), naive.packed_values(other).double()
        expanded = fast.expand(weight, torch.full((1000, 2304), float("nan"), device=CUDA))
        self.compare(f"{type} expand", lambda: expanded, values, 1e-6)
        for rows in (1, 2, 9, 17, 64, 100, 200):
            x = drawn(rows, 2304)
            wide = x.double()
            self.compare(f"{type} multiply", lambda x=x: fast.multiply(x, weight), wide @ values.T, 6e-3)
            gated = torch.nn.functional.silu(wide @ values.T) * (wide @ others.T)
            self.compare(f"{type} swiglu", lambda x=x: fast.swiglu(x, weight, other), gated, 9e-3)
        x = torch.randn(1, 2304, device=CUDA)
        self.compare(f"{type} float32 row", lambda: fast.multiply(x, weight), x.double() @ values.T, 2e-6)
        residual = torch.randn(5, 1000, device=CUDA)  # float32: what is left of the error is the product's own
        x = drawn(5, 2304)
        expected = residual.double() + x.double() @ values.T
        self.compare(f"{type} product", lambda: fast.multiply(x, weight, residual), expected, 3e-3)

    def several(self) -> None:
        """Matrices of different types in one launch, in every form of it."""
        parts = [random_packed(t, n, 2304) for t, n in (("Q4_K", 1000), ("Q6_K", 40), ("Q5_K", 333), ("Q4_K", 48))]
        configs = [
            nvidia.FewConfig(*c)
            for c in ((4, 0, False), (8, 0, True), (4, 0, True, True), (1, 0, False), (4, 1, False))
        ]
        for rows, config in [(1, c) for c in configs] + [(12, nvidia.FewConfig(4, 2, True))]:
            x = drawn(rows, 2304)
            expected = [x.double() @ naive.packed_values(p).double().T for p in parts]

            def run(x: Tensor = x, config: nvidia.FewConfig = config) -> Tensor:
                return torch.cat(nvidia.multiply(x, parts, None, config), dim=1)

            self.compare("several", run, torch.cat(expected, dim=1), 6e-3)

    def experts(self) -> None:
        layer = Layer(experts=64)
        for rows in (1, 3, 8, 40, 200, 1100):
            h = drawn(rows, 2048)
            for config in ROUTES if rows < 16 else ROUTES[:1]:
                ids, weights = fast_moe.route(h, layer.router, 8, fast_moe.RouteConfig(*config))
                expected_ids, expected_weights = moe_naive.route(h, layer.router, 8)
                same = (ids == expected_ids).all(1)
                self.compare("route", lambda w=weights, s=same: w[s], expected_weights[same].double(), 1e-4)
                if int(same.sum()) < rows - max(1, rows // 100):  # near ties may fall either way
                    self.log(f"WRONG route: {int(same.sum())} of {rows} rows agree")
            expected = layer.expected(h, ids, weights)
            self.compare(f"moe {rows} rows", lambda h=h, i=ids, w=weights: layer.run(h, i, w), expected, 1.5e-2)
            if rows in (8, 200):
                by_group = functools.partial(layer.by_units_group, h, ids, weights)
                self.compare(f"moe {rows} rows by group", by_group, expected, 1.5e-2)

    def parts(self) -> list[Callable[[], None]]:
        return [*(functools.partial(self.one_type, t) for t in sorted(FORMATS)), self.several, self.experts]

    def report(self) -> None:
        self.log("relative errors, worst of all row counts:")
        self.log("  " + ", ".join(f"{name} {value:.1e}" for name, value in self.worst.items()))


# ---- one MoE layer of 35B-A3B ------------------------------------------------------------------------------------


class Layer:
    """Experts of the usual mix: gate and up in Q4_K, down in Q6_K."""

    def __init__(self, experts: int = 256) -> None:
        routed = shared = "Q4_K"
        down = shared_down = "Q6_K"
        self.gate = ExpertStack((experts, 512, 2048), packed=random_packed(routed, experts * 512, 2048))
        self.up = ExpertStack((experts, 512, 2048), packed=random_packed(routed, experts * 512, 2048))
        self.down = ExpertStack((experts, 2048, 512), packed=random_packed(down, experts * 2048, 512))
        self.shared = SharedExpert(
            Matrix((512, 2048), packed=random_packed(shared, 512, 2048)),
            Matrix((512, 2048), packed=random_packed(shared, 512, 2048)),
            Matrix((2048, 512), packed=random_packed(shared_down, 2048, 512)),
            torch.randn(2048, device=CUDA) / 45,
        )
        self.router = torch.randn(experts, 2048, device=CUDA) / 20

    def run(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe.moe(h, ids, weights, self.gate, self.up, self.down, self.shared)

    def by_pair(self, h: Tensor, ids: Tensor, weights: Tensor, config: moe_nvidia.UnitsConfig) -> Tensor:
        shared = self.shared
        assert shared.gate.packed is not None, "the shared expert is packed"
        assert shared.up.packed is not None, "the shared expert is packed"
        assert shared.down.packed is not None, "the shared expert is packed"
        quad = shared.gate.packed, shared.up.packed, shared.down.packed, shared.scale
        planes = self.gate.planes, self.up.planes, self.down.planes
        return moe_nvidia.by_pair(h, ids, weights, *planes, 512, quad, None, config)

    def by_units_group(
        self, h: Tensor, ids: Tensor, weights: Tensor, config: moe_nvidia.UnitsConfig = moe_nvidia.GROUPS
    ) -> Tensor:
        return fast_moe.by_units_group(
            h, ids, weights, self.gate, self.up, self.down, self.shared, None, config
        )  # fmt: skip

    def by_group(
        self, h: Tensor, ids: Tensor, weights: Tensor, expanding: bool, **tiles: fast_moe.GroupConfig
    ) -> Tensor:
        return fast_moe.by_group(
            h, ids, weights, self.gate, self.up, self.down, self.shared, None, expanding, **tiles
        )  # fmt: skip

    def expected(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Expert by expert in float64."""
        gate, up, down = (
            naive.packed_values(s.planes).view(s.shape) for s in (self.gate, self.up, self.down)
        )  # fmt: skip
        total = torch.zeros(h.shape, dtype=torch.float64, device=CUDA)
        for expert in ids.unique().tolist():
            row, place = torch.nonzero(ids == expert, as_tuple=True)
            x = h[row].double()
            inner = torch.nn.functional.silu(x @ gate[expert].double().T) * (x @ up[expert].double().T)
            total.index_add_(0, row, weights[row, place].double()[:, None] * (inner @ down[expert].double().T))
        shared = [
            naive.packed_values(m.packed) for m in (self.shared.gate, self.shared.up, self.shared.down) if m.packed
        ]
        return total + moe_naive.shared_expert(h, *shared, self.shared.scale).double()

    def nbytes(self, experts: float) -> float:
        each = sum(s.nbytes for s in (self.gate, self.up, self.down)) / self.gate.experts
        return experts * each + sum(m.nbytes for m in (self.shared.gate, self.shared.up, self.shared.down))


@functools.lru_cache(maxsize=1)
def layer() -> Layer:
    return Layer()


@functools.lru_cache(maxsize=2)
def routed_inputs(rows: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Several batches with their own choices of experts."""
    count = 16 if rows < 64 else 4 if rows < 1024 else 2
    inputs = [drawn(rows, 2048) for _ in range(count)]
    return [(h, *fast_moe.route(h, layer().router, 8)) for h in inputs]


# ---- cases -------------------------------------------------------------------------------------------------------

# What competes: warps, eights of rows, ahead, early (`FewConfig`); None is what the house would take.
ROW_FORMS: list[tuple[int, int, bool, bool] | None] = [
    None, (2, 0, False, False), (4, 0, False, False), (8, 0, False, False), (4, 0, True, False), (8, 0, True, False),
    (4, 0, True, True), (8, 0, False, True), (4, 1, False, False), (16, 0, False, False),
]  # fmt: skip
ROWS_FORMS = [(2, False), (4, False), (8, False), (2, True), (4, True)]  # warps, ahead
EXPAND_TILES = [(8, 32, 4), (4, 32, 4)]
ROUTES = [(1, 2048, 1), (2, 1024, 1), (1, 2048, 2), (2, 1024, 4), (1, 1024, 1)]  # experts, columns, warps
PAIRS = [(8, 8, False), (4, 8, False), (16, 8, False), (8, 16, False), (8, 4, False), (8, 8, True)]
UNITS_GROUPS = [(8, 2, False), (4, 2, False), (16, 2, False), (8, 1, False), (4, 1, True)]  # warps up, down; ahead
GROUPS = [(64, 4, 4, 3)]  # outputs, blocks, warps, stages of the general form


def few(form: tuple[int, int, bool, bool] | None) -> nvidia.FewConfig | None:
    return None if form is None else nvidia.FewConfig(*form)


def row_case(case: str, parts: list[tuple[str, int]], columns: int, rows: int = 1) -> Iterator[Variant]:
    """One row, or a few, through one or several matrices in one launch."""

    def build(config: nvidia.FewConfig | None) -> Built:
        sets = [copies(type, out, columns) for type, out in parts]
        count = max(len(each) for each in sets)
        x = drawn(rows, columns)
        calls = [
            functools.partial(nvidia.multiply, x, [each[i % len(each)] for each in sets], None, config)
            for i in range(count)
        ]  # fmt: skip
        return calls, sum(each[0].nbytes for each in sets), 2.0 * rows * columns * sum(out for _, out in parts)

    for form in ROW_FORMS if rows == 1 else [None]:
        yield Variant(case, str(form), functools.partial(build, few(form)))


def swiglu_row_case(case: str, type: str, width: int, columns: int) -> Iterator[Variant]:
    def build(config: nvidia.FewConfig | None) -> Built:
        every = copies(type, width, columns, 2)
        x = drawn(1, columns)
        calls = [
            functools.partial(nvidia.swiglu, x, every[i], every[i + 1], config) for i in range(0, len(every), 2)
        ]  # fmt: skip
        return calls, 2 * every[0].nbytes, 4.0 * width * columns

    for form in ROW_FORMS:
        yield Variant(case, str(form), functools.partial(build, few(form)))


def rows_case(case: str, type: str, out: int, columns: int, rows: int, paired: bool = False) -> Iterator[Variant]:
    def build(config: nvidia.FewConfig | None) -> Built:
        every = copies(type, out, columns, 1 + paired)
        x = drawn(rows, columns)
        step = 1 + paired
        calls = [
            functools.partial(nvidia.swiglu, x, every[i], every[i + 1], config)
            if paired
            else functools.partial(nvidia.multiply, x, [every[i]], None, config)
            for i in range(0, len(every), step)
        ]  # fmt: skip
        return calls, step * every[0].nbytes, 2.0 * step * rows * out * columns

    eights = min(4, max(1, rows // 8))
    forms = [None, *((warps, eights, ahead, False) for warps, ahead in ROWS_FORMS)]
    if eights == 4:
        forms += [(4, 2, False, False), (8, 2, False, False)]
    for form in forms:
        yield Variant(f"{case} x{rows}", str(form), functools.partial(build, few(form)))


def many_case(case: str, type: str, out: int, columns: int, rows: int) -> Iterator[Variant]:
    def build(run: Callable[[Tensor, Packed], Tensor]) -> Built:
        every = copies(type, out, columns)[:3]
        x = drawn(rows, columns)
        calls = [functools.partial(run, x, weight) for weight in every]
        return calls, every[0].nbytes, 2.0 * rows * out * columns

    def by_units(x: Tensor, weight: Packed) -> Tensor:
        return nvidia.multiply(x, [weight])[0]

    yield Variant(f"{case} x{rows}", "expand + library", functools.partial(build, fast.many_rows))
    if rows <= 128:
        yield Variant(f"{case} x{rows}", "units", functools.partial(build, by_units))


def expand_case(case: str, type: str, out: int, columns: int) -> Iterator[Variant]:
    def build(tile: fast.ExpandConfig) -> Built:
        every = copies(type, out, columns)
        values = torch.empty(out, columns, dtype=BF16, device=CUDA)
        calls = [functools.partial(fast.expand, weight, values, tile) for weight in every]
        return calls, every[0].nbytes + values.nbytes, 0.0

    for tile in EXPAND_TILES:
        yield Variant(case, str(tile), functools.partial(build, fast.ExpandConfig(*tile)))


def moe_case(rows: int, label: str, run: Callable[[Tensor, Tensor, Tensor], object]) -> Variant:
    def build() -> Built:
        inputs = routed_inputs(rows)
        distinct = statistics.mean(ids.unique().numel() for _, ids, _ in inputs)
        calls = [functools.partial(run, *each) for each in inputs]
        return calls, layer().nbytes(distinct), rows * 9 * 6.0 * 512 * 2048

    return Variant(f"moe x{rows}", label, build)


def pair_variants(rows: int) -> Iterator[Variant]:
    for form in PAIRS if rows in (1, 8) else PAIRS[:1]:
        config = moe_nvidia.UnitsConfig(*form)

        def run(h: Tensor, i: Tensor, w: Tensor, config: moe_nvidia.UnitsConfig = config) -> Tensor:
            return layer().by_pair(h, i, w, config)

        yield moe_case(rows, f"pairs {form}", run)


def units_variants(rows: int) -> Iterator[Variant]:
    for form in UNITS_GROUPS:
        config = moe_nvidia.UnitsConfig(*form)

        def run(h: Tensor, i: Tensor, w: Tensor, config: moe_nvidia.UnitsConfig = config) -> Tensor:
            return layer().by_units_group(h, i, w, config)

        yield moe_case(rows, f"units {form}", run)


def group_variants(rows: int, expanding: bool) -> Iterator[Variant]:
    density = -(-2 * rows * 8 // 256)
    for out, blocks, warps, stages in GROUPS if not expanding else [(128, 2, 8, 3), (128, 1, 8, 4)]:
        pairs = 128 if expanding else fast_moe.pairs_tile(density)
        tile = fast_moe.GroupConfig(out, pairs, blocks, warps, stages)

        def run(h: Tensor, i: Tensor, w: Tensor, tile: fast_moe.GroupConfig = tile) -> Tensor:
            return layer().by_group(h, i, w, expanding, up_tile=tile, down_tile=tile)

        yield moe_case(rows, f"{'expanded' if expanding else 'groups'} {tuple(tile)}", run)


def route_case(rows: int) -> Iterator[Variant]:
    def build(config: fast_moe.RouteConfig) -> Built:
        calls = [functools.partial(fast_moe.route, h, layer().router, 8, config) for h, _, _ in routed_inputs(rows)]
        return calls, 256 * 2048 * 4.0, 2.0 * rows * 256 * 2048

    for form in ROUTES if rows <= 16 else ROUTES[:1]:
        yield Variant(f"route x{rows}", str(form), functools.partial(build, fast_moe.RouteConfig(*form)))


def cases() -> Iterator[Variant]:
    yield from swiglu_row_case("27B gate+up 2x17408,5120 Q4_K", "Q4_K", 17408, 5120)
    yield from row_case("27B down 5120,17408 Q4_K", [("Q4_K", 5120)], 17408)
    yield from row_case("27B down 5120,17408 Q6_K", [("Q6_K", 5120)], 17408)
    delta = [("Q4_K", 10240), ("Q4_K", 6144), ("Q4_K", 48), ("Q4_K", 48)]
    yield from row_case("27B delta in 16480,5120 Q4_K", delta, 5120)
    yield from row_case("27B attn in 14336,5120 Q4_K+Q6_K", [("Q4_K", 12288), ("Q4_K", 1024), ("Q6_K", 1024)], 5120)
    yield from row_case("27B out 5120,6144 Q4_K", [("Q4_K", 5120)], 6144)
    yield from row_case("27B head 248320,5120 Q6_K", [("Q6_K", 248320)], 5120)
    small = [("Q4_K", 8192), ("Q4_K", 4096), ("Q4_K", 32), ("Q4_K", 32)]
    yield from row_case("35B delta in 12352,2048 Q4_K", small, 2048)
    yield from row_case("35B out 2048,4096 Q4_K", [("Q4_K", 2048)], 4096)
    for rows in (2, 8, 16, 32, 64):
        yield from rows_case("27B gate+up 2x17408,5120 Q4_K", "Q4_K", 17408, 5120, rows, paired=True)
        yield from rows_case("27B down 5120,17408 Q6_K", "Q6_K", 5120, 17408, rows)
    yield from rows_case("27B down 5120,17408 Q4_K", "Q4_K", 5120, 17408, 16)
    yield from rows_case("27B out 5120,6144 Q4_K", "Q4_K", 5120, 6144, 16)
    yield from rows_case("27B head 248320,5120 Q6_K", "Q6_K", 248320, 5120, 16)
    yield from row_case("27B delta in 16480,5120 Q4_K x16", delta, 5120, 16)
    yield from row_case("35B delta in 12352,2048 Q4_K x8", small, 2048, 8)
    yield from rows_case("35B out 2048,4096 Q4_K", "Q4_K", 2048, 4096, 32)
    yield from expand_case("expand 17408,5120 Q4_K", "Q4_K", 17408, 5120)
    yield from expand_case("expand 5120,17408 Q6_K", "Q6_K", 5120, 17408)
    for rows in (48, 64, 96, 128):
        yield from many_case("27B up 17408,5120 Q4_K", "Q4_K", 17408, 5120, rows)
    for rows in (1, 8, 32):
        yield from route_case(rows)
    for rows in (1, 2, 4, 8, 16):
        yield from pair_variants(rows)
    for rows in (4, 8, 16, 32, 64, 128, 256):
        yield from units_variants(rows)
    for rows in (64, 128, 256, 1024, 4096):
        yield from group_variants(rows, expanding=False)
    yield from group_variants(4096, expanding=True)


# ---- timing ------------------------------------------------------------------------------------------------------


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one call, from replays of a graph that runs all of them in turn."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    calls[0]()
    torch.cuda.synchronize()
    alone = time.perf_counter() - begin
    rounds = max(1, min(8, int(2e-3 / max(alone * len(calls), 1e-5))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(9):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (rounds * len(calls)))
    return statistics.median(times)


def line(case: str, label: str, micros: float, nbytes: float, operations: float) -> str:
    speed = nbytes / (micros * 1e-6)
    return (
        f"{case:36s} {label:28s} {micros:9.1f} us {speed / 1e9:6.0f} GB/s {100 * speed / BANDWIDTH:5.1f}% "
        f"{operations / micros / 1e6:6.1f} TF"
    )


def compile_share(index: int, total: int, wanted: list[str]) -> None:
    """Run every total-th variant once, so that its kernel lands in the cache on disk."""
    parts = Checks(lambda text: None).parts()
    parts += [lambda variant=variant: variant.build()[0][0]() for variant in selected(wanted)]
    for part in parts[index::total]:
        part()
        torch.cuda.synchronize()


def selected(wanted: list[str]) -> list[Variant]:
    return [v for v in cases() if not wanted or any(word in v.case for word in wanted)]


def compile_all(wanted: list[str]) -> None:
    command = [sys.executable, __file__, "--compile"]
    jobs = [subprocess.Popen([*command, str(i), str(COMPILERS), *wanted]) for i in range(COMPILERS)]
    failed = [job.args for job in jobs if job.wait() != 0]
    print(f"compilers that failed: {failed}" if failed else "all kernels compiled")


def main() -> None:
    if sys.argv[1:2] == ["--compile"]:
        compile_share(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
        return
    wanted = sys.argv[1:]
    begin = time.perf_counter()
    full = (OUT / "bench_matmul.txt").open("w")

    def log(text: str) -> None:
        print(text, flush=True)
        print(text, file=full, flush=True)

    torch.manual_seed(time.time_ns() % 2**31)
    log(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    compile_all(wanted)
    log(f"compiled after {time.perf_counter() - begin:.0f} s")
    checks = Checks(log)
    for part in checks.parts():
        part()
    checks.report()
    log(f"checked after {time.perf_counter() - begin:.0f} s")
    results: dict[str, list[tuple[float, str, float, float]]] = {}
    for variant in selected(wanted):
        try:
            calls, nbytes, operations = variant.build()
            micros = microseconds(calls)
        except (RuntimeError, torch.OutOfMemoryError) as problem:  # one variant too large for the card ends no run
            log(f"{variant.case} {variant.label} FAILED: {str(problem)[:200]}")
            continue
        print(line(variant.case, variant.label, micros, nbytes, operations), file=full, flush=True)
        results.setdefault(variant.case, []).append((micros, variant.label, nbytes, operations))
    log(f"timed after {time.perf_counter() - begin:.0f} s; best of each case, then the first variant's time:")
    for case, found in results.items():
        best = min(found)
        log(line(case, best[1], *(best[0], best[2], best[3])) + f"  ({found[0][0]:.1f})")


if __name__ == "__main__":
    main()

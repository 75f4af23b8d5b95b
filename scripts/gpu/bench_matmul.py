"""Check, then time, the matrix and expert kernels of a decode step on a GPU, in the shapes of 27B and 35B-A3B.

    PYTHONPATH=src python3 scripts/gpu/bench_matmul.py [only cases with one of these words ...]

A timing is a replayed graph, a chain of links as a step has them: a norm, then the launches of the case on weights
that the L2 no longer holds; the time of the norms alone is taken off. What a chain gives must be, bit for bit, what
its links give one by one. The short table comes last (the best form of each case, in brackets what the house takes);
all goes to $OUT/bench_matmul.txt. Exit code 1: something was wrong.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu

from rekindle.kernels import norm
from rekindle.kernels.matmul import naive, stream_k, tensor_core
from rekindle.kernels.matmul import triton as fast
from rekindle.kernels.matmul.packing import FORMATS, pack
from rekindle.kernels.matmul.stream_k import StreamKShape
from rekindle.kernels.matmul.tensor_core import FewConfig
from rekindle.kernels.matmul.types import Matrix, Packed
from rekindle.kernels.moe import naive as moe_naive
from rekindle.kernels.moe import router
from rekindle.kernels.moe import tensor_core as moe_tensor_core
from rekindle.kernels.moe import triton as fast_moe
from rekindle.kernels.moe.tensor_core import TensorCoreConfig
from rekindle.kernels.moe.types import ExpertStack, SharedExpert

BANDWIDTH = 4.3e12  # bytes a second, copy, as measured on this card
ROTATED = 300e6  # bytes of distinct weights behind one timing
LINKS = 24  # at least, of one chain
COMPILERS = 14
SECONDS = 40.0  # after this no further form is tried
COMPILING = sys.argv[1:2] == ["--compile"]  # few matrices: only the compiled kernels count
CUDA = torch.device("cuda")
BF16 = torch.bfloat16
OUT = Path(os.environ.get("OUT", "/tmp"))

Run = Callable[[int, Tensor], list[Tensor]]  # link, x -> outputs


@dataclass(frozen=True, slots=True)
class Case:
    """Forms of the same computation; `count` distinct sets of weights; bytes that one link reads."""

    name: str
    rows: int
    columns: int
    count: int
    nbytes: float
    forms: Mapping[str, Run]  # what the house takes comes first
    expected: Callable[[Tensor], list[Tensor]]  # of link 0
    bound: float = 6e-3


# ---- data --------------------------------------------------------------------------------------------------------


def random_packed(type: str, rows: int, columns: int) -> Packed:
    """Random codes and integer scales, with factors that make weights of about 1 / sqrt(columns)."""
    form = FORMATS[type]
    raw = torch.randint(0, 256, (rows * columns // form.weights, form.nbytes), dtype=torch.uint8, device=CUDA)
    size = 1 / (columns**0.5 * {"Q4_K": 200, "Q5_K": 400, "Q6_K": 1300}[type])
    for start in [208] if type == "Q6_K" else [0, 2]:
        factors = size * (0.5 + torch.rand(raw.shape[0], 1, device=CUDA))
        raw[:, start : start + 2] = factors.half().view(torch.uint8)
    return pack(raw.view(rows, -1), type, columns)


def random_weight(type: str, rows: int, columns: int) -> Packed | Tensor:
    if type == "dense":
        return (torch.randn(rows, columns, device=CUDA) / columns**0.5).to(BF16)
    return random_packed(type, rows, columns)


def values_of(weight: Packed | Tensor) -> Tensor:
    return weight.double() if isinstance(weight, Tensor) else naive.packed_values(weight).double()


@functools.lru_cache(maxsize=2)
def weights_of(parts: tuple[tuple[str, int], ...], columns: int) -> list[list[Packed | Tensor]]:
    """Several sets of the same matrices (type, rows), enough to leave the L2 behind."""

    def one_set() -> list[Packed | Tensor]:
        return [random_weight(type, rows, columns) for type, rows in parts]

    first = one_set()
    count = 2 if COMPILING else max(2, min(16, round(ROTATED / sum(p.nbytes for p in first)) + 1))
    return [first, *(one_set() for _ in range(count - 1))]


class Layer:
    """A routed layer of 35B-A3B in the usual mix: gate and up in Q4_K, down in Q6_K."""

    def __init__(self, experts: int) -> None:
        self.gate = ExpertStack((experts, 512, 2048), packed=random_packed("Q4_K", experts * 512, 2048))
        self.up = ExpertStack((experts, 512, 2048), packed=random_packed("Q4_K", experts * 512, 2048))
        self.down = ExpertStack((experts, 2048, 512), packed=random_packed("Q6_K", experts * 2048, 512))
        self.s_gate, self.s_up = random_packed("Q4_K", 512, 2048), random_packed("Q4_K", 512, 2048)
        self.s_down = random_packed("Q6_K", 2048, 512)
        self.shared = SharedExpert(
            Matrix((512, 2048), packed=self.s_gate), Matrix((512, 2048), packed=self.s_up),
            Matrix((2048, 512), packed=self.s_down), torch.randn(2048, device=CUDA) / 45,
        )  # fmt: skip
        self.router = torch.randn(experts, 2048, device=CUDA) / 20

    def by_pair(self, h: Tensor, ids: Tensor, weights: Tensor, config: TensorCoreConfig) -> Tensor:
        quad = self.s_gate, self.s_up, self.s_down, self.shared.scale
        planes = self.gate.planes, self.up.planes, self.down.planes
        return moe_tensor_core.by_pair(h, ids, weights, *planes, 512, quad, config)

    def by_integers(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return fast_moe.by_integers(h, ids, weights, self.gate, self.up, self.down, self.shared)

    def expected(self, h: Tensor) -> Tensor:
        """Expert by expert in float64."""
        ids, weights = moe_naive.route(h, self.router, 8)
        shared = [naive.packed_values(part) for part in (self.s_gate, self.s_up, self.s_down)]
        total = moe_naive.shared_expert(h, shared[0], shared[1], shared[2], self.shared.scale).double()
        gate, up, down = (naive.packed_values(s.planes).view(s.shape) for s in (self.gate, self.up, self.down))
        for expert in ids.unique().tolist():
            row, place = torch.nonzero(ids == expert, as_tuple=True)
            x = h[row].double()
            inner = silu(x @ gate[expert].double().T) * (x @ up[expert].double().T)
            total.index_add_(0, row, weights[row, place].double()[:, None] * (inner @ down[expert].double().T))
        return total

    def nbytes(self, experts: float) -> float:
        each = sum(s.nbytes for s in (self.gate, self.up, self.down)) / self.gate.experts
        return experts * each + self.s_gate.nbytes + self.s_up.nbytes + self.s_down.nbytes


@functools.lru_cache(maxsize=1)
def layer() -> Layer:
    return Layer(256)


# ---- cases -------------------------------------------------------------------------------------------------------


def products_case(
    name: str,
    parts: list[tuple[str, int]],
    columns: int,
    rows: int,
    *rivals: FewConfig | StreamKShape,
    paired: bool = False,
) -> Case:
    """Several matrices in one launch, or silu(gate x) · (up x) of two."""
    key = tuple(parts)

    def house(link: int, x: Tensor) -> list[Tensor]:
        weights = weights_of(key, columns)[link]
        if not paired:
            return fast.multiply_by_all(x, [as_matrix(weight) for weight in weights])
        gate, up = (weight for weight in weights if isinstance(weight, Packed))
        return [fast.swiglu(x, gate, up)]

    def run(form: FewConfig | StreamKShape, link: int, x: Tensor) -> list[Tensor]:
        weights = weights_of(key, columns)[link]
        by = tensor_core if isinstance(form, FewConfig) else stream_k
        if not paired:
            return by.multiply(x, weights, form)
        gate, up = (weight for weight in weights if isinstance(weight, Packed))
        return [by.swiglu(x, gate, up, form)]

    def expected(x: Tensor) -> list[Tensor]:
        outs = [x.double() @ values_of(weight).T for weight in weights_of(key, columns)[0]]
        return [silu(outs[0]) * outs[1]] if paired else outs

    sets = weights_of(key, columns)
    forms: dict[str, Run] = {"house": house}
    forms |= {f"{type(form).__name__} {_label(form)}": functools.partial(run, form) for form in rivals}
    nbytes = sum(p.nbytes for p in sets[0])
    bound = 9e-3 if paired else 6e-3
    return Case(f"{name} x{rows}", rows, columns, len(sets), nbytes, forms, expected, bound)


def as_matrix(weight: Packed | Tensor) -> Matrix:
    if isinstance(weight, Tensor):
        return Matrix((weight.shape[0], weight.shape[1]), dense=weight)
    return Matrix((weight.rows, weight.columns), packed=weight)


def route_case(rows: int) -> Case:
    def run(link: int, h: Tensor) -> list[Tensor]:
        return list(router.route(h, layer().router, 8))

    def expected(h: Tensor) -> list[Tensor]:
        return [out.double() for out in moe_naive.route(h, layer().router, 8)]

    forms = {_label(router.route_config(rows)): run}
    return Case(f"35B route x{rows}", rows, 2048, 16, 256 * 2048 * 4.0, forms, expected, 1e-4)


def moe_case(rows: int, pairs: tuple[TensorCoreConfig, ...] = (), integers: bool = True) -> Case:
    """Route and experts: every pair for itself, or an expert's pairs by twos in the integer tensor cores."""

    def by_pair(config: TensorCoreConfig, link: int, h: Tensor) -> list[Tensor]:
        return [layer().by_pair(h, *router.route(h, layer().router, 8), config)]

    def by_integers(link: int, h: Tensor) -> list[Tensor]:
        return [layer().by_integers(h, *router.route(h, layer().router, 8))]

    forms: dict[str, Run] = {f"pairs {_label(config)}": functools.partial(by_pair, config) for config in pairs}
    if integers:
        forms["integers"] = by_integers
    distinct = 256 * (1 - (1 - 8 / 256) ** rows)  # experts, if every choice is as likely
    return Case(
        f"35B route + moe x{rows}", rows, 2048, 16, layer().nbytes(distinct), forms,
        lambda h: [layer().expected(h)], 1.5e-2,
    )  # fmt: skip


def _label(form: tuple[object, ...]) -> str:
    return ",".join("-+"[part] if isinstance(part, bool) else str(part) for part in form)


GATE_UP = "27B gate+up 2x17408,5120 Q4_K", [("Q4_K", 17408), ("Q4_K", 17408)], 5120
DOWN_4 = "27B down 5120,17408 Q4_K", [("Q4_K", 5120)], 17408
DOWN_6 = "27B down 5120,17408 Q6_K", [("Q6_K", 5120)], 17408
DELTA = "27B delta in 96+16384,5120 Q4_K", [("dense", 48), ("dense", 48), ("Q4_K", 10240), ("Q4_K", 6144)], 5120
OUT_27B = "27B out 5120,6144 Q4_K", [("Q4_K", 5120)], 6144
ATTENTION = "27B attention in 14336,5120 Q4_K, Q6_K", [("Q4_K", 12288), ("Q4_K", 1024), ("Q6_K", 1024)], 5120
HEAD = "27B head 248320,5120 Q6_K", [("Q6_K", 248320)], 5120
SMALL = "35B delta in 64+12288,2048 Q4_K", [("dense", 32), ("dense", 32), ("Q4_K", 8192), ("Q4_K", 4096)], 2048
OUT_35B = "35B out 2048,4096 Q4_K", [("Q4_K", 2048)], 4096


def cases() -> Iterator[Callable[[], Case]]:
    few, part = FewConfig, functools.partial
    pairs = moe_tensor_core.pairs_config
    yield part(moe_case, 1, (pairs(1),), integers=False)
    yield part(moe_case, 8, (pairs(8),))
    yield part(moe_case, 16)
    yield part(moe_case, 32)
    yield part(products_case, *SMALL, 1, few(8, 0, False))
    yield part(products_case, *DELTA, 1, few(8, 0, False))
    yield part(products_case, *GATE_UP, 1, paired=True)
    for shape in (DOWN_4, DOWN_6, OUT_27B, ATTENTION, HEAD, OUT_35B):
        yield part(products_case, *shape, 1)
    thirds = stream_k.BY_TILES[4]  # of a multiprocessor; timed up to 16 rows for gate and up only
    yield part(products_case, *GATE_UP, 16, paired=True)
    for shape in (DOWN_4, DOWN_6, DELTA, OUT_27B, ATTENTION, HEAD):
        yield part(products_case, *shape, 16, thirds)
    for rows in (8, 32):
        yield part(products_case, *SMALL, rows)
        yield part(products_case, *OUT_35B, rows)
    for rows in (1, 8, 32):
        yield part(route_case, rows)


# ---- checks and timing -------------------------------------------------------------------------------------------


class Chain:
    """A norm and a case's launches, link by link."""

    def __init__(self, case: Case) -> None:
        self.links = list(range(case.count)) * -(-LINKS // case.count)
        shape = case.count, case.rows, case.columns
        self.streams = torch.randn(*shape, device=CUDA, dtype=BF16), torch.randn(*shape, device=CUDA, dtype=BF16)
        self.weight = torch.ones(case.columns, device=CUDA)

    def x(self, link: int) -> Tensor:
        return norm.add_rms_norm(self.streams[0][link], self.streams[1][link], self.weight, 1e-6)[1]

    def run(self, form: Run | None) -> list[list[Tensor]]:
        outs = []
        for link in self.links:
            x = self.x(link)
            outs.append([x] if form is None else form(link, x))
        return outs

    def captured(self, form: Run | None) -> tuple[torch.cuda.CUDAGraph, list[list[Tensor]]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = self.run(form)
        return graph, outs

    def one_by_one(self, form: Run) -> list[list[Tensor]]:
        outs = []
        for link in self.links:
            x = self.x(link)
            torch.cuda.synchronize()
            outs.append(form(link, x))
            torch.cuda.synchronize()
        return outs


def microseconds(graph: torch.cuda.CUDAGraph, links: int) -> float:
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(9):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / links)
    return statistics.median(times)


def complaint(case: Case, chain: Chain, form: Run, outs: list[list[Tensor]], expected: list[Tensor]) -> str | None:
    """What is wrong with the outputs of a chain; `expected` is what link 0 should give."""
    alone = chain.one_by_one(form)
    unlike = sum(not torch.equal(a, b) for x, y in zip(alone, outs, strict=True) for a, b in zip(x, y, strict=True))
    if unlike:
        return f"{unlike} outputs of the chain differ from the links' own"
    for out, right in zip(outs[0], expected, strict=True):
        error = float((out.double() - right).norm() / right.norm())
        if not error < case.bound:
            return f"error {error:.1e}, bound {case.bound:.0e}"
    return None


def mixed_types() -> str | None:
    """Matrices of different types and odd sizes in one launch, in every form of it."""
    parts = [random_weight(t, n, 2304) for t, n in (("Q4_K", 1000), ("Q6_K", 40), ("dense", 45), ("Q5_K", 333))]
    for by, rows, config in (
        (tensor_core, 1, FewConfig(4, 0, False)), (tensor_core, 1, FewConfig(8, 0, False)),
        (tensor_core, 5, FewConfig(4, 1, True)),
        (tensor_core, 12, FewConfig(4, 2, False, 2)), (stream_k, 9, stream_k.BY_TILES[2]),
        (stream_k, 27, stream_k.BY_TILES[4]),
    ):  # fmt: skip
        x = torch.randn(rows, 2304, device=CUDA, dtype=BF16)
        outs = by.multiply(x, parts, config)
        for i, (out, weight) in enumerate(zip(outs, parts, strict=True)):
            expected = x.double() @ values_of(weight).T
            error = float((out.double() - expected).norm() / expected.norm())
            if not error < 6e-3:
                return f"{rows} rows, {config}, matrix {i}: error {error:.1e}"
    return None


def line(case: Case, label: str, micros: float) -> str:
    speed = case.nbytes / (micros * 1e-6)
    return f"{case.name:40s} {label:28s} {micros:8.1f} us {speed / 1e9:6.0f} GB/s {100 * speed / BANDWIDTH:5.1f}%"


def selected(wanted: list[str]) -> Iterator[Case]:
    for build in cases():
        case = build()
        if not wanted or any(word in case.name for word in wanted):
            yield case


def compile_share(index: int, total: int, wanted: list[str]) -> None:
    """Run the forms of every total-th case once, so that their kernels land in the cache on disk."""
    for build in list(cases())[index::total]:
        case = build()
        if not wanted or any(word in case.name for word in wanted):
            chain = Chain(case)
            for form in case.forms.values():
                form(0, chain.x(0))
    if index == total - 1:
        mixed_types()
    torch.cuda.synchronize()


def compile_all(wanted: list[str]) -> list[object]:
    command = [sys.executable, __file__, "--compile"]
    jobs = [subprocess.Popen([*command, str(i), str(COMPILERS), *wanted]) for i in range(COMPILERS)]
    return [job.args for job in jobs if job.wait() != 0]


def main() -> int:
    if COMPILING:
        compile_share(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
        return 0
    begin = time.perf_counter()
    full = (OUT / "bench_matmul.txt").open("w")
    wrong = 0

    def log(text: str) -> None:
        print(text, flush=True)
        print(text, file=full, flush=True)

    log(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    failed = compile_all(sys.argv[1:])
    log(f"compiled after {time.perf_counter() - begin:.0f} s" + (f", these failed: {failed}" if failed else ""))
    if problem := mixed_types():
        log(f"WRONG mixed types: {problem}")
        wrong += 1
    table: list[str] = []
    for case in selected(sys.argv[1:]):
        chain = Chain(case)
        graph, _ = chain.captured(None)
        norms = microseconds(graph, len(chain.links))
        expected = case.expected(chain.x(0))
        found: list[tuple[float, str]] = []
        for label, form in case.forms.items():
            if time.perf_counter() - begin > SECONDS:
                log(f"no time left for {case.name} {label}")
                continue
            try:
                form(0, chain.x(0))
                graph, outs = chain.captured(form)
                micros = microseconds(graph, len(chain.links)) - norms
                problem = complaint(case, chain, form, outs, expected)
            except (RuntimeError, torch.OutOfMemoryError) as broken:  # one form too large for the card ends no run
                problem = str(broken)[:200]
            if problem:
                log(f"WRONG {case.name} {label}: {problem}")
                wrong += 1
                continue
            print(line(case, label, micros), file=full, flush=True)
            found.append((micros, label))
        if found:
            best = min(found)
            table.append(line(case, best[1], best[0]) + f"  ({found[0][1]}: {found[0][0]:.1f})")
    log(f"timed after {time.perf_counter() - begin:.0f} s")
    for text in table:
        log(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Check, then time, the products of 2 to 16 rows on a GPU, form by form, at every matrix of 27B and 35B-A3B.

    PYTHONPATH=src python3 scripts/gpu/bench_few_rows.py [--only WORD ...] [--rows 1 2 4 8 16]
    PYTHONPATH=src python3 scripts/gpu/bench_few_rows.py --steps [--folder /dev/shm]
    PYTHONPATH=src python3 scripts/gpu/bench_few_rows.py --list

The first compares every form with the definition in float64 (outputs lie where no numbers lay) and times it as a
replayed graph: a chain of norm and product over weights that the L2 no longer holds, the norms' time taken off. "old"
is what was chosen before there were skinny products, "house" what is chosen now. The table comes last, with sums over
all layers. All timings go to $OUT/bench_few_rows.txt. Exit code 1: something was wrong.

--steps says where one recorded step of each shape, whose file is in the folder, spends its time by kernel: 1 row plain,
2 and 8 rows as a block to verify, gone back over. A kernel's time is what it adds to the end of those before it, since
launches overlap. --list needs no GPU: the cases and their forms.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import bench_matmul
import torch
from bench_matmul import Case, Chain, as_matrix, microseconds, random_weight, values_of
from torch import Tensor
from torch.nn.functional import silu

from rekindle.bench.synth import SHAPES, tensors_of
from rekindle.kernels.matmul import fragments, skinny, stream_k, tensor_core
from rekindle.kernels.matmul import triton as fast
from rekindle.kernels.matmul.skinny import SkinnyConfig
from rekindle.kernels.matmul.types import Packed
from rekindle.spec import DeltaSpec

MODELS = {"27B": "qwen3.6-27b", "35B": "qwen3.6-35b-a3b"}
WORKERS = 15
ROTATED = 300e6  # bytes of distinct weights behind one timing
BF16 = torch.bfloat16
Form = Callable[[Tensor, Sequence[Packed | Tensor]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Launch:
    """The matrices of one launch, (type, rows) each, and how many of its kind a step has."""

    name: str
    parts: tuple[tuple[str, int], ...]
    columns: int
    count: int
    paired: bool = False

    @property
    def width(self) -> int:
        return sum(rows for _, rows in self.parts)


ODD = (
    Launch("odd Q6_K", (("dense", 45), ("Q4_K", 1000), ("Q6_K", 40), ("Q5_K", 333)), 2304, 0),
    Launch("odd gated", (("Q5_K", 213), ("Q5_K", 213)), 2304, 0, paired=True),
    Launch("odd down", (("Q6_K", 213),), 2304, 0),
)


# ---- cases and forms -------------------------------------------------------------------------------------------------


def launches() -> Iterator[Launch]:
    """Those of one step of either model, found in its tensors; without routed experts."""
    for model, shape in MODELS.items():
        spec = SHAPES[shape].spec
        types = {tensor.name: tensor.type for tensor in tensors_of(spec)}
        found = Counter[tuple[str, tuple[tuple[str, int], ...], int, bool]]()

        def add(label, names, columns, layer, sizes, paired=False, found=found, types=types):
            kinds = [types[f"blk.{layer}.{name}.weight"] for name in names]
            parts = tuple(("dense" if k == "F32" else k, n) for k, n in zip(kinds, sizes, strict=True))
            told = "+".join(dict.fromkeys(k for k, _ in parts if k != "dense"))
            found[f"{label} {told}", parts, columns, paired] += 1

        for layer, mixer in enumerate(spec.mixers):
            if isinstance(mixer, DeltaSpec):
                keys, values = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
                names = ["ssm_alpha", "ssm_beta", "attn_qkv", "attn_gate"]
                heads = mixer.value_heads
                add("delta in", names, spec.hidden, layer, [heads, heads, 2 * keys + values, values])
                add("out", ["ssm_out"], values, layer, [spec.hidden])
            else:
                q, kv = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
                sizes = [kv, 2 * q if mixer.gated else q, kv]
                add("attention in", ["attn_v", "attn_q", "attn_k"], spec.hidden, layer, sizes)
                add("out", ["attn_output"], q, layer, [spec.hidden])
            if not spec.ffn.is_moe:
                width = spec.ffn.width
                add("gate+up", ["ffn_gate", "ffn_up"], spec.hidden, layer, [width, width], paired=True)
                add("down", ["ffn_down"], width, layer, [spec.hidden])
        found["head " + types["output.weight"], ((types["output.weight"], spec.vocab),), spec.hidden, False] += 1
        for (label, parts, columns, paired), count in found.items():
            yield Launch(f"{model} {label}", parts, columns, count, paired)


def old_form(launch: Launch, rows: int) -> Form:
    """What was chosen before."""
    values = launch.width * launch.columns
    if launch.paired:
        by = stream_k if rows > 8 or stream_k.pays(rows, values) else tensor_core
        return lambda x, weights: [by.swiglu(x, *weights)]
    if stream_k.pays(rows, values):
        return stream_k.multiply
    return fragments.multiply if fragments.pays(rows, launch.width) else tensor_core.multiply


def house_form(launch: Launch) -> Form:
    def run(x: Tensor, weights: Sequence[Packed | Tensor]) -> list[Tensor]:
        if launch.paired:
            gate, up = (weight for weight in weights if isinstance(weight, Packed))
            return [fast.swiglu(x, gate, up)]
        if len(weights) == 1 and "down" in launch.name and isinstance(weights[0], Packed):
            return [fast.multiply_in_parts(x, weights[0])]
        return fast.multiply_by_all(x, [as_matrix(weight) for weight in weights])

    return run


def skinny_form(launch: Launch, config: SkinnyConfig) -> Form:
    if launch.paired:
        return lambda x, weights: [skinny.swiglu(x, *weights, config)]
    return lambda x, weights: skinny.multiply(x, weights, config)


def variants(launch: Launch, rows: int) -> Iterator[SkinnyConfig]:
    """Forms to be timed: x as it lies or in order; more warps along the outputs or the columns; parts; two tiles."""
    config = SkinnyConfig
    if launch.paired:
        every = [config(2, 4), config(2, 2), config(2, 4, ordered=True), config(2, 2, ordered=True)]
        every += [config(4, 2, ordered=True), config(1, 4, 2, ordered=True)]
    else:
        every = [config(1, 4), config(1, 8), config(1, 4, ordered=True), config(1, 8, ordered=True)]
        every += [config(2, 4, ordered=True)]
        if "down" in launch.name:
            every += [config(1, 4, ordered=True, parts=2), config(1, 4, parts=2)]
        elif launch.width >= tensor_core.WIDE:
            every += [config(1, 4, 2, ordered=True), config(1, 2, ordered=True)]
    if rows <= 8:
        yield from every
        return
    yield from (each for each in every if each.ordered and each.tiles == 1)
    parts = 2 if "down" in launch.name else 1
    yield from (config(1, across, 2, True, parts) for across in (2, 4))


def label_of(config: SkinnyConfig) -> str:
    words = "ord" if config.ordered else "lie"
    words += f" {config.down}x{config.across}"
    return words + (" 2 tiles" if config.tiles == 2 else "") + (f" {config.parts} parts" if config.parts > 1 else "")


def forms_of(launch: Launch, rows: int) -> dict[str, Form]:
    """The first two are what was and what is chosen."""
    if rows == 1:
        return {"house": house_form(launch)}
    found: dict[str, Form] = {"old": old_form(launch, rows), "house": house_form(launch)}
    return found | {label_of(each): skinny_form(launch, each) for each in variants(launch, rows)}


# ---- compiling -------------------------------------------------------------------------------------------------------


def outline_of(type: str, rows: int, columns: int) -> Packed | Tensor:
    """A weight of which nothing is asked but its shape."""

    def plane(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device="cuda:0")

    if type == "dense":
        return plane(BF16, columns)
    blocks = columns // 32
    upper = {"Q4_K": None, "Q5_K": torch.int32, "Q6_K": torch.int64}[type]
    return Packed(
        type, rows, columns, plane(torch.int32, blocks, 4), None if upper is None else plane(upper, blocks),
        plane(torch.int16, blocks), plane(torch.float32 if type == "Q6_K" else torch.int32, blocks // 8),
    )  # fmt: skip


def noted(chosen: Sequence[Launch], rows: Sequence[int]) -> Iterator[object]:
    """Every kernel that will be launched, each once; the slowest to compile, those of several types, first."""
    from rekindle.kernels import norm
    from rekindle.warmup.launches import recording
    from rekindle.warmup.outline import DeviceWithoutMemory

    given = 0
    with DeviceWithoutMemory(), torch.inference_mode(), recording() as found:
        for launch in sorted(chosen, key=lambda launch: -len(set(launch.parts))):
            weights = [outline_of(type, count, launch.columns) for type, count in launch.parts]
            for n in rows:
                x = torch.empty(n, launch.columns, dtype=BF16, device="cuda:0")
                norm.add_rms_norm(x, x, torch.empty(launch.columns, device="cuda:0"), 1e-6)
                for form in forms_of(launch, n).values():
                    form(x, weights)
                yield from list(found)[given:]
                given = len(found)


def compile_all(chosen: list[Launch], rows: list[int], arch: int) -> int:
    """In processes that are forked before this one has touched the GPU. Returns how many kernels there are."""
    from triton.backends.compiler import GPUTarget

    from rekindle.warmup.launches import CompileWorkers

    workers = CompileWorkers(WORKERS, GPUTarget("cuda", arch, 32))
    jobs = [workers.compile(launch) for launch in noted(ODD, (8, 16))]  # type: ignore[arg-type]
    jobs += [workers.compile(launch) for launch in noted(chosen, rows)]  # type: ignore[arg-type]
    failed = [error for job in jobs if (error := job.exception()) is not None]
    for error in failed[:3]:
        print(f"does not compile: {str(error)[-300:]}", flush=True)
    workers.stop()
    return len(jobs)


# ---- checks and timing -----------------------------------------------------------------------------------------------


def weight_sets(launch: Launch) -> list[list[Packed | Tensor]]:
    def one_set() -> list[Packed | Tensor]:
        return [random_weight(type, rows, launch.columns) for type, rows in launch.parts]

    first = one_set()
    count = max(2, min(16, round(ROTATED / sum(part.nbytes for part in first)) + 1))
    return [first, *(one_set() for _ in range(count - 1))]


def definition(launch: Launch, x: Tensor, weights: list[Packed | Tensor]) -> list[Tensor]:
    outs = [x.double() @ values_of(weight).T for weight in weights]
    return [silu(outs[0]) * outs[1]] if launch.paired else outs


def whole(out: Tensor) -> Tensor:
    """The sum of what is in parts."""
    return out.sum(0) if out.dim() == 3 else out


def poison(rows: int, launch: Launch) -> None:
    """Memory that the next outputs will be given holds no numbers."""
    for _, width in launch.parts:
        for dtype in (BF16, torch.float32):
            blocks = [torch.full((n, rows, width), torch.nan, dtype=dtype, device=bench_matmul.CUDA) for n in (1, 1, 2)]
            del blocks


def wrongs(launch: Launch, form: Form, x: Tensor, weights: list[Packed | Tensor], expected: list[Tensor]) -> str | None:
    poison(len(x), launch)
    for i, (out, right) in enumerate(zip(form(x, weights), expected, strict=True)):
        error = float((whole(out).double() - right).norm() / right.norm())
        if not error < (9e-3 if launch.paired else 6e-3):
            return f"matrix {i}: error {error:.1e}"
    return None


def alike(some: list[list[Tensor]], others: list[list[Tensor]]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for x, y in zip(some, others, strict=True) for a, b in zip(x, y, strict=True))


class Bench:
    def __init__(self, rows: list[int], seconds: float) -> None:
        self.rows, self.end = rows, time.perf_counter() + seconds
        self.full = (Path(os.environ.get("OUT", "/tmp")) / "bench_few_rows.txt").open("w")
        self.wrong = 0
        self.times: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)  # µs by form

    def say(self, text: str, quiet: bool = False) -> None:
        print(text, file=self.full, flush=True)
        if not quiet:
            print(text, flush=True)

    def check_odd_sizes(self) -> None:
        """Sizes that no tile divides, every type, every variant."""
        for launch in ODD:
            weights = [random_weight(type, count, launch.columns) for type, count in launch.parts]
            for rows in (2, 3, 5, 8, 9, 16):
                x = torch.randn(rows, launch.columns, device=bench_matmul.CUDA, dtype=BF16)
                expected = definition(launch, x, weights)
                for config in variants(launch, rows):
                    self.note(launch, rows, label_of(config), skinny_form(launch, config), x, weights, expected)

    def note(self, launch, rows, label, form, x, weights, expected) -> bool:
        try:
            problem = wrongs(launch, form, x, weights, expected)
        except RuntimeError as broken:  # a form too large for the card ends no run
            problem = str(broken)[:200]
        if problem:
            self.say(f"WRONG {launch.name} x{rows} {label}: {problem}")
            self.wrong += 1
        return problem is None

    def run(self, launch: Launch) -> None:
        sets = weight_sets(launch)
        nbytes = sum(part.nbytes for part in sets[0])
        most = torch.randn(max(self.rows), launch.columns, device=bench_matmul.CUDA, dtype=BF16)
        expected = definition(launch, most, sets[0])
        for rows in self.rows:
            case = Case(launch.name, rows, launch.columns, len(sets), nbytes, {}, lambda x: [])
            chain = Chain(case)
            norms = microseconds(chain.captured(None)[0], len(chain.links))
            for label, form in forms_of(launch, rows).items():
                if time.perf_counter() > self.end and label not in ("old", "house"):
                    continue
                right = [each[:rows] for each in expected]
                if not self.note(launch, rows, label, form, most[:rows], sets[0], right):
                    continue

                def link(number: int, x: Tensor, form: Form = form) -> list[Tensor]:
                    return form(x, sets[number])

                graph, outs = chain.captured(link)
                micros = microseconds(graph, len(chain.links)) - norms
                if rows == 8 and not alike(chain.one_by_one(link), outs):
                    self.say(f"WRONG {launch.name} x{rows} {label}: a chain gives other bits than its links")
                    self.wrong += 1
                self.times[launch.name, rows][label] = micros
                speed = nbytes / micros / 1e3
                self.say(f"{launch.name:28s} x{rows:<2d} {label:20s} {micros:8.1f} us {speed:6.0f} GB/s", quiet=True)

    def table(self, chosen: list[Launch]) -> None:
        self.say("µs a launch; × n: launches of a step")
        sums: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
        for launch in chosen:
            for rows in self.rows:
                found = self.times[launch.name, rows]
                if not found:
                    continue
                best = min(found, key=found.__getitem__)
                house = found.get("house", found[best])
                row = {"old": found.get("old", house), "house": house, "best": found[best]}
                for name, micros in row.items():
                    sums[launch.name.split()[0], rows][name] += launch.count * micros / 1e3
                told = " ".join(f"{name} {micros:7.1f}" for name, micros in row.items())
                self.say(f"{launch.name:28s} × {launch.count:<2d} rows {rows:<2d} {told}  {best}")
        for (model, rows), row in sums.items():
            told = ", ".join(f"{name} {milli:.2f}" for name, milli in row.items())
            self.say(f"{model} all products of a step, {rows} rows, ms: {told}")


# ---- whole steps -----------------------------------------------------------------------------------------------------


def steps(path: Path, device: str) -> None:
    from rekindle.batch import Batch, Segment, Wanted
    from rekindle.build.stage import StageConfig, load_stage
    from rekindle.weights import open_weights

    file = open_weights(path)
    kinds = {"kv_type": "f32", "dtype": "float32"} if device == "cpu" else {"kv_type": "bf16", "dtype": "bfloat16"}
    config = StageConfig(device, file.spec.whole, 4, 64, rewind_rows=16, **kinds)
    stage = load_stage(file, config)
    tokens = tuple(range(5, 517))
    columns: dict[int, dict[str, tuple[float, float]]] = {}
    spans = {}
    for rows in (1, 2, 8):
        stage.open(0)
        stage.forward(Batch((Segment(0, 0, tokens),)), None)
        positions = iter(range(512, 600))

        def step(rows: int = rows, positions: Iterator[int] = positions) -> None:
            if rows == 1:
                stage.forward(Batch((Segment(0, next(positions), (5,), Wanted.LAST),)), None)
            else:
                stage.forward(Batch((Segment(0, 512, tokens[:rows], Wanted.ALL),), rewindable=True), None)
                stage.rewind(0, 512)

        for _ in range(3):
            step()
        wait(device)
        began = time.perf_counter()
        for _ in range(20):
            step()
        wait(device)
        wall = (time.perf_counter() - began) / 20 * 1e3
        columns[rows], busy = by_kernel(step, 5, device)
        spans[rows] = wall, busy
        stage.close(0)
    print(f"{path.stem}: µs a step (launches) by kernel, what each adds to the end of those before it")
    every = {name for column in columns.values() for name in column}
    names = sorted(every, key=lambda name: -columns[8].get(name, (0.0, 0.0))[0])
    for name in names:
        cells = [columns[rows].get(name, (0.0, 0.0)) for rows in columns]
        if max(micros for micros, _ in cells) >= 3:
            print(f"{name[:44]:44s}" + "".join(f"{micros:9.0f} ({count:5.1f})" for micros, count in cells))
    for rows, (wall, busy) in spans.items():
        print(f"{rows} rows: {wall:.2f} ms a step, of which kernels {busy:.2f}")
    stage.stop()


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def by_kernel(step: Callable[[], None], repeats: int, device: str) -> tuple[dict[str, tuple[float, float]], float]:
    """Microseconds and launches of a step by kernel, and milliseconds of all."""
    from torch.profiler import ProfilerActivity, profile

    wait(device)
    kind = ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA
    with profile(activities=[kind]) as recorded:
        for _ in range(repeats):
            step()
        wait(device)
    here = torch.autograd.DeviceType.CPU if device == "cpu" else torch.autograd.DeviceType.CUDA
    events = [event for event in recorded.events() if event.device_type == here]
    added, count, end = Counter[str](), Counter[str](), 0.0
    for event in sorted(events, key=lambda event: event.time_range.end):
        start = max(end, event.time_range.start)
        added[event.name] += max(0.0, event.time_range.end - start)
        count[event.name] += 1
        end = max(end, event.time_range.end)
    found = {name: (micros / repeats, count[name] / repeats) for name, micros in added.items()}
    return found, sum(micros for micros, _ in found.values()) / 1e3


# ---- the script ------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="cases with one of these words")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=95, help="after these no further variant is tried")
    parser.add_argument("--arch", type=int, default=90, help="of the card that kernels are compiled for")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--shapes", nargs="+", default=list(MODELS.values()), help="of --steps")
    parser.add_argument("--device", default="cuda:0", help="of --steps")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = [each for each in launches() if not options.only or any(word in each.name for word in options.only)]
    if options.list:
        for launch in chosen:
            forms = ", ".join(forms_of(launch, max(options.rows)))
            print(f"{launch.name} × {launch.count}: {launch.width} × {launch.columns}: {forms}")
        return 0
    if options.compile:
        print(f"{compile_all(chosen, options.rows, options.arch)} kernels")
        return 0
    if options.steps:
        for shape in options.shapes:
            path = options.folder / f"{shape}.gguf"
            if path.exists():
                steps(path, options.device)
                torch.cuda.empty_cache()
            else:
                print(f"{path} is not there")
        return 0
    began = time.perf_counter()
    bench = Bench(options.rows, options.seconds)
    subprocess.run([sys.executable, *sys.argv, "--compile"], check=False)
    bench.say(f"compiled after {time.perf_counter() - began:.0f} s")
    bench.check_odd_sizes()
    for launch in chosen:
        bench.run(launch)
    bench.say(f"timed after {time.perf_counter() - began:.0f} s, {bench.wrong} wrong")
    bench.table(chosen)
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

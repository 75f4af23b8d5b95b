"""Compiles the kernels that stages ask for, for cards that are not here, and says what a card cannot run.

python scripts/check_cards.py                          every form, every card: by estimate an hour on two cores
python scripts/check_cards.py --quick --workers 2      the largest forms, as tests/cards has it
python scripts/check_cards.py --list --cards 90        the forms that a card would be given; compiles nothing

Which forms there are is asked of the stages, as at the start of a server (warmup/compiler.py), on a GPU made of paper.
Needs no GPU: Triton has the compilers of both makers. Ends with 1 where a card cannot run what it is given.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from paper_gpu import CARDS, Card, paper_gpu
from triton import knobs
from triton.backends.compiler import GPUTarget

from rekindle.bench.synth import SHAPES, tensors_of
from rekindle.kernels.attention import FAR_ROWS, attend_far, attend_partial, attend_whole, sigmoid_gate
from rekindle.kernels.attention.rows import KV_DTYPES, row_size
from rekindle.kernels.draft import attend_ring, convolve, store_ring, walk
from rekindle.kernels.matmul.packing import FORMATS
from rekindle.kernels.ragged import Ragged
from rekindle.spec import PAGE, AttentionSpec, DeltaSpec, FfnSpec, ModelSpec
from rekindle.warmup.compile_ahead import CompileJob
from rekindle.warmup.compiler import needed_launches
from rekindle.warmup.launches import Launch, compile_for, compiled, recording
from rekindle.warmup.outline import DeviceWithoutMemory
from rekindle.weights import TensorInfo
from rekindle.weights.source import SourceFiles
from rekindle.weights.stored import row_bytes

SLOTS = 8
CACHE_SLOTS = 32
# Kernels that keep tiles in shared memory; all others may ask for LITTLE.
STAGED = ("_attend_kernel", "_far_kernel", "_pass_kernel", "_prepare_kernel", "_grouped_kernel", "_rows_kernel")
LITTLE = 48 << 10
THREADS = 1024  # of a program
REGISTERS = 65_536  # of a multiprocessor of NVIDIA's, for all threads of a program
# Bytes that a thread may have to keep in memory, because its registers are too few: slow, not wrong. So much was seen.
SPILLED = 4096
# PTX that only some of NVIDIA's cards have, by their architecture.
ONLY: dict[str, Callable[[int], bool]] = {
    "griddepcontrol": lambda arch: arch >= 90,
    "cp.async.bulk": lambda arch: arch >= 90,
    "wgmma": lambda arch: arch == 90,
    "tcgen05": lambda arch: arch in (100, 103),
    "cp.async": lambda arch: arch >= 80,
    "mma.sync": lambda arch: arch >= 80,
}


# ---- models --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how it is served."""

    spec: ModelSpec
    dtype: str = "bfloat16"
    kv: tuple[str, str] = ("bf16", "exact")
    type: str | None = None  # of all matrices; else the mix of Q4_K_M


class Outline:
    """As much of a weight file as a paper model asks for."""

    path, metadata, files = Path("outline"), dict[str, Any](), SourceFiles([])

    def __init__(self, case: Case) -> None:
        self.spec = case.spec
        infos = (_info(tensor.name, tensor.shape, case.type, tensor.type) for tensor in tensors_of(case.spec))
        self.tensors = {info.name: info for info in infos}

    def fingerprint(self) -> str:
        return "outline"

    def close(self) -> None: ...


def _info(name: str, shape: tuple[int, ...], wanted: str | None, mixed: str) -> TensorInfo:
    type = mixed if wanted is None or mixed == "F32" else wanted
    width = row_bytes(shape[-1], type)
    assert width is not None, f"{name} {shape} has no whole blocks of {type}"
    return TensorInfo(name, shape, type, math.prod(shape[:-1]) * width)


def _plain(name: str, head_dim: int) -> ModelSpec:
    attention = AttentionSpec(8, 2, head_dim, head_dim, rope_theta=1e6, qk_norm=name == "qwen3")
    return ModelSpec(name, name, 1024, 1024, (attention,) * 2, FfnSpec(2048), 1e-6, 8192, tied=False)


def _small(spec: ModelSpec, ffn: FfnSpec) -> ModelSpec:
    """The same kinds of layers with heads of the same size, and everything else small."""
    attention = replace(spec.attention, heads=spec.attention.heads // 2, kv_heads=spec.attention.kv_heads // 2)
    return replace(spec, mixers=(DeltaSpec(4, 16, 128, 128, 4), attention), hidden=1024, vocab=1024, ffn=ffn)


DENSE, MOE = SHAPES["qwen3.6-27b"].spec, SHAPES["qwen3.6-35b-a3b"].spec
SMALL_DENSE, SMALL_MOE = _small(DENSE, FfnSpec(32_768)), _small(MOE, FfnSpec(0, 64, 8, 512, 512))
PACKED, WIDE = ("q8", "sparse"), ("f16", "exact")
QUICK = Case(SMALL_MOE), Case(SMALL_DENSE, kv=PACKED, type="Q6_K"), Case(SMALL_DENSE, "float32", WIDE, "F16")
# In the quick set these stand for all cards in what hardly differs between them: packed KV, and kernels that keep no
# tiles in shared memory …
STANDING = (120, "gfx1100")
WIDELY = ("gfx1100",)  # … and this one in float32
FULL = (
    *(Case(spec, kv=kv) for spec in (DENSE, MOE, SHAPES["tiny"].spec) for kv in (Case.kv, PACKED)),
    *(Case(_plain(name, dim)) for name, dim in (("llama", 64), ("qwen3", 128))),
    *QUICK,
    Case(SMALL_DENSE, "float32", ("f32", "exact"), "F16"),
    *(Case(spec, type=type) for spec in (SMALL_DENSE, SMALL_MOE) for type in FORMATS),
    *(Case(SMALL_DENSE, "float32", WIDE, type) for type in ("Q4_K", "Q8_0")),
)


# ---- what is asked for ---------------------------------------------------------------------------------------------


def asked(card: Card, cases: tuple[Case, ...]) -> list[Launch]:
    """Every launch of these models on the card, each once. Once per process: answers about a device are kept."""
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    found: dict[Launch, None] = {}
    with paper_gpu(card), torch.inference_mode():
        for case in cases:
            found |= dict.fromkeys(_steps(card, case))
            found |= dict.fromkeys(_away(case))
            found |= dict.fromkeys(_drafted(case))
    return list(found)


def _steps(card: Card, case: Case) -> Iterator[Launch]:
    spec = case.spec
    job = CompileJob(
        "", (0, spec.layers), "cuda:0", case.dtype, SLOTS, *case.kv, "qk", card.target, "", 1,
        ((CACHE_SLOTS, 0),) if spec.ffn.is_moe else (),
    )  # fmt: skip
    return needed_launches(Outline(case), job)


def _away(case: Case) -> list[Launch]:
    """Pages that are not in the pool: no stage without requests has any, so that starts do not run them."""
    spec, kv_type = case.spec.attention, case.kv[0]
    dtype = getattr(torch, case.dtype)
    with DeviceWithoutMemory(), recording() as launches:
        kv = torch.empty(
            8, 2, PAGE, spec.kv_heads, row_size(kv_type, spec.head_dim), dtype=KV_DTYPES[kv_type], device="cuda:0"
        )
        for rows in (1, FAR_ROWS, 200):
            q = torch.empty(rows, spec.heads, spec.head_dim, dtype=dtype, device="cuda:0")
            pages, places, positions = (
                torch.empty(count, dtype=kind, device="cuda:0")
                for count, kind in ((8, torch.int32), (8, torch.int64), (rows, torch.int32))
            )
            attend_partial(q, kv, pages, places, positions, 1.0)
            attend_whole(q, kv, pages, 1.0)
            sigmoid_gate(q, q)
            if rows <= FAR_ROWS:
                for gate in (None, q):
                    attend_far(q, kv, places, _ragged(rows), 1.0, gate)
    return list(launches)


def _drafted(case: Case) -> list[Launch]:
    """A drafter's blocks, of one sequence and of two, in the sizes that are published."""
    dtype = getattr(torch, case.dtype)
    with DeviceWithoutMemory(), recording() as launches:
        for blocks in (1, 2):
            slots, firsts, counts = (torch.empty(blocks, dtype=torch.int64, device="cuda:0") for _ in range(3))
            q, k, ring = (
                torch.empty(shape, dtype=kind, device="cuda:0")
                for shape, kind in (
                    ((16 * blocks, 32, 128), dtype),
                    ((16 * blocks, 8, 128), dtype),
                    ((3, 2, 2047, 8, 128), torch.bfloat16),
                )
            )
            store_ring(ring, k, k, slots, firsts, counts)
            for window, causal in ((2048, True), (2048, False), (None, False)):
                attend_ring(q, k, k, ring, slots, firsts, counts, window, causal)
            x, base, computed = (
                torch.empty(shape, dtype=dtype, device="cuda:0")
                for shape in ((8 * blocks, 2048), (2, 2, 2048), (8 * blocks, 512))
            )
            convolve(x, base, computed, 0, 8)
            scores = [torch.empty(blocks, *shape, device="cuda:0") for shape in ((7, 16), (16,), (6, 16, 16))]
            walk(*scores)
    return list(launches)


def _ragged(rows: int) -> Ragged:
    def numbers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="cuda:0")

    return Ragged(numbers(2), numbers(1), numbers(rows), numbers(rows), numbers(rows), numbers(1, 8), (rows,), far=True)


def constants(launch: Launch) -> dict[str, Any]:
    """Those that the source names, and how the launch is cut up."""
    data = json.loads(launch.data)
    names = list(data["signature"])
    values = zip(data["constant_keys"], data["constant_vals"], strict=True)
    named = {names[key[0]]: value for key, value in values if names[key[0]].isupper() or names[key[0]][-1].isdigit()}
    return named | {name: data["options"][name] for name in ("num_warps", "num_stages")}


def cases_for(card: Card, quick: bool, every: bool) -> tuple[Case, ...]:
    if not quick:
        return FULL
    if every or card.arch in WIDELY:
        return QUICK
    return QUICK[:2] if card.arch in STANDING else QUICK[:1]


def largest(card: Card, launches: list[Launch]) -> list[Launch]:
    """Of the kernels that keep tiles in shared memory the largest form for every number of warps and stages and every
    type of what is read; of the others the smallest form, on cards that stand for the rest."""
    chosen: dict[object, Launch] = {}
    for launch in sorted(launches, key=_size):
        staged = launch.kernel in STAGED
        if not staged and card.arch not in STANDING:
            continue
        key = (launch.module, launch.kernel, *(_family(launch) if staged else ()))
        if staged or key not in chosen:
            chosen[key] = launch
    return list(chosen.values())


def _family(launch: Launch) -> tuple[object, ...]:
    form, types = constants(launch), json.loads(launch.data)["signature"].values()
    return form["num_warps"], form["num_stages"], form.get("TYPE") == "dense", *list(types)[:2]


def _size(launch: Launch) -> float:
    form = constants(launch)
    numbers = [value for value in form.values() if isinstance(value, int) and value > 1]
    types = sum(isinstance(value, str) and value != "none" for value in form.values())  # matrices of one launch
    return sum(map(math.log2, numbers)) + types


# ---- what comes of it ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """One form, compiled for one card."""

    kernel: str
    module: str
    arch: str
    constants: dict[str, Any]
    shared: int = 0  # bytes
    registers: int = 0  # of a thread
    spilled: int = 0  # bytes of a thread
    threads: int = 0
    seconds: float = 0.0  # of work that it took to compile
    foreign: tuple[str, ...] = ()  # instructions that the card does not have
    error: str = ""


def compile_one(card: Card, launch: Launch) -> Found:
    about = launch.kernel, launch.module, str(card.arch), constants(launch)
    _begin(card, launch)
    began = _busy()
    try:
        kernel = compiled(launch)
    except Exception as error:  # whatever the compiler says is the finding
        return Found(*about, error=f"{type(error).__name__}: {str(error).strip()[-400:]}")
    read = _read_cubin if card.backend == "cuda" else _read_hsaco
    threads = kernel.metadata.num_warps * card.warp
    seconds = _busy() - began
    return Found(*about, kernel.metadata.shared, *read(kernel), threads, seconds, foreign_to(card, kernel))


def _busy() -> float:
    """Seconds that this process and those it waited for were at work."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _begin(card: Card, launch: Launch) -> None:
    """This process may have compiled the same kernel for another card."""
    compile_for(GPUTarget(*card.target))
    module = __import__(launch.module, fromlist=[launch.kernel])
    getattr(module, launch.kernel).device_caches.clear()


def _read_cubin(kernel: Any) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(_first(r"REG:(\d+)", said)), int(_first(r"STACK:(\d+)", said))


def _read_hsaco(kernel: Any) -> tuple[int, int]:
    """The stack of a thread holds more than what is spilled, but little."""
    text = kernel.asm["amdgcn"]
    registers, stack = (
        int(_first(rf"\.{name}:\s+(\d+)", text)) for name in ("vgpr_count", "private_segment_fixed_size")
    )
    return registers, stack


def _first(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, f"the compiler's report has no {pattern}"
    return match[1]


def foreign_to(card: Card, kernel: Any) -> tuple[str, ...]:
    """Instructions of the compiled kernel that the card does not have."""
    if card.backend == "hip":
        return ("inline assembly of NVIDIA's",) if "elementwise_inline_asm" in kernel.asm["ttir"] else ()
    assert isinstance(card.arch, int), f"NVIDIA numbers its architectures, this is {card.arch}"
    absent = [name for name, has in ONLY.items() if not has(card.arch)]
    return tuple(name for name in absent if re.search(rf"\b{re.escape(name)}\b", kernel.asm["ptx"]))


def faults(card: Card, found: Found) -> list[str]:
    """Why the card cannot run it, or should not."""
    said = []
    if found.error:
        said.append(f"does not compile: {found.error}")
    if found.shared > card.shared:
        said.append(f"asks for {found.shared} bytes of shared memory, the card allows {card.shared}")
    if found.shared > LITTLE and found.kernel not in STAGED:
        said.append(f"asks for {found.shared} bytes of shared memory and is not among the kernels that stage tiles")
    if found.threads > THREADS:
        said.append(f"has {found.threads} threads, the card allows {THREADS}")
    if card.backend == "cuda" and found.registers * found.threads > REGISTERS:
        said.append(f"has {found.registers} registers in each of {found.threads} threads, the card has {REGISTERS}")
    if found.spilled > SPILLED:
        said.append(f"spills {found.spilled} bytes of every thread, {SPILLED} are borne")
    said += [f"has {name}, which the card does not" for name in found.foreign]
    return [f"{found.kernel} for {card.arch} ({card.name}) {each} {found.constants}" for each in said]


# ---- the run -------------------------------------------------------------------------------------------------------


def _asked(job: tuple[Card, tuple[Case, ...]]) -> list[Launch]:
    return asked(*job)


def _compiled(job: tuple[Card, Launch]) -> Found:
    return compile_one(*job)


def _chosen_cards(names: str | None, shared: int | None) -> list[Card]:
    known = {str(card.arch): card for card in CARDS}
    wanted = names.split(",") if names else list(known)
    if unknown := [name for name in wanted if name not in known]:
        sys.exit(f"--cards names {', '.join(unknown)}; known are {', '.join(known)}")
    cards = [known[name] for name in wanted]
    return cards if shared is None else [replace(card, shared=shared) for card in cards]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models, and only the largest forms")
    parser.add_argument("--all", action="store_true", help="with --quick: every form of the small models")
    parser.add_argument("--list", action="store_true", help="say which forms are chosen, and compile nothing")
    parser.add_argument("--cards", help="architectures, as 86,gfx1100; else all")
    parser.add_argument("--kernels", help="only these, as _attend_kernel,_pass_kernel")
    parser.add_argument("--shared", type=int, help="as if a card allowed so many bytes of shared memory")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", help="a file for everything that was found, a line per form")
    return parser.parse_args()


def main() -> int:
    options = _arguments()
    torch.set_num_threads(1)
    cards = _chosen_cards(options.cards, options.shared)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # nobody else's, and gone afterwards
        with context.Pool(options.workers, maxtasksperchild=1) as pool:
            cases = [(card, cases_for(card, options.quick, options.all)) for card in cards]
            lists = pool.map(_asked, cases, chunksize=1)
        if options.quick and not options.all:
            lists = [largest(card, launches) for card, launches in zip(cards, lists, strict=True)]
        wanted = options.kernels.split(",") if options.kernels else None
        jobs = [
            (card, launch)
            for card, launches in zip(cards, lists, strict=True)
            for launch in launches
            if wanted is None or launch.kernel in wanted
        ]
        if options.list:
            for card, launch in jobs:
                print(json.dumps([str(card.arch), launch.module, launch.kernel, constants(launch)], sort_keys=True))
            return 0
        jobs.sort(key=lambda job: -_size(job[1]))  # the longest first, so that no worker ends up alone with one
        with context.Pool(options.workers) as pool, open(options.json or os.devnull, "w") as file:
            found = list[Found]()
            for each in pool.imap_unordered(_compiled, jobs):
                print(json.dumps(asdict(each)), file=file, flush=True)
                found.append(each)
    return _tell(cards, found)


def _tell(cards: list[Card], found: list[Found]) -> int:
    wrong = 0
    for card in cards:
        mine = [each for each in found if each.arch == str(card.arch)]
        said = [line for each in mine for line in faults(card, each)]
        most, spilled = max((each.shared for each in mine), default=0), max((each.spilled for each in mine), default=0)
        print(
            f"{card.arch} ({card.name}): {len(mine)} forms, at most {most} of {card.shared} bytes of shared memory, "
            f"at most {spilled} bytes spilled, {len(said)} faults"
        )
        print(*said, sep="\n", end="\n" if said else "")
        wrong += len(said)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

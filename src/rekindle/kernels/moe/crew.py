"""Threads that compute cold experts from their planes, asked by the device through a mailbox.

`crew.c` is compiled once per machine with the compiler that Triton needs anyway.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from rekindle.kernels.matmul.packing import GROUPED
from rekindle.kernels.moe.types import ExpertStack

log = logging.getLogger("rekindle.kernels")

SOURCE = Path(__file__).with_name("crew.c")
MOST = 32  # threads
COMPILING = 120.0  # seconds a compiler may take
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-Wno-psabi", "-shared", "-fPIC", "-pthread")
Allocate = Callable[[Sequence[int], torch.dtype], Tensor]


class Mailbox:
    """One request: rows, and pairs of one of them with an expert. Its memory is the host's, open to the device."""

    def __init__(self, rows: int, pairs: int, hidden: int, allocate: Allocate) -> None:
        self.rows, self.pairs, self.hidden = rows, pairs, hidden
        self.asked = allocate((1,), torch.int32)
        self.done = allocate((1,), torch.int32)
        self.head = allocate((3,), torch.int64)  # address of the layer's description, pairs, rows
        self.place = allocate((pairs,), torch.int32)  # of the expert in host memory
        self.row = allocate((pairs,), torch.int32)
        self.weight = allocate((pairs,), torch.float32)
        self.x = allocate((rows, hidden), torch.float32)
        self.out = allocate((rows, hidden), torch.float32)
        self.lost = allocate((1,), torch.int32)  # the device waited in vain
        for tensor in (*self.tensors, self.lost):
            tensor.zero_()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """In the order in which the threads know them."""
        return self.asked, self.done, self.head, self.place, self.row, self.weight, self.x, self.out

    @staticmethod
    def nbytes(rows: int, pairs: int, hidden: int) -> int:
        """Host memory it may take, each piece in lines of its own."""
        return 9 * 256 + 12 * pairs + 8 * rows * hidden


class Crew:
    """Threads behind a mailbox, as long as this object lives."""

    def __init__(self, library: ctypes.CDLL, box: Mailbox, width: int, threads: int) -> None:
        self.box = box
        addresses = (ctypes.c_int64 * len(box.tensors))(*(tensor.data_ptr() for tensor in box.tensors))
        crew = library.crew_start(addresses, threads, max(box.hidden, width), box.pairs)
        self.threads = int(library.crew_threads(crew))
        weakref.finalize(self, library.crew_stop, crew)


def describe(stacks: Sequence[ExpertStack]) -> Tensor | None:
    """What the threads must know of a layer: int64, in host memory. None if they cannot read its types."""
    gate, _, down = stacks
    if any(stack.planes.type not in GROUPED for stack in stacks):
        return None
    numbers = [gate.rows, down.rows]
    for stack in stacks:
        planes = stack.planes
        named = (planes.codes, planes.high, planes.scales, planes.supers)
        numbers += [int(planes.type[1]), *(0 if plane is None else plane.data_ptr() for plane in named)]
    return torch.tensor(numbers, dtype=torch.int64)


def start_crew(box: Mailbox, width: int, threads: int | None = None) -> Crew | None:
    """None, with the reason in the log, where it cannot be compiled, loaded or started."""
    library = _library()
    if library is None:
        return None
    crew = Crew(library, box, width, threads or spare_threads())
    if not crew.threads:
        log.warning("cold experts are not computed on the CPU: no thread could be started")
        return None
    return crew


def spare_threads() -> int:
    """Of one stage. All cores but two (one feeds the device, one serves), or what `--threads` told torch if that is
    less; divided by the GPUs, each of which may have a stage and a crew. More than MOST only wait for the memory."""
    cores = min(torch.get_num_threads(), len(os.sched_getaffinity(0)) - 2, _quota() - 2, MOST)
    return max(1, cores // max(1, torch.cuda.device_count()))


def _quota() -> int:
    """Cores that this container may keep busy."""
    try:
        allowed, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):  # no such limit here
        return MOST + 2
    return MOST + 2 if allowed == "max" else int(allowed) // int(period)


@cache
def _library() -> ctypes.CDLL | None:
    """None, said once, whatever goes wrong: cold experts then come over the link alone."""
    try:
        return open_library(build_library())
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        log.warning("cold experts are not computed on the CPU: %s", error)
        return None


def build_library(flags: Sequence[str] = ()) -> Path:
    """crew.c, compiled for this CPU if it is not in the cache yet."""
    compiler = _compiler()
    path = _cache_folder() / f"crew-{_identity([*compiler, *FLAGS, *flags])}.so"
    if path.exists():
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        _run([*compiler, *FLAGS, *flags, "-o", str(temporary), str(SOURCE), "-lm"])
        os.rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def open_library(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    crew = ctypes.c_void_p
    library.crew_start.restype = crew
    library.crew_start.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    library.crew_threads.restype, library.crew_threads.argtypes = ctypes.c_int, [crew]
    library.crew_stop.restype, library.crew_stop.argtypes = None, [crew]
    return library


def _compiler() -> list[str]:
    """CC may carry flags, or a program before the compiler."""
    named = shlex.split(os.environ.get("CC", ""))
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not named and found is None:
        raise RuntimeError("no C compiler was found")
    return named or [str(found)]


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILING)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()[:500]}")
    return done.stdout


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rekindle"


def _identity(command: Sequence[str]) -> str:
    """Another source, compiler, flag or CPU is another library: -march=native asks for the CPU's model too."""
    names = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "CPU variant", "Features")
    cpu = sorted({line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(names)})
    known = "\n".join([SOURCE.read_text(), *command, _run([*_compiler(), "--version"]), *cpu])
    return blake2b(known.encode(), digest_size=12).hexdigest()

"""The C sources of this folder as one library per instruction set: compiled at first use with the system's compiler,
kept in the user's cache."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import threading
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from pathlib import Path

from rekindle.config import user_folder

FOLDER = Path(__file__).parent
COMPILING = 120.0  # seconds a compiler may take
FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", "-shared", "-fPIC", "-pthread")
# Best first: flags of the compiler, and features that the CPU must have.
LEVELS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "avx512": (
        ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c"),
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx2", "fma", "f16c"}),
    ),
    "avx2": (("-mavx2", "-mfma", "-mf16c"), frozenset({"avx2", "fma", "f16c"})),
    "neon": (("-march=armv8-a",), frozenset({"asimd"})),
    "plain": ((), frozenset()),
}


@cache
def levels() -> tuple[str, ...]:
    """The instruction sets of this CPU that there is code for, best first."""
    has = _cpu_flags()
    return tuple(name for name, (_, needs) in LEVELS.items() if needs <= has)


def _cpu_flags() -> frozenset[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = next((line for line in lines if line.startswith(("flags", "Features"))), ":")
    return frozenset(named.split(":", 1)[1].split())


def build_library(level: str, extra: Sequence[str] = ()) -> Path:
    """The library, compiled if it is not in the cache yet."""
    compiler, flags = _compiler(), [*FLAGS, *LEVELS[level][0], *extra]
    path = user_folder() / f"native-{level}-{_identity([*compiler, *flags])}.so"
    if path.exists():
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        _run([*compiler, *flags, "-o", str(temporary), *map(str, sorted(FOLDER.glob("*.c"))), "-lm"])
        os.rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


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


def _identity(command: Sequence[str]) -> str:
    """Another source, compiler or flag is another library."""
    sources = [path.read_text() for path in sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")])]
    known = "\n".join([*sources, *command, _run([*_compiler(), "--version"]), platform.machine()])
    return blake2b(known.encode(), digest_size=12).hexdigest()

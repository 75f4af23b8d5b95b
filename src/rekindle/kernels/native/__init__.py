"""Kernels in C for the CPU: products with quantised matrices, and the small steps between them, whose cost would be
Python's calls. Every one of them is defined in torch beside its op (`naive.py`); where no library can be had the
definitions run, and the log says so."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rekindle.kernels.native.build import build_library, levels
from rekindle.kernels.native.program import noted

log = logging.getLogger("rekindle.kernels")

SWITCH = "REKINDLE_NATIVE"  # for tests: the instruction set to use, or `off`

_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "n": ctypes.c_int}
# What each function takes (p: address, i: 64 bits, f: float, n: int) and, behind a colon, gives.
_FUNCTIONS = {
    "pool_resize": "i",
    "pack_matrix": "ipiiip",
    "packed_group_bytes": "ii:i",
    "packed_values": "ppip",
    "stored_values": "ipiiipip",
    "argmax_rows": "piiip",
    "multiply_all": "pipiip",
    "multiply_gated": "pppiip",
    "rms_norm": "pppfiipp",
    "add_rows": "ppip",
    "delta_run": "iiiiippppfppppppiipipipp",
    "delta_replay": "iiiiipiipipi",
    "turn_and_store": "piippiiiiippfpppppipip",
    "attention_run": "pipiiipippiifpiip",
    "attention_part": "piipiiippipfpp",
    "attention_merge": "ppiiip",
    "attention_gate": "piiipii",
    "route": "ppiipp",
    "moe": "ppppppiip",
    "sum_shares": "ppiiip",
    "add_shared": "pppiip",
    "program_run": "pi",
    "expert_threads_start": "pnii:p",
    "expert_threads_count": "p:n",
    "expert_threads_stop": "p",
    "read_files": "ppppip",
    "file_sizes": "pip",
}


def open_library(path: Path) -> Any:
    """The functions of a compiled library; other threads run Python meanwhile."""
    loaded = ctypes.CDLL(str(path))
    for name, kinds in _FUNCTIONS.items():
        takes, _, gives = kinds.partition(":")
        function = getattr(loaded, name)
        function.argtypes, function.restype = [_KINDS[kind] for kind in takes], _KINDS[gives] if gives else None
        setattr(loaded, name, noted(name, takes, function, loaded))
    return loaded


@cache
def library() -> Any:
    """For the best instruction set of this CPU. None, said once, whatever goes wrong: torch then computes alone."""
    wanted = os.environ.get(SWITCH)
    if wanted == "off":
        return None
    try:
        level = wanted or levels()[0]
        found = open_library(build_library(level))
    except (OSError, RuntimeError, ValueError, KeyError, subprocess.SubprocessError) as error:
        log.warning("the CPU computes with torch alone, several times slower, in six times the memory: %s", error)
        return None
    log.debug("the CPU computes with kernels for %s", level)
    found.pool_resize(torch.get_num_threads())
    return found


def set_threads(count: int) -> None:
    """Of torch, and of the kernels here: they take turns, and what is asleep of the one does not hold up the other."""
    torch.set_num_threads(count)
    if (found := library()) is not None:
        found.pool_resize(count)


__all__ = ["SWITCH", "build_library", "levels", "library", "open_library", "set_threads"]

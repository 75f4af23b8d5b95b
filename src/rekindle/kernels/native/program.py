"""A step on a CPU as a list of kernel calls: written down while it runs, then made again by one call.

Around small products Python's calls cost as much as the products do. A `Tape` notes every kernel that its thread calls,
and lays what is allocated meanwhile into an `Arena`, so that addresses stay right. Between the kernels torch may only
allocate, and look at memory in other shapes: an operation that computes or copies would be missing when the calls are
made again, so with one there is no program.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WORDS = 24  # as in program.h
IN_WORDS = (  # kernels with a form that takes words
    "packed_values",
    "stored_values",
    "multiply_all",
    "multiply_gated",
    "rms_norm",
    "add_rows",
    "delta_run",
    "turn_and_store",
    "attention_run",
    "route",
    "moe",
)


class _Word(ctypes.Union):
    _fields_ = (("p", ctypes.c_void_p), ("i", ctypes.c_int64), ("f", ctypes.c_float))


class _KernelCall(ctypes.Structure):
    _fields_ = (("run", ctypes.c_void_p), ("words", _Word * WORDS))


RUN = "program_run"  # makes the calls of a program

Times = defaultdict[str, list[float]]  # seconds of every call, by the kernel's name
_times: Times | None = None  # while they are asked for


@contextmanager
def timing_kernels() -> Iterator[Times]:
    """While the block runs, every kernel that any thread calls is timed; those of a program are called one by one."""
    global _times
    _times = Times(list)
    try:
        yield _times
    finally:
        _times = None


class Program:
    """The calls of one step. What they read and write lies in the tape's arena and in tensors that outlive them."""

    def __init__(
        self, library: Any, calls: Sequence[_KernelCall], names: Sequence[str], kept: Sequence[object]
    ) -> None:
        """names: of the kernels, in the order of the calls."""
        self._run = library.program_run
        self._calls = (_KernelCall * len(calls))(*calls)
        self._names = tuple(names)
        self._kept = tuple(kept)  # lists of addresses, and structures

    def run(self) -> None:
        if (times := _times) is None:
            self._run(ctypes.byref(self._calls), len(self._calls))
            return
        for number, name in enumerate(self._names):
            began = time.perf_counter()
            self._run(ctypes.byref(self._calls, number * ctypes.sizeof(_KernelCall)), 1)
            times[name].append(time.perf_counter() - began)


class Arena:
    """Memory for steps that run one at a time. What a step lets go of, its later kernels and other steps use again."""

    def __init__(self) -> None:
        self._free = defaultdict[int, list[np.ndarray]](list)  # blocks by size
        self._blocks = dict[int, np.ndarray]()  # all, by address

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = int(np.prod(shape)) * dtype.itemsize
        size = 1 << max(count - 1, 63).bit_length()
        block = self._free[size].pop() if self._free[size] else self._new_block(size)
        piece = block[:count]  # lives as long as the last tensor that looks into it
        weakref.finalize(piece, self._free[size].append, block)
        return torch.from_numpy(piece).view(dtype).view(*shape)

    def _new_block(self, size: int) -> np.ndarray:
        block: np.ndarray = torch.empty(size, dtype=torch.uint8).numpy()
        self._blocks[block.ctypes.data] = block
        return block

    def let_go(self, tensor: Tensor) -> Tensor:
        """The tensor without a claim to its memory: it holds until another step runs."""
        block = self._blocks[tensor.data_ptr()]
        return torch.from_numpy(block[: tensor.nbytes]).view(tensor.dtype).view(tensor.shape)


class Tape(TorchDispatchMode):
    """Notes what runs inside it; `program` is None if that cannot be run again."""

    def __init__(self, library: Any, arena: Arena) -> None:
        super().__init__()
        self._library = library
        self._arena = arena
        self._calls, self._names = list[_KernelCall](), list[str]()
        self._kept = list[object]()
        self.refused: str | None = None  # what cannot be noted

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled by torch, which would import its compiler, for a second, to leave this class out."""
        return False

    @property
    def program(self) -> Program | None:
        return None if self.refused else Program(self._library, self._calls, self._names, self._kept)

    def __enter__(self) -> Tape:
        _thread.tape = self
        super().__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        _thread.tape = None
        super().__exit__(*raised)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten.empty.memory_format:
            return self._arena.empty(args[0], kwargs.get("dtype") or torch.get_default_dtype())
        if function is torch.ops.aten.empty_like.default:
            return self._arena.empty(args[0].shape, kwargs.get("dtype") or args[0].dtype)
        result = function(*args, **kwargs)
        if function._schema.is_mutable or not _looks_into(result, args):
            self._refuse(str(function))
        return result

    def note(self, name: str, kinds: str, in_words: int | None, arguments: Sequence[Any]) -> None:
        if in_words is None:
            self._refuse(name)
            return
        words = (_Word(**{kind: _plain(value)}) for kind, value in zip(kinds, arguments, strict=True))
        self._calls.append(_KernelCall(in_words, (_Word * WORDS)(*words)))
        self._names.append(name)
        self._kept.extend(arguments)

    def _refuse(self, what: str) -> None:
        self.refused = self.refused or what


class _Thread(threading.local):
    tape: Tape | None = None


_thread = _Thread()


def noted(name: str, kinds: str, function: Callable[..., Any], library: ctypes.CDLL) -> Callable[..., Any]:
    """A function of the library that a tape can note; of those without a form that takes words it notes that it was
    called."""
    in_words = ctypes.cast(library[f"{name}_call"], ctypes.c_void_p).value if name in IN_WORDS else None

    def call(*arguments: Any) -> Any:
        if _thread.tape is not None:
            _thread.tape.note(name, kinds, in_words, arguments)
        if (times := _times) is None or name == RUN:
            return function(*arguments)
        began = time.perf_counter()
        found = function(*arguments)
        times[name].append(time.perf_counter() - began)
        return found

    return call


def _plain(value: Any) -> int | float | None:
    """An argument as a word holds it; of a reference or a list of addresses, its address."""
    if value is None or isinstance(value, int | float):
        return value
    return ctypes.addressof(value if isinstance(value, ctypes.Array) else value._obj)


def _looks_into(result: Any, args: Sequence[Any]) -> bool:
    """Whether all that an operation gives is memory that it was given."""
    given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
    results = result if isinstance(result, list | tuple) else [result]
    return all(isinstance(one, Tensor) and one.untyped_storage().data_ptr() in given for one in results)

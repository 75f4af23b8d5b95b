"""A GPU made of paper, for a torch without CUDA: it has a target to compile for, and launches nothing.

Which card it is, is said by a `Card`: all that the choice of a kernel's form asks of a device.

Tensors without memory may say that they lie on a GPU, but this torch refuses to look into them by index, to copy into
them and the like, since it has no such device to switch to. The operators below that do the same without switching.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU in numbers, as its driver gives them."""

    name: str
    backend: str
    arch: int | str
    warp: int  # threads
    shared: int  # bytes of shared memory that one program may have
    processors: int

    @property
    def target(self) -> tuple[str, int | str, int]:
        return self.backend, self.arch, self.warp

    @property
    def capability(self) -> tuple[int, int]:
        """HIP gives the first two digits of the architecture."""
        if isinstance(self.arch, int):
            return self.arch // 10, self.arch % 10
        digits = self.arch.removeprefix("gfx")
        return int(digits[:-2]), int(digits[-2])


H200 = Card("H200", "cuda", 90, 32, 232_448, 132)
CARDS = (
    Card("A100", "cuda", 80, 32, 166_912, 108),
    Card("RTX 3090", "cuda", 86, 32, 101_376, 82),
    Card("RTX 4090", "cuda", 89, 32, 101_376, 128),
    H200,
    Card("RTX 5090", "cuda", 120, 32, 101_376, 170),
    Card("RX 7900 XTX", "hip", "gfx1100", 32, 65_536, 48),
    Card("MI300X", "hip", "gfx942", 64, 65_536, 304),
    Card("RX 9070 XT", "hip", "gfx1201", 32, 65_536, 32),
)


class PaperDriver:
    def __init__(self, card: Card) -> None:
        self._target = GPUTarget(*card.target)
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": card.shared},
            load_binary=lambda *_: (0, 0, 0, 0, 1024),
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def launcher_cls(self, _source: object, _metadata: object) -> Any:
        return lambda *_: None


class _Anything:
    """Streams, events, contexts."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def __enter__(self) -> _Anything:
        return self

    def __exit__(self, *_: object) -> None: ...
    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


class _NoSwitching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "not linked with support for cuda" not in str(error):
                raise
        name = func.__name__
        if name == "__getitem__":
            return _look(*args)
        if name == "__setitem__":
            return _put(_look(args[0], args[1]), args[2])
        if name == "contiguous":
            return aten.clone(args[0], memory_format=torch.contiguous_format)
        if name == "to":
            return _send(*args, **kwargs)
        kwargs.pop("non_blocking", None)
        return getattr(aten, name)(*args, **kwargs)


def _look(x: torch.Tensor, index: Any) -> torch.Tensor:
    dim = 0
    for i in index if isinstance(index, tuple) else (index,):
        assert i is not Ellipsis, "nobody needs it yet"
        if i is None:
            x, dim = aten.unsqueeze(x, dim), dim + 1
        elif isinstance(i, slice):
            start, stop, step = i.indices(x.shape[dim])
            x, dim = aten.slice.Tensor(x, dim, start, max(start, stop), step), dim + 1
        elif isinstance(i, int):
            x = aten.select.int(x, dim, i)
        else:
            x, dim = aten.index.Tensor(x, [None] * dim + [i]), dim + 1
    return x


def _put(x: torch.Tensor, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        aten.copy_.default(x, value)


def _send(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    given = [*args, *kwargs.values()]
    dtype = next((value for value in given if isinstance(value, torch.dtype)), x.dtype)
    return torch.empty(x.shape, dtype=dtype, device="cuda:0")


@contextmanager
def paper_gpu(card: Card = H200) -> Iterator[None]:
    stubs: dict[str, Any] = dict.fromkeys(("Stream", "Event", "device", "stream", "current_stream"), _Anything)
    stubs |= {
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda _=None: card.capability,
        "get_device_properties": lambda _=None: SimpleNamespace(multi_processor_count=card.processors),
        "current_device": lambda: 0,
    }
    driver.set_active(PaperDriver(card))
    with ExitStack() as stack:
        for name, stub in stubs.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stub))
        stack.enter_context(mock.patch.object(torch.version, "hip", "paper" if card.backend == "hip" else None))
        stack.enter_context(_NoSwitching())
        yield

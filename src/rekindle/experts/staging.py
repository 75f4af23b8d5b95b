"""The staging area of a stage: two halves of a few expert slots, one filled over PCIe while the other is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from rekindle.experts.planes import Stacks, empty_stack, zeros_on


class Staging:
    """Shared by all layers of a stage whose experts have the same types and shapes."""

    def __init__(self, like: Stacks, slots: int, device: torch.device) -> None:
        self.slots = slots  # of one half
        self.halves: list[Stacks] = []
        for _ in range(2):
            gate, up, down = (empty_stack(stack, slots, zeros_on(device)) for stack in like)
            self.halves.append((gate, up, down))
        self.order = _TwoStreams(device) if device.type == "cuda" else _InOrder()


class _InOrder:
    """Without streams, copies and products run one after another."""

    def __init__(self) -> None:
        self._turn = 0

    def begin(self, load: Tensor) -> None:
        """The list of experts to copy is known from here on."""

    def turn(self) -> int:
        self._turn ^= 1
        return self._turn

    @contextlib.contextmanager
    def copying(self, half: int) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def computing(self, half: int) -> Iterator[None]:
        yield


class _TwoStreams(_InOrder):
    """Copies on a stream of their own: a half is filled while the other is read."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._side = torch.cuda.Stream(device)
        self._known = torch.cuda.Event()
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in range(2)]

    def begin(self, load: Tensor) -> None:
        self._known.record()
        self._side.wait_event(self._known)
        load.record_stream(self._side)

    @contextlib.contextmanager
    def copying(self, half: int) -> Iterator[None]:
        self._side.wait_event(self._free[half])
        with torch.cuda.stream(self._side):
            yield
        self._copied[half].record(self._side)

    @contextlib.contextmanager
    def computing(self, half: int) -> Iterator[None]:
        torch.cuda.current_stream().wait_event(self._copied[half])
        yield
        self._free[half].record()

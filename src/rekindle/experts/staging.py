"""The staging area of a stage: a few parts of some expert slots each, filled over PCIe while others are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from rekindle.buffers import STAGED_PARTS
from rekindle.experts.planes import Stacks, empty_stack, zeros_on


class Staging:
    """Shared by all layers of a stage whose experts have the same types and shapes."""

    def __init__(self, like: Stacks, slots: int, device: torch.device) -> None:
        self.slots = slots  # of one part
        self.parts: list[Stacks] = []
        for _ in range(STAGED_PARTS):
            gate, up, down = (empty_stack(stack, slots, zeros_on(device)) for stack in like)
            self.parts.append((gate, up, down))
        self.order = _TwoStreams(device) if device.type == "cuda" else _InOrder()


class _InOrder:
    """Without streams, copies and products run one after another."""

    def __init__(self) -> None:
        self._turn = 0

    def begin(self) -> None:
        """Copies may run from here on: whatever has written the tables, or read the area, is behind."""

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """What runs inside waits for the copies before it, and not for the products; what follows waits for it."""
        yield

    def turn(self) -> int:
        """The part that is filled next."""
        self._turn = (self._turn + 1) % STAGED_PARTS
        return self._turn

    @contextlib.contextmanager
    def copying(self, part: int) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def computing(self, part: int) -> Iterator[None]:
        yield


class _TwoStreams(_InOrder):
    """Copies on a stream of their own. It leaves the stream that computes in `begin`, and every copy is waited for by
    what computes with it: so all of it can be recorded. Events of an earlier forward are never waited for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        # First in turn, on multiprocessors that are taken: few programs, and all the others wait for them in the end.
        self._side = torch.cuda.Stream(device, priority=-1)
        self._begun, self._listed = torch.cuda.Event(), torch.cuda.Event()
        self._copied = [torch.cuda.Event() for _ in range(STAGED_PARTS)]
        self._free = [torch.cuda.Event() for _ in range(STAGED_PARTS)]
        self._read = set[int]()  # parts that were read since the beginning

    def begin(self) -> None:
        self._begun.record()
        self._side.wait_event(self._begun)
        self._read.clear()

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        with torch.cuda.stream(self._side):
            yield
        self._listed.record(self._side)
        torch.cuda.current_stream().wait_event(self._listed)

    @contextlib.contextmanager
    def copying(self, part: int) -> Iterator[None]:
        if part in self._read:
            self._side.wait_event(self._free[part])
        with torch.cuda.stream(self._side):
            yield
        self._copied[part].record(self._side)

    @contextlib.contextmanager
    def computing(self, part: int) -> Iterator[None]:
        torch.cuda.current_stream().wait_event(self._copied[part])
        yield
        self._free[part].record()
        self._read.add(part)

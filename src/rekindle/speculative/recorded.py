"""A DFlash drafter's pass, recorded: one launch for what would be some hundred.

All that changes from pass to pass stands in memory that is filled before: one run of numbers, and the features that
wait. A pass has places for as many blocks as keep its products among few rows; with fewer, the rest are drafted for a
slot that nobody has. A pass behind a block that is being verified finds out itself, on the device, how much of that
block the target has accepted: it runs while the host has yet to read the target's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rekindle.batch import Ask
from rekindle.kernels.host_buffers import HostBuffers
from rekindle.kernels.matmul import FEW_ROWS
from rekindle.speculative.dflash import Dflash, DraftBlocks

BEHIND = -1  # in place of a number of blocks: one, behind a block that is being verified
MOST_ENDS = 16  # tokens that end an answer


class UnseenBlock(Protocol):
    """As `stages.types.Unseen` has it."""

    @property
    def slot(self) -> int: ...
    @property
    def position(self) -> int: ...
    @property
    def drafted(self) -> int: ...
    @property
    def drawn(self) -> Tensor: ...
    @property
    def ends(self) -> frozenset[int]: ...


Recorder = Callable[[Callable[[], None]], Callable[[], None]]  # a step -> how it is run again


class RecordedPass:
    def __init__(self, model: Dflash, rings: Sequence[Tensor], scratch_slot: int, record: Recorder) -> None:
        """rings: with one more slot than sequences have, `scratch_slot`."""
        self.rows = model.spec.block  # features of a block that a pass settles
        self.blocks = max(1, FEW_ROWS // self.rows)  # of a pass at most
        self._model = model
        self._rings = rings
        self._smallest_ring = min(ring.shape[2] for ring in rings)
        self._scratch_slot = scratch_slot
        self._record = record
        shape, numbers = (self.blocks * self.rows, model.spec.hidden), (5, self.blocks)
        self._features = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in model.spec.taps]
        # Of every block: token, position, slot, first position that is known, features that wait.
        self._numbers = torch.zeros(numbers, dtype=torch.int64, device=model.device)
        self._host = HostBuffers(numbers, model.device, torch.int64)
        self._drafted = torch.zeros((self.blocks, self.rows - 1), dtype=torch.int64, device=model.device)
        self._drawn = torch.zeros(self.rows, dtype=torch.int64, device=model.device)  # by the target, in the last block
        self._ends = torch.full((MOST_ENDS,), -1, dtype=torch.int64, device=model.device)
        self._known_ends = frozenset[int]()  # what stands in them
        self._passes: dict[int, Callable[[], None]] = {}  # by blocks, how a pass is run again; 0: features alone

    def make_ready(self) -> None:
        """Record all passes, over padding."""
        self._fill((), ())
        self._passes[0] = self._record(partial(self._run_settle, self.blocks))
        for blocks in {1, self.blocks}:
            self._passes[blocks] = self._record(partial(self._run, blocks))
        self._passes[BEHIND] = self._record(self._run_behind)

    def _run_settle(self, blocks: int) -> None:
        *numbers, waiting = self._numbers[:, :blocks]
        self._settle(DraftBlocks(*numbers), waiting)

    def _settle(self, blocks: DraftBlocks, waiting: Tensor) -> None:
        taps = [tap[: len(waiting) * self.rows] for tap in self._features]
        self._model.settle(taps, blocks, waiting, self._rings)

    def _run(self, blocks: int) -> None:
        *numbers, waiting = self._numbers[:, :blocks]
        self._run_blocks(DraftBlocks(*numbers), waiting)

    def _run_blocks(self, blocks: DraftBlocks, waiting: Tensor) -> None:
        self._settle(blocks, waiting)
        self._drafted[: len(waiting)].copy_(self._model.propose(blocks, self._rings, self.rows - 1))

    def _run_behind(self) -> None:
        """The numbers are of the block before: tokens that were drafted, the position of its first one, its slot, the
        first position that is known, and features that waited before it."""
        drafted, position, slot, start, before = self._numbers[:, :1]
        ended = (self._drawn[:, None] == self._ends).any(dim=1)
        places = torch.arange(self.rows - 1, device=self._drawn.device)
        agreed = (self._drafted[0] == self._drawn[:-1]) & ~ended[:-1] & (places < drafted)
        taken = agreed.long().cumprod(0).sum(0, keepdim=True)
        last = self._drawn.gather(0, taken).clamp(min=0)  # -1: logits that are no numbers, whose request fails
        blocks = DraftBlocks(last, position + 1 + taken, slot, start)
        self._run_blocks(blocks, before + 1 + taken)

    def settle(self, slot: int, start: int, waiting: tuple[Tensor, ...]) -> None:
        """Features of the positions from `start` on become K and V: for more rows than a pass takes in."""
        edges = range(0, len(waiting[0]), self.rows)
        pieces = [(at, tuple(tap[at : at + self.rows] for tap in waiting)) for at in edges]
        together = self.blocks if self._smallest_ring >= self.blocks * self.rows else 1  # else rows share a place
        for first in range(0, len(pieces), together):
            group = pieces[first : first + together]
            numbers = [(0, start + at + len(rows[0]), slot, 0) for at, rows in group]
            self._replay(0, numbers, [[rows] for _, rows in group])

    def run(
        self, asks: Sequence[Ask], starts: Sequence[int], waiting: Sequence[Sequence[tuple[Tensor, ...]]]
    ) -> Tensor:
        """Tokens of every ask [asks, tokens], where the next pass writes too. waiting: of every ask the features that
        have not become K and V, in the order of the spec's taps."""
        blocks = 1 if len(asks) == 1 else self.blocks
        numbers = [(ask.token, ask.position, ask.slot, start) for ask, start in zip(asks, starts, strict=True)]
        self._replay(blocks, numbers, waiting)
        return self._drafted[: len(asks)]

    def run_behind(
        self, block: UnseenBlock, start: int, before: int, waiting: Sequence[tuple[Tensor, ...]]
    ) -> Tensor | None:
        """The same for one block, behind what the target accepts of another, whose tokens the last pass has drafted.
        before: features that waited before it; waiting: all of them, with those of its rows."""
        if len(block.ends) > MOST_ENDS:
            return None
        if block.ends != self._known_ends:
            padded = [*block.ends, *[-1] * (MOST_ENDS - len(block.ends))]
            self._ends.copy_(torch.tensor(padded, pin_memory=self._ends.is_cuda), non_blocking=True)
            self._known_ends = block.ends
        self._drawn[: len(block.drawn)].copy_(block.drawn, non_blocking=True)
        self._replay(BEHIND, [(block.drafted, block.position, block.slot, start)], [waiting], before)
        return self._drafted[:1]

    def _replay(
        self,
        blocks: int,
        numbers: Sequence[tuple[int, int, int, int]],
        waiting: Sequence[Sequence[tuple[Tensor, ...]]],
        count: int | None = None,
    ) -> None:
        if not self._passes:
            self.make_ready()
        self._fill(numbers, waiting, count)
        self._passes[blocks]()

    def _fill(
        self,
        numbers: Sequence[tuple[int, int, int, int]],
        waiting: Sequence[Sequence[tuple[Tensor, ...]]],
        count: int | None = None,
    ) -> None:
        """count: what is said of the features of every block; None: how many there are."""
        padding = [(0, 0, self._scratch_slot, 0, 0)] * (self.blocks - len(numbers))
        counts = [sum(len(rows[0]) for rows in its) if count is None else count for its in waiting]
        filled = [(*its, count) for its, count in zip(numbers, counts, strict=True)]
        with self._host.next() as host:
            host.numpy()[:] = np.array([*filled, *padding]).T
            self._numbers.copy_(host, non_blocking=True)
        places, taps = list[Tensor](), list[Tensor]()
        for number, its in enumerate(waiting):
            at = number * self.rows
            for rows in its:
                places += [buffer[at : at + len(rows[0])] for buffer in self._features]
                taps += rows
                at += len(rows[0])
        if taps:
            torch._foreach_copy_(places, taps, non_blocking=True)  # one launch for all

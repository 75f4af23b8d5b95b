"""Audits: one in so many restored snapshots is computed again, cold, while no request waits, and the two are compared.

The cold run meets the same chunk edges as the run that made the snapshot, so on a CPU the bits must be the same where
every token was computed by prefill, alone in its batch, by this process. Everywhere else (decode, shared batches, an
earlier process with other threads, GPUs) two right states differ by rounding, and a bound applies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from rekindle.prefix import PrefixCache
from rekindle.prefix.types import Entry
from rekindle.snapshots.types import DRAFTER_LAYER, Part, Snapshot

log = logging.getLogger("rekindle.engine")

FLOAT32_BOUND = 1e-4  # largest difference, as a share of the largest value of the tensor or of 1
COARSE_BOUND = 0.25  # GPUs and 16-bit types: mean difference, in standard deviations of the tensor


@dataclass(frozen=True, slots=True, eq=False)
class Audit:
    """A snapshot that was restored and is to be computed again."""

    entry: Entry | None  # None: of a kept slot, and the index has no snapshot of its tokens
    snapshot: Snapshot

    @property
    def cuts(self) -> list[int]:
        """Where its chunks ended off the grid, and where one way of computing gave way to another."""
        stretches = self.snapshot.stretches
        inner = {cut for stretch in stretches for cut in stretch.cuts} | {stretch.stop for stretch in stretches}
        return sorted(cut for cut in inner if cut < self.snapshot.position)


class Auditor:
    """Chooses what to audit and judges the outcome. Lives on the engine's thread."""

    def __init__(self, prefixes: PrefixCache, every: int, on_cpu: bool) -> None:
        self.audits = 0
        self.mismatches = 0
        self._prefixes = prefixes
        self._every = every  # 0 is off
        self._on_cpu = on_cpu
        self._restores = 0
        self._waiting: Audit | None = None  # at most one: it keeps its snapshot in memory

    def note(self, audit: Callable[[], Audit]) -> None:
        """A snapshot was restored, or a kept slot taken over; one of so many is remembered for an audit."""
        if self._every:
            self._restores += 1
            if self._restores >= self._every and self._waiting is None:
                self._restores = 0
                self._waiting = audit()

    @property
    def waits(self) -> bool:
        """Whether one is to be run."""
        return self._waiting is not None

    def take(self) -> Audit | None:
        audit, self._waiting = self._waiting, None
        return audit

    def judge(self, audit: Audit, cold: Snapshot) -> None:
        """Compare; a wrong snapshot is never used again."""
        fault = self._fault(audit, cold)
        if fault is not None:
            self.mismatches += 1
            log.error("audit: the snapshot of %d tokens is wrong and was quarantined: %s", cold.position, fault)
            if audit.entry is not None:
                self._prefixes.quarantine(audit.entry, f"audit: {fault}")
        self.audits += 1  # last: a reader of the count finds the outcome

    def _fault(self, audit: Audit, cold: Snapshot) -> str | None:
        exact = self._must_be_exact(audit, cold)
        fine = self._on_cpu and all(t.dtype is torch.float32 for part in cold.parts for t in part.tensors.values())
        for name, ours, theirs in _pairs(audit.snapshot, cold):
            if ours.shape != theirs.shape:
                return f"{name} has the shape {tuple(ours.shape)}, computed cold {tuple(theirs.shape)}"
            if exact:
                if not torch.equal(ours, theirs):
                    return f"{name} is not bit for bit what a cold run gives"
                continue
            distance, bound = (_largest(ours, theirs), FLOAT32_BOUND) if fine else (_mean(ours, theirs), COARSE_BOUND)
            if not distance <= bound:  # not a number is no agreement
                return f"{name} differs from a cold run by {distance:.2g}, the bound is {bound:g}"
        return None

    def _must_be_exact(self, audit: Audit, cold: Snapshot) -> bool:
        ours = audit.snapshot
        alone = all(stretch.how == "prefill" for stretch in (*ours.stretches, *cold.stretches))
        inherited = audit.entry is not None and audit.entry.inherited
        return self._on_cpu and alone and ours.grid == cold.grid and not inherited


NOTHING = torch.empty(0)  # beside a tensor that the other snapshot does not have


def _pairs(ours: Snapshot, cold: Snapshot) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Every tensor of the one beside that of the other, with its name. A drafter's context changes no answer, and the
    cold run computes none."""
    layers = [part for part in ours.parts if part.layer != DRAFTER_LAYER]
    for mine, other in zip(layers, cold.parts, strict=True):
        a, b = _tensors(mine), _tensors(other)  # by name: files keep no order of their own within a part
        for name in a | b:
            yield f"layer {mine.layer} {name}", a.get(name, NOTHING), b.get(name, NOTHING)
    if ours.logits is not None and cold.logits is not None:
        shared = min(len(ours.logits), len(cold.logits))  # earlier versions kept those of rows without a token too
        yield "the row of logits", ours.logits[:shared], cold.logits[:shared]


def _tensors(part: Part) -> dict[str, torch.Tensor]:
    return {**{f"page {i}": page.data for i, page in enumerate(part.pages)}, **part.tensors}


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    if not a.numel():
        return 0.0
    a, b = a.float(), b.float()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1.0))


def _mean(a: torch.Tensor, b: torch.Tensor) -> float:
    if not a.numel():
        return 0.0
    a, b = a.float(), b.float()
    return float((a - b).abs().mean() / b.std(correction=0).clamp(min=1e-6))

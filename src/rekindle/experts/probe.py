"""Measures, once at start, the costs of this machine for the cost model and the CPU threads' share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import torch
from torch import Tensor

from rekindle.experts.cost import CostModel
from rekindle.experts.cpu_experts import LayerCpuExperts
from rekindle.experts.packed import PackedWeights
from rekindle.experts.residency import Residency

log = logging.getLogger("rekindle.experts")

MANY = 16  # rows of the larger host product
EIGHT = 8  # experts that are split between PCIe and CPU
TURNS = 8  # with other experts each time, so that no cache has them
GAIN = 0.98  # of the time with fewer experts on the CPU, at most; otherwise the CPU takes no more
# In a step the CPU's answer takes longer than by itself: its threads meet those of the server, and the slowest counts.
# Decode of tables made with 0.7 to 2.5 was fastest between 1.0 and 1.3 (docs/LOG.md, 2026-11-18).
LATE = 1.1


def measure_costs(weights: PackedWeights, residency: Residency, hidden: int, dtype: torch.dtype) -> CostModel:
    """Runs on a layer as it was loaded; leaves its slots and tables as they are."""
    device = residency.table.device
    cold = next(expert for expert in range(residency.experts) if expert not in residency.hot)
    row, rows = torch.randn(1, hidden), torch.randn(MANY, hidden)
    pcie = weights.fill_staging() / _best(weights.fill_staging, device)
    one = _best(lambda: weights.host_executor.share(row, cold), device, repeats=3)
    many = _best(lambda: weights.host_executor.share(rows, cold), device, repeats=3)
    x = row.to(device, dtype)
    call = _best(lambda: x.float().cpu().to(device), device)
    pair = max(0.0, many - one) / (MANY - 1)
    return CostModel(pcie=pcie, host_call=call, host_expert=max(0.0, one - pair), host_pair=pair, device_pair=0.0)


def measure_takes(weights: PackedWeights, cpu_experts: LayerCpuExperts, x: Tensor) -> list[int]:
    """Of 0, 1, … missing experts, as many as the mailbox takes, how many the CPU should compute. The link and the CPU
    are measured each by itself, with up to eight experts, as the device would ask for them; of more the CPU takes the
    same share."""
    most = min(EIGHT, weights.cold, weights.staging.slots, cpu_experts.box.pairs)
    splits, counts = _Splits(weights, cpu_experts, x, most), range(1, most + 1)
    link = EvenTimes.through([splits.microseconds(missing, 0) for missing in counts])
    cpu = EvenTimes.through([splits.microseconds(missing, missing) for missing in counts])
    takes = share_out(link, cpu, most)
    log.info("of 0 to %d cold experts the CPU takes %s; the link takes %s, the CPU %s", most, takes, link, cpu)
    return takes + [missing * takes[most] // most for missing in range(most + 1, cpu_experts.box.pairs + 1)]


@dataclass(frozen=True, slots=True)
class EvenTimes:
    """Microseconds of some experts, which grow evenly: a line through single measurements, of which some are a few per
    cent off, by which one load of a model would share otherwise than the next, and one may be far off."""

    begin: float
    each: float

    @classmethod
    def through(cls, took: Sequence[float]) -> EvenTimes:
        """took: by 1, 2, … experts. The median of all slopes, and of what is left (Theil and Sen)."""
        if len(took) == 1:
            return cls(0.0, took[0])
        slopes = ((b - a) / (m - n) for (n, a), (m, b) in combinations(enumerate(took, 1), 2))
        each = max(0.0, median(slopes))
        return cls(max(0.0, median(t - n * each for n, t in enumerate(took, 1))), each)

    def of(self, experts: int) -> float:
        return self.begin + experts * self.each if experts else 0.0

    def __str__(self) -> str:
        return f"{self.begin:.0f} + {self.each:.1f} µs for each"


def share_out(link: EvenTimes, cpu: EvenTimes, most: int) -> list[int]:
    """Of 0 to `most` missing experts, how many the CPU should take while the others come over the link."""
    return [
        best_split([max(link.of(missing - mine), LATE * cpu.of(mine)) for mine in range(missing + 1)])
        for missing in range(most + 1)
    ]


def best_split(took: Sequence[float]) -> int:
    """How many experts the CPU should take, by the times for 0, 1, …; one more must gain something."""
    best = 0
    for mine in range(len(took)):
        if took[mine] < GAIN * took[best]:
            best = mine
    return best


class _Splits:
    """Some experts divided between PCIe and CPU, several times one after another, asked for by the device alone."""

    def __init__(self, weights: PackedWeights, cpu_experts: LayerCpuExperts, x: Tensor, most: int) -> None:
        starts = [turn * most % (weights.cold - most + 1) for turn in range(TURNS)]
        self._ids = torch.stack([weights.at_place[start : start + most] for start in starts])  # [turns, most]
        self._slots, self._load = torch.zeros_like(self._ids), torch.full_like(self._ids, -1)
        self._weights, self._cpu_experts, self._x = weights, cpu_experts, x
        self._even = torch.ones(1, most, device=x.device)
        self._run = self._recorded() if x.is_cuda else self._turns

    def microseconds(self, missing: int, mine: int) -> float:
        """Of one turn in which `missing` experts are missing and the CPU takes `mine` of them."""
        at = torch.arange(self._ids.shape[1], device=self._x.device)
        self._slots.copy_(torch.where(at < mine, -1, 0).expand_as(self._slots))
        self._load.copy_(torch.where((at >= mine) & (at < missing), self._ids, -1))
        return _best(self._run, self._x.device, repeats=5) / TURNS

    def _turns(self) -> None:
        for ids, slots, load in zip(self._ids, self._slots, self._load, strict=True):
            self._cpu_experts.ask(self._x, ids[None], slots[None].clone(), self._even)
            self._weights.take_in_staging(load)
            self._cpu_experts.collect(torch.zeros_like(self._x))

    def _recorded(self) -> Callable[[], None]:
        """As a graph: launches sent one by one would wait for Python."""
        self._turns()  # compiles the kernels
        # Not `torch.cuda.graph`: its stream lies on whichever device recorded first.
        device, graph = self._x.device, torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            graph.capture_begin(capture_error_mode="thread_local")  # another stage may be at work
            try:
                self._turns()
            finally:
                graph.capture_end()
        return graph.replay


def _best(work: Callable[[], object], device: torch.device, repeats: int = 8) -> float:
    """Microseconds of the quickest of several runs."""
    times = []
    for _ in range(repeats + 1):  # the first may compile
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times) * 1e6


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

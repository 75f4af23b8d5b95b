"""Measures, once at start, what the cost model needs to know of this machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from rekindle.experts.cost import CostModel
from rekindle.experts.helper import Helper
from rekindle.experts.packed import PackedWeights
from rekindle.experts.residency import Residency
from rekindle.kernels.moe.crew import describe

log = logging.getLogger("rekindle.experts")

MANY = 16  # rows of the larger host product
EIGHT = 8  # experts that are split between link and CPU
TURNS = 8


def measure_costs(weights: PackedWeights, residency: Residency, hidden: int, dtype: torch.dtype) -> CostModel:
    """Runs on a layer as it was loaded; leaves its slots and tables as they are."""
    device = residency.table.device
    cold = next(expert for expert in range(residency.experts) if expert not in residency.hot)
    row, rows = torch.randn(1, hidden), torch.randn(MANY, hidden)
    link = weights.fill_staging() / _best(weights.fill_staging, device)
    one = _best(lambda: weights.host_executor.share(row, cold), device, repeats=3)
    many = _best(lambda: weights.host_executor.share(rows, cold), device, repeats=3)
    x = row.to(device, dtype)
    call = _best(lambda: x.float().cpu().to(device), device)
    pair = max(0.0, many - one) / (MANY - 1)
    return CostModel(link=link, host_call=call, host_expert=max(0.0, one - pair), host_pair=pair, device_pair=0.0)


def measure_share(weights: PackedWeights, helper: Helper, hidden: int, device: torch.device) -> int:
    """Of the experts a token misses, how many the CPU should take, in parts of 256: all splits of eight are tried."""
    layer = describe(weights.host_stacks)
    if layer is None:
        return 0
    some = min(EIGHT, weights.cold, helper.crew.box.pairs)
    x = torch.randn(hidden)

    def split(mine: int) -> float:
        """Seconds, the best of several turns: other experts each time, so that no cache has them."""
        times = []
        for turn in range(TURNS):
            first = turn * some % (weights.cold - some + 1)
            helper.crew.prepare(layer, x, range(first, first + mine), [1.0] * mine)
            _wait(device)
            start = time.perf_counter()
            weights.fill_staging(some - mine, first + mine)
            if mine:
                helper.crew.ask()
            _wait(device)
            times.append(time.perf_counter() - start)
        return min(times) * 1e6

    took = [split(mine) for mine in range(some + 1)]
    helper.continue_from_host()
    best = took.index(min(took))
    log.info("of %d cold experts the CPU takes %d; µs by how many it takes: %s", some, best, [round(t) for t in took])
    return 256 * best // some


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

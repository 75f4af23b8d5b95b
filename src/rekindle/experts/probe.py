"""Measures, once at start, what the cost model needs to know of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rekindle.experts.cost import CostModel
from rekindle.experts.packed import PackedWeights
from rekindle.experts.residency import Residency

MANY = 16  # rows of the larger host product


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

"""Cold experts on the CPU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu

from rekindle.experts.stored import Three
from rekindle.kernels.matmul import product


class HostExecutor:
    """Multiplies with an expert's weights, expanded in host memory. Keeps the `keep` most recently used expanded."""

    def __init__(self, values: Callable[[int], Three], keep: int = 0) -> None:
        self._values = values
        self._keep = keep
        self._kept: OrderedDict[int, Three] = OrderedDict()

    def share(self, x: Tensor, expert: int) -> Tensor:
        """x [rows, hidden] on the host -> float32 [rows, hidden], not yet weighted."""
        gate, up, down = self._expert(expert)
        return through(x.to(gate.dtype), gate, up, down)

    def _expert(self, expert: int) -> Three:
        if expert in self._kept:
            self._kept.move_to_end(expert)
            return self._kept[expert]
        values = self._values(expert)
        if self._keep:
            self._kept[expert] = values
            if len(self._kept) > self._keep:
                self._kept.popitem(last=False)
        return values


def through(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate x) · (up x)) in float32: what one expert gives for its rows."""
    return product(silu(product(x, gate)) * product(x, up), down).float()


def rows_of(ids: Tensor, expert: int) -> tuple[Tensor, Tensor]:
    """Rows that chose the expert, and in which place."""
    row, place = torch.nonzero(ids == expert, as_tuple=True)
    return row, place

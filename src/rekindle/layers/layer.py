"""One layer for every architecture: a mixer, then a feed-forward part.

Dense and MoE differ in the feed-forward part, hybrid and plain models in the list of mixers; nothing else sees the
difference. Equations are written out beside the kernels' definitions (kernels/*/naive.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace

import torch

from rekindle.experts import ExpertSet
from rekindle.kernels.matmul import Matrix
from rekindle.kernels.moe import ExpertStack
from rekindle.kernels.norm import add_rms_norm, rms_norm
from rekindle.kernels.ragged import Ragged
from rekindle.layers.base import AnyBlock, FfnBlock, LayerState
from rekindle.layers.ffn import DenseFfn


@dataclass(frozen=True, slots=True)
class HybridLayer:
    """Norm, mixer, residual; norm, feed-forward, residual.

    The residual sum is carried as two tensors (x, y): the sum is taken inside the next norm, which reads both anyway,
    also where y is in parts (`multiply_in_parts`).
    """

    index: int
    mixer: AnyBlock
    ffn: FfnBlock
    mixer_norm: torch.Tensor
    ffn_norm: torch.Tensor
    eps: float

    def linked(self, behind: HybridLayer | None) -> HybridLayer:
        """The layer, with blocks that know the matrix that is read after their last one. Routed experts are chosen
        while the layer runs, so before and after them nothing is known."""
        if not isinstance(self.ffn, DenseFfn):
            return self
        ffn = self.ffn.linked(None if behind is None else behind.mixer.first)
        return replace(self, mixer=self.mixer.linked(ffn.gate), ffn=ffn)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None, rows: Ragged, state: LayerState
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if y is None:
            h = rms_norm(x, self.mixer_norm, self.eps)
        else:
            x, h = add_rms_norm(x, y, self.mixer_norm, self.eps)
        y = self.mixer.forward(h, rows, state)
        x, h = add_rms_norm(x, y, self.ffn_norm, self.eps)
        return x, self.ffn.forward(h)


def launches_of(part: object) -> object:
    """Equal for layers that launch the same kernels: shapes and types of all their matrices. A part of any other type
    equals only itself."""
    if isinstance(part, torch.Tensor):
        return part.shape, part.dtype
    if isinstance(part, Matrix | ExpertStack):
        return part.shape, _type_of(part)
    if isinstance(part, ExpertSet):  # however many of its experts are hot
        stacks = tuple((stack.shape[1:], _type_of(stack)) for stack in part.weights.stacks)
        return launches_of(part.router), part.used, stacks, launches_of(part.shared), part.cache_sizes
    if is_dataclass(part):
        names = [field.name for field in fields(part) if field.name != "index"]
        return type(part), tuple(launches_of(getattr(part, name)) for name in names)
    return part if isinstance(part, int | float | str | None) else id(part)


def _type_of(part: Matrix | ExpertStack) -> object:
    stored = part.packed or part.lanes
    return part.values.dtype if stored is None else stored.type

"""The feed-forward part of an MoE layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rekindle.kernels.matmul import Matrix, make_matrix
from rekindle.kernels.moe import ExpertStack, SharedExpert, make_stack, moe, route
from rekindle.weights import WeightFile


@dataclass(frozen=True, slots=True)
class RoutedFfn:
    """A router, the experts it chooses from, and the shared expert that every row takes."""

    router: torch.Tensor  # [experts, hidden], float32: near ties must not be decided by rounding
    used: int
    gate: ExpertStack
    up: ExpertStack
    down: ExpertStack
    shared: SharedExpert

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        ids, weights = route(h, self.router, self.used)
        return moe(h, ids, weights, self.gate, self.up, self.down, self.shared)


def load_routed_ffn(file: WeightFile, name: str, device: torch.device, dtype: torch.dtype) -> RoutedFfn:
    """The experts of the layer whose tensors begin with `name`."""

    def stack(part: str) -> ExpertStack:
        info = file.tensors[f"{name}.{part}.weight"]
        experts, rows, columns = info.shape
        return make_stack(file.raw(info.name), info.type, (experts, rows, columns), device, dtype)

    def matrix(part: str) -> Matrix:
        info = file.tensors[f"{name}.{part}.weight"]
        rows, columns = info.shape
        return make_matrix(file.raw(info.name), info.type, (rows, columns), device, dtype)

    def values(part: str) -> torch.Tensor:
        return torch.from_numpy(file.values(f"{name}.{part}.weight").copy()).to(device)

    return RoutedFfn(
        router=values("ffn_gate_inp"),
        used=file.spec.ffn.used,
        gate=stack("ffn_gate_exps"),
        up=stack("ffn_up_exps"),
        down=stack("ffn_down_exps"),
        shared=SharedExpert(
            gate=matrix("ffn_gate_shexp"),
            up=matrix("ffn_up_shexp"),
            down=matrix("ffn_down_shexp"),
            scale=values("ffn_gate_inp_shexp").flatten(),
        ),
    )

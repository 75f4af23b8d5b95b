"""Gated DeltaNet: a recurrent matrix per head and a short convolution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rekindle.kernels.gated_delta import gated_delta_step, replay_of, replay_rows
from rekindle.kernels.matmul import Matrix, multiply, multiply_all
from rekindle.kernels.ragged import Ragged
from rekindle.kernels.rewind_log import RewindLog
from rekindle.layers.base import MixerBlock, SlotState, Tensors, register_mixer
from rekindle.layers.paged import PagedKv
from rekindle.layers.slot_memory import SlotMemory
from rekindle.spec import DeltaSpec


class DeltaState(SlotState):
    """The recurrent matrices and the convolution's window, both float32. Pending rows have moved the window on and the
    matrices not: a copy to go back to would take three times the memory of the rows."""

    __slots__ = ("log", "spec", "states", "windows")
    logs_rows: ClassVar[bool] = True

    def __init__(self, spec: DeltaSpec, slots: SlotMemory) -> None:
        self.spec = spec
        self.states = slots.zeros(spec.value_heads, spec.key_dim, spec.value_dim)
        self.windows = slots.zeros(spec.conv_width - 1, spec.conv_channels)  # oldest first
        self.log: RewindLog | None = None  # the last block of every slot, once there is room for one
        super().__init__({"state": self.states, "window": self.windows})

    def make_room(self, rows: int, dtype: torch.dtype) -> None:
        if self.log is None:
            self.log = RewindLog.zeros(self.spec, self.states.shape[0], rows, self.states.device, dtype)
        else:
            self.log = self.log.grown(rows)

    def rewind(self, where: Tensor) -> None:
        assert self.log is not None, "only a rewindable forward is settled"
        replay_rows(self.log, where, self.states, self.windows)

    @classmethod
    def rewinder(cls, states: Sequence[DeltaState]) -> Callable[[Tensor], None]:
        """On a GPU a launch for each layer would take longer than what it does: one for those that are alike."""
        if not states[0].states.is_cuda:
            return super().rewinder(states)
        replays = [_replay([state for state in states if state.spec == spec]) for spec in {s.spec for s in states}]

        def rewind(where: Tensor) -> None:
            for replay in replays:
                replay(where)

        return rewind


def _replay(alike: Sequence[DeltaState]) -> Callable[[Tensor], None]:
    logs = [state.log for state in alike if state.log is not None]
    assert len(logs) == len(alike), "there is room for a block in every layer"
    return replay_of(logs, [state.states for state in alike], [state.windows for state in alike])


@register_mixer("delta")
@dataclass(frozen=True, slots=True)
class DeltaBlock(MixerBlock[DeltaSpec, DeltaState]):
    """A short convolution, then the gated delta rule, then a gated norm."""

    spec: DeltaSpec
    qkv: Matrix
    gate: Matrix
    alpha: Matrix
    beta: Matrix
    out: Matrix
    conv: Tensor  # [channels, width], oldest tap first
    decay: Tensor  # [value_heads], negative
    dt_bias: Tensor  # [value_heads]
    norm: Tensor  # [value_dim]
    eps: float
    prefetch: Matrix | None = None  # as in AttentionBlock

    @classmethod
    def load(cls, tensors: Tensors, spec: DeltaSpec, eps: float) -> DeltaBlock:
        return cls(
            spec=spec,
            qkv=tensors.matrix("attn_qkv.weight"),
            gate=tensors.matrix("attn_gate.weight"),
            alpha=tensors.matrix("ssm_alpha.weight"),
            beta=tensors.matrix("ssm_beta.weight"),
            out=tensors.matrix("ssm_out.weight"),
            conv=tensors.vector("ssm_conv1d.weight"),
            decay=tensors.vector("ssm_a"),
            dt_bias=tensors.vector("ssm_dt.bias"),
            norm=tensors.vector("ssm_norm.weight"),
            eps=eps,
        )

    @classmethod
    def new_state(cls, spec: DeltaSpec, layer: int, slots: SlotMemory, paged: PagedKv) -> DeltaState:
        return DeltaState(spec, slots)

    @property
    def first(self) -> Matrix:
        return self.qkv

    def linked(self, behind: Matrix | None) -> DeltaBlock:
        return replace(self, prefetch=behind)

    def forward(self, h: Tensor, rows: Ragged, state: DeltaState) -> Tensor:
        inputs, z, a, b = multiply_all(h, [self.qkv, self.gate, self.alpha, self.beta], prefetch=self.out)
        log = state.log if rows.rewindable else None
        assert log is not None or not rows.rewindable, "the stage makes room before it runs a rewindable batch"
        mixed = gated_delta_step(
            inputs, self.conv, state.windows, a, b, self.decay, self.dt_bias, state.states, rows, self.spec,
            z, self.norm, self.eps, log,
        )  # fmt: skip
        return multiply(mixed, self.out, prefetch=self.prefetch)

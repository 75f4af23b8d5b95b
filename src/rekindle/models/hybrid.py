"""What the layers compute. One layer for every architecture: a mixer, then a feed-forward part.

Dense and MoE differ in the feed-forward part, hybrid and plain models in the list of mixers; nothing else sees the
difference. Equations are written out beside the kernels' definitions (kernels/*/naive.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from rekindle.kernels.conv import conv_silu
from rekindle.kernels.gated_delta import gated_delta_rows, gated_delta_step
from rekindle.kernels.matmul import Matrix, multiply, multiply_all, multiply_in_parts, swiglu
from rekindle.kernels.norm import add_rms_norm, gated_rms_norm, rms_norm
from rekindle.kernels.ragged import Ragged
from rekindle.kernels.rope import norm_rope_store
from rekindle.models.state import DeltaState, KvState, LayerState
from rekindle.spec import AttentionSpec, DeltaSpec


class MixerBlock(Protocol):
    @property
    def first(self) -> Matrix:
        """The largest of those that it reads at first."""

    def forward(self, h: torch.Tensor, rows: Ragged, state: LayerState) -> torch.Tensor: ...


class FfnBlock(Protocol):
    def forward(self, h: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Grouped attention over pages, with optional per-head norms and an optional output gate."""

    spec: AttentionSpec
    q: Matrix  # gated: every head is [query | gate], so [heads · 2 · head_dim, hidden]
    k: Matrix
    v: Matrix
    out: Matrix
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    frequencies: torch.Tensor
    eps: float
    then: Matrix | None = None  # what is read behind `out`: its beginning may be fetched meanwhile

    @property
    def first(self) -> Matrix:
        return self.q

    def forward(self, h: torch.Tensor, rows: Ragged, state: LayerState) -> torch.Tensor:
        assert isinstance(state, KvState)
        spec, n = self.spec, h.shape[0]
        # v goes first: it often has more bits than the others, and its programs then take longest.
        v, q, k = multiply_all(h, [self.v, self.q, self.k], then=self.out)
        q = q.view(n, spec.heads, -1)
        k, v = k.view(n, spec.kv_heads, spec.head_dim), v.view(n, spec.kv_heads, spec.head_dim)
        query = norm_rope_store(
            q[:, :, : spec.head_dim], k, v, self.q_norm, self.k_norm, self.eps, self.frequencies, state.kv, rows
        )
        gate = q[:, :, spec.head_dim :] if spec.gated else None
        return multiply(state.attend(query, rows, spec.head_dim**-0.5, gate), self.out, then=self.then)


@dataclass(frozen=True, slots=True)
class DeltaBlock:
    """Gated DeltaNet: a short convolution, then the gated delta rule, then a gated norm."""

    spec: DeltaSpec
    qkv: Matrix
    gate: Matrix
    alpha: Matrix
    beta: Matrix
    out: Matrix
    conv: torch.Tensor  # [channels, width], oldest tap first
    decay: torch.Tensor  # [value_heads], negative
    dt_bias: torch.Tensor  # [value_heads]
    norm: torch.Tensor  # [value_dim]
    eps: float
    then: Matrix | None = None  # as in AttentionBlock

    @property
    def first(self) -> Matrix:
        return self.qkv

    def forward(self, h: torch.Tensor, rows: Ragged, state: LayerState) -> torch.Tensor:
        assert isinstance(state, DeltaState)
        inputs, z, a, b = multiply_all(h, [self.qkv, self.gate, self.alpha, self.beta], then=self.out)
        if rows.rewindable:
            mixed = gated_rms_norm(self._mix_keeping_rows(inputs, a, b, rows, state), z, self.norm, self.eps)
        else:
            mixed = gated_delta_step(
                inputs, self.conv, state.windows, a, b, self.decay, self.dt_bias, state.states, rows, self.spec,
                z, self.norm, self.eps,
            )  # fmt: skip
        return multiply(mixed, self.out, then=self.then)

    def _mix_keeping_rows(
        self, inputs: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rows: Ragged, state: DeltaState
    ) -> torch.Tensor:
        """The same, and every segment's rows stay beside the state so that rewind can rebuild it exactly."""
        kept = state.kept
        assert kept is not None, "whoever lays out a rewindable batch makes room for its rows"
        conv = conv_silu(inputs, self.conv, state.windows, rows, kept)
        return gated_delta_rows(conv, a, b, self.decay, self.dt_bias, state.states, rows, self.spec, kept)


@dataclass(frozen=True, slots=True)
class DenseFfn:
    """SwiGLU."""

    gate: Matrix
    up: Matrix
    down: Matrix
    then: Matrix | None = None  # what is read behind `down`

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return multiply_in_parts(swiglu(h, self.gate, self.up, then=self.down), self.down, then=self.then)


@dataclass(frozen=True, slots=True)
class HybridLayer:
    """Norm, mixer, residual; norm, feed-forward, residual.

    The residual sum is carried as two tensors (x, y): the sum is taken inside the next norm, which reads both anyway,
    also where y is in parts (`multiply_in_parts`).
    """

    index: int
    mixer: MixerBlock
    ffn: FfnBlock
    mixer_norm: torch.Tensor
    ffn_norm: torch.Tensor
    eps: float

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

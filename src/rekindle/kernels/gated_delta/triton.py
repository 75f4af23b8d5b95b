"""The gated delta rule on a GPU.

rows of a segment         kernels
1, with its convolution   step.gated_delta_step
1                         rows.run_rows
any, of a block to verify rows.gated_delta_rows (replayed by rows.replay_rows)
2 and more                chunks.run_chunked
"""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.kernels.gated_delta.chunks import run_chunked
from rekindle.kernels.gated_delta.rows import run_rows
from rekindle.kernels.ragged import Ragged
from rekindle.spec import DeltaSpec


def gated_delta(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    ragged: Ragged,
    spec: DeltaSpec,
) -> Tensor:
    out = torch.empty((mixed.shape[0], spec.value_heads, spec.value_dim), dtype=mixed.dtype, device=mixed.device)
    if not ragged.decodes:
        run_chunked(mixed, a, b, decay, dt_bias, states, ragged, spec, out)
    if ragged.decodes or 1 in ragged.lengths:
        run_rows(mixed, a, b, decay, dt_bias, states, ragged, spec, out, only_single=not ragged.decodes)
    return out

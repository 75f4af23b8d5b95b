"""The gated delta rule over sub-chunks of rows: the same function as the recurrence, as matrix products.

With b the running sum of g inside a sub-chunk and S the state before it, the recurrence unrolls to
    (I + A) δ = β v − β e^b (K S)      A[i, j] = β_i e^(b_i − b_j) (k_i · k_j) for j < i
    o = e^b (Q S) + M δ                M[i, j] = e^(b_i − b_j) (q_i · k_j)     for j ≤ i
    S' = e^(b_last) S + Kᵀ (e^(b_last − b) δ)
I + A is solved by forward substitution: a power series of A explodes when keys are nearly equal and nothing decays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rekindle.kernels.gated_delta.naive import Inputs
from rekindle.spec.delta import SUB_CHUNK


class _Terms(NamedTuple):
    """One run of equal sub-chunks, everything that does not need the state; leading dims [sub-chunks, value_heads]."""

    values: Tensor  # (I + A)⁻¹ β v                 [.., rows, Dv]
    keys: Tensor  # (I + A)⁻¹ β e^b k               [.., rows, Dk]
    queries: Tensor  # e^b q                        [.., rows, Dk]
    mixing: Tensor  # M                             [.., rows, rows]
    writes: Tensor  # e^(b_last − b) k, transposed  [.., Dk, rows]
    decay: Tensor  # e^(b_last)                     [.., 1, 1]


def run_chunked(inputs: Inputs, state: Tensor) -> Tensor:
    """Outputs [rows, value_heads, Dv] of one segment; state [value_heads, Dk, Dv] moves on in place."""
    rows = inputs.q.shape[0]
    whole = rows - rows % SUB_CHUNK
    outs = []
    for first, last, size in ((0, whole, SUB_CHUNK), (whole, rows, rows - whole)):
        if first < last:
            part = Inputs(*(x[first:last] for x in inputs))
            outs.append(_pass_state(_terms(part, size), state))
    return torch.cat(outs)


def _terms(inputs: Inputs, size: int) -> _Terms:
    tiles = inputs.v.shape[1] // inputs.k.shape[1]
    q, k, v = (x.unflatten(0, (-1, size)).transpose(1, 2) for x in inputs[:3])  # [sub-chunks, heads, size, dim]
    g, beta = (x.unflatten(0, (-1, size)).transpose(1, 2) for x in inputs[3:])  # [sub-chunks, value_heads, size]
    b = g.cumsum(-1)
    # e^(b_i − b_j) at and below the diagonal; above it the difference is positive and may overflow, so mask first
    decays = (b[..., :, None] - b[..., None, :]).tril().exp().tril()
    key_products = (k @ k.transpose(-1, -2)).repeat(1, tiles, 1, 1)
    query_products = (q @ k.transpose(-1, -2)).repeat(1, tiles, 1, 1)
    q, k = q.repeat(1, tiles, 1, 1), k.repeat(1, tiles, 1, 1)
    system = (beta[..., None] * decays * key_products).tril(-1)  # its diagonal counts as one
    targets = torch.cat((beta[..., None] * v, (beta * b.exp())[..., None] * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    last = b[..., -1:]
    return _Terms(
        values=values,
        keys=keys,
        queries=b.exp()[..., None] * q,
        mixing=decays * query_products,
        writes=((last - b).exp()[..., None] * k).transpose(-1, -2),
        decay=last.exp()[..., None],
    )


def _pass_state(terms: _Terms, state: Tensor) -> Tensor:
    outs = []
    for values, keys, queries, mixing, writes, decay in zip(*terms, strict=True):
        delta = values - keys @ state
        outs.append(queries @ state + mixing @ delta)
        state.mul_(decay).add_(writes @ delta)
    return torch.stack(outs).transpose(1, 2).flatten(0, 1)  # [sub-chunks, heads, size, Dv] -> [rows, heads, Dv]

"""The gated delta rule, by definition: one row after another.

Per value head with state S [Dk, Dv]:  S ← e^g · S;  δ = β · (v − Sᵀk);  S ← S + k δᵀ;  o = Sᵀq.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from rekindle.kernels.ragged import Ragged
from rekindle.kernels.rewind_log import RewindLog
from rekindle.spec import DeltaSpec


class Inputs(NamedTuple):
    """What the recurrence reads, per row, float32."""

    q: Tensor  # [rows, key_heads, Dk], unit length over √Dk
    k: Tensor  # [rows, key_heads, Dk], unit length
    v: Tensor  # [rows, value_heads, Dv]
    g: Tensor  # [rows, value_heads], log of the decay, never positive
    beta: Tensor  # [rows, value_heads], in (0, 1)


def split_inputs(mixed: Tensor, a: Tensor, b: Tensor, decay: Tensor, dt_bias: Tensor, spec: DeltaSpec) -> Inputs:
    """mixed [rows, channels] is q | k | v; a and b are [rows, value_heads]."""
    keys = spec.key_heads * spec.key_dim
    q, k, v = mixed.float().split((keys, keys, spec.inner), dim=-1)
    return Inputs(
        q=_unit(q.view(-1, spec.key_heads, spec.key_dim)) * spec.key_dim**-0.5,
        k=_unit(k.view(-1, spec.key_heads, spec.key_dim)),
        v=v.view(-1, spec.value_heads, spec.value_dim),
        g=decay.float() * softplus(a.float() + dt_bias.float()),
        beta=b.float().sigmoid(),
    )


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


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
    """[rows, value_heads, Dv]; states [slots, value_heads, Dk, Dv] move on in place."""
    return gated_delta_rows(mixed, a, b, decay, dt_bias, states, ragged, spec, None)


def gated_delta_rows(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    ragged: Ragged,
    spec: DeltaSpec,
    log: RewindLog | None,
) -> Tensor:
    """The same; with `log` states stay as they are, and it gets the rows that `replay_rows` moves them on by."""
    out = mixed.new_empty(mixed.shape[0], spec.value_heads, spec.value_dim)
    for _, slot, rows in ragged.walk():
        inputs = split_inputs(mixed[rows], a[rows], b[rows], decay, dt_bias, spec)
        o, deltas = run_rows(inputs, states[slot] if log is None else states[slot].clone())
        out[rows] = o.to(out.dtype)
        if log is not None:
            count = rows.stop - rows.start
            log.k[slot, :count], log.delta[slot, :count], log.g[slot, :count] = inputs.k, deltas, inputs.g
    return out


def run_rows(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and δ of every row [rows, value_heads, Dv]; state [value_heads, Dk, Dv] moves on in place."""
    outs, deltas = [], []
    for q, k, v, g, beta in zip(*inputs, strict=True):
        q, k = _tiled(q, state), _tiled(k, state)
        _forget(state, g)
        delta = beta[:, None] * (v - _read(state, k))
        _write(state, k, delta)
        outs.append(_read(state, q))
        deltas.append(delta)
    return torch.stack(outs), torch.stack(deltas)


def replay_rows(log: RewindLog, where: Tensor, states: Tensor, windows: Tensor) -> None:
    """From the state before the block the very same steps, `count` of them; where: slot and count."""
    slot, count = where.tolist()
    state = states[slot]
    for i in range(count):
        _forget(state, log.g[slot, i])
        _write(state, _tiled(log.k[slot, i], state), log.delta[slot, i])
    windows[slot] = torch.cat((log.windows[slot], log.inputs[slot, :count]))[count:]


def _tiled(x: Tensor, state: Tensor) -> Tensor:
    """[key_heads, Dk] -> [value_heads, Dk]: value head p reads key head p mod key_heads."""
    return x.repeat(state.shape[0] // x.shape[0], 1)


def _forget(state: Tensor, g: Tensor) -> None:
    state.mul_(g.exp()[:, None, None])


def _read(state: Tensor, key: Tensor) -> Tensor:
    """Sᵀ key per head: [value_heads, Dv]."""
    return torch.bmm(key[:, None], state)[:, 0]


def _write(state: Tensor, key: Tensor, delta: Tensor) -> None:
    state.baddbmm_(key[:, :, None], delta[:, None])

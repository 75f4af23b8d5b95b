"""The drafter's forward, by the equations: one sequence, float32, nothing kept between calls.

    ctx   = RMSNorm(fc · [features of every tap])                one row per context position
    h     = embedding of [last token, mask, mask, …]             one row per position of the block
    layer:  n = RMSNorm(h);  h += side1(attention(side0(n)));  n = RMSNorm(h);  h += side1(swiglu(side0(n)))
    out   = RMSNorm(h);  logits = target's head · out;  row i ≥ 1 predicts the token at the block's position i

Queries come from block rows. Keys and values come from context rows and block rows with the same weights. A row at
position p sees context keys j with p - j < window, and the rows of the block: all of them, or those up to itself.
side0 and side1 are DFlash 2's convolutions along the block; without them both are the identity.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from rekindle.speculative.files import DrafterFile
from rekindle.speculative.spec import ConvSpec, DrafterSpec, DraftLayer

Weights = Mapping[str, Tensor]


def load(file: DrafterFile) -> dict[str, Tensor]:
    """Every tensor as float32."""
    return {name: torch.from_numpy(file.values(name)) for name in file.tensors}


def context_rows(spec: DrafterSpec, weights: Weights, features: Tensor) -> Tensor:
    """features [positions, taps · hidden] -> [positions, hidden]. Rows do not see each other."""
    if spec.feature_norms:
        taps = features.unflatten(-1, (len(spec.taps), spec.hidden)).unbind(1)
        normed = (_norm(spec, tap, weights[f"feature_norm.{i}.weight"]) for i, tap in enumerate(taps))
        features = torch.cat(tuple(normed), dim=-1)
    return _norm(spec, features @ weights["fc.weight"].T, weights["context_norm.weight"])


def draft_rows(spec: DrafterSpec, weights: Weights, context: Tensor, block: Tensor, position: int) -> Tensor:
    """context [positions, hidden] of positions [position - len(context), position); block [rows, hidden] embedded, at
    `position` and behind -> [rows, hidden], after the final norm."""
    h = block * spec.embedding_scale
    for index, layer in enumerate(spec.layers):
        part = {
            name.removeprefix(f"blk.{index}."): t for name, t in weights.items() if name.startswith(f"blk.{index}.")
        }
        n = _norm(spec, h, part["attn_norm.weight"])
        into, out_of = _sides(spec.conv, part, "attn", n)
        h = h + out_of(_attention(spec, layer, part, context, into(n), n, position))
        n = _norm(spec, h, part["ffn_norm.weight"])
        into, out_of = _sides(spec.conv, part, "ffn", n)
        x = into(n)
        gated = silu(x @ part["ffn_gate.weight"].T) * (x @ part["ffn_up.weight"].T)
        h = h + out_of(gated @ part["ffn_down.weight"].T)
    return _norm(spec, h, weights["output_norm.weight"])


def _attention(
    spec: DrafterSpec, layer: DraftLayer, part: Weights, context: Tensor, x: Tensor, n: Tensor, position: int
) -> Tensor:
    seen = _norm(spec, context, part["attn_norm.weight"]) if spec.context_norm_per_layer else context
    rows, count = x.shape[0], context.shape[0]
    at = torch.arange(position - count, position + rows)
    q = _turned(spec, _headed(spec, x @ part["attn_q.weight"].T, part["attn_q_norm.weight"]), at[count:])
    both = torch.cat((seen, x))
    k = _turned(spec, _headed(spec, both @ part["attn_k.weight"].T, part["attn_k_norm.weight"]), at)
    v = (both @ part["attn_v.weight"].T).unflatten(-1, (-1, spec.head_dim))
    shared = spec.heads // spec.kv_heads
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.head_dim**-0.5
    scores = scores.masked_fill(~_visible(layer, at[count:], at, position), float("-inf"))
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)
    if spec.gate:
        gate = softplus(n @ part["attn_gate.weight"].T).unflatten(-1, (spec.heads, -1))
        mixed = mixed * gate
    return mixed.flatten(1) @ part["attn_output.weight"].T


def _visible(layer: DraftLayer, rows: Tensor, keys: Tensor, position: int) -> Tensor:
    """[rows, keys]"""
    distance = rows[:, None] - keys[None, :]
    in_block = (keys >= position)[None, :]
    near = torch.ones_like(distance, dtype=torch.bool) if layer.window is None else distance < layer.window
    order = distance >= 0 if layer.causal else torch.ones_like(near)
    return torch.where(in_block, order, near)


def _sides(conv: ConvSpec | None, part: Weights, name: str, n: Tensor):  # type: ignore[no-untyped-def]
    """The two convolutions around a sublayer; their taps come from a base and from the normed rows."""
    if conv is None:
        return (lambda x: x), (lambda x: x)
    base = part[f"{name}_conv.base"]  # [side, tap, channel]
    groups = n.shape[1] // conv.group
    computed = (n @ part[f"{name}_conv.weight"].T).view(len(n), 2, conv.taps, groups)
    taps = base + computed.repeat_interleave(conv.group, dim=-1)  # [row, side, tap, channel]
    return (lambda x: _convolved(x, taps[:, 0])), (lambda x: _convolved(x, taps[:, 1]))


def _convolved(x: Tensor, taps: Tensor) -> Tensor:
    """out[i, c] = Σ_t taps[i, t, c] · x[i - t, c]; before the block there is nothing."""
    out = torch.zeros_like(x)
    for tap in range(min(taps.shape[1], len(x))):
        out[tap:] += taps[tap:, tap] * x[: len(x) - tap]
    return out


def select(spec: DrafterSpec, weights: Weights, rows: Tensor, logits: Tensor, anchor: int) -> list[int]:
    """DFlash 2's greedy walk: rows [block, hidden] after the final norm, logits [block, vocab] of the target's head;
    the token of every row from the second on."""
    assert spec.selector is not None, "only DFlash 2 has a selector"
    predecessors, successors = weights["selector.predecessor"], weights["selector.successor"]
    tokens, last = list[int](), anchor
    for row, scores in zip(rows[1:], logits[1:], strict=True):
        best = (scores * spec.logit_scale).topk(spec.selector.candidates)
        values = spec.softcap * torch.tanh(best.values / spec.softcap) if spec.softcap else best.values
        bridge = predecessors[last] * (weights["selector.hidden.weight"] @ row)
        last = int(best.indices[(values + successors[best.indices] @ bridge).argmax()])
        tokens.append(last)
    return tokens


def _norm(spec: DrafterSpec, x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight.shape, weight, spec.eps)


def _headed(spec: DrafterSpec, x: Tensor, weight: Tensor) -> Tensor:
    return _norm(spec, x.unflatten(-1, (-1, spec.head_dim)), weight)


def _turned(spec: DrafterSpec, x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions over the whole head, pairs (j, j + dim / 2); x [rows, heads, dim]."""
    half = spec.head_dim // 2
    speeds = spec.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = (positions.double()[:, None] * speeds).float()[:, None]
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

"""A DFlash drafter on a device: its weights, K and V of context positions, and the pass over blocks of sequences.

The equations stand in `naive.py`. Here weights stay as the file stores them, rows of all sequences share every product,
and the context's K and V come from whoever keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from rekindle.kernels.matmul import Matrix, gather_rows, make_matrix, multiply, multiply_all, swiglu
from rekindle.kernels.norm import rms_norm
from rekindle.kernels.rope.naive import norm_rope
from rekindle.speculative.files import DrafterFile
from rekindle.speculative.spec import ConvSpec, DrafterSpec, DraftLayer

Keys = tuple[Tensor, Tensor]  # K, turned, and V of consecutive positions, each [positions, kv_heads, head_dim]


@dataclass(frozen=True, slots=True)
class Sides:
    """The two convolutions around a sublayer."""

    base: Tensor  # [side, tap, channel]
    computed: Matrix


@dataclass(frozen=True, slots=True)
class Layer:
    attends: DraftLayer
    attn_norm: Tensor
    q: Matrix
    k: Matrix
    v: Matrix
    q_norm: Tensor
    k_norm: Tensor
    gate: Matrix | None
    out: Matrix
    attn_sides: Sides | None
    ffn_norm: Tensor
    ffn_gate: Matrix
    ffn_up: Matrix
    ffn_down: Matrix
    ffn_sides: Sides | None


@dataclass(frozen=True, slots=True)
class Selector:
    predecessor: Matrix
    successor: Matrix
    hidden: Matrix


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one sequence in a pass: the last known token, at `position`, and masks behind it."""

    position: int
    token: int
    context: Sequence[Keys]  # of each layer: of the positions right before the block


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of a pass stand."""

    block: int  # rows of every block
    positions: Tensor  # int64 [rows]
    inside: Tensor  # int64 [rows, 1], number of the row in its block


@dataclass(frozen=True, slots=True)
class Dflash:
    spec: DrafterSpec
    device: torch.device
    dtype: torch.dtype  # of activations
    fc: Matrix
    feature_norms: tuple[Tensor, ...]
    context_norm: Tensor
    output_norm: Tensor
    layers: tuple[Layer, ...]
    selector: Selector | None
    frequencies: Tensor  # radians per position, float64 [head_dim / 2]
    embed: Callable[[Sequence[int]], Tensor]  # the target's: tokens -> [rows, hidden]
    head: Matrix  # the target's
    drawable: int  # rows of the head that stand for tokens

    # Context

    @torch.inference_mode()
    def context(self, features: Sequence[Tensor], positions: Tensor) -> list[Keys]:
        """features: of each of the spec's taps [rows, hidden] -> K and V of every layer."""
        ctx = self._joined([tap.to(self.device, self.dtype) for tap in features])
        ctx = rms_norm(multiply(ctx, self.fc), self.context_norm, self.spec.eps)
        return [self._keys(layer, self._seen(layer, ctx), positions) for layer in self.layers]

    def _joined(self, taps: list[Tensor]) -> Tensor:
        if self.feature_norms:
            taps = [rms_norm(x.contiguous(), w, self.spec.eps) for x, w in zip(taps, self.feature_norms, strict=True)]
        return torch.cat(taps, dim=-1)

    def _seen(self, layer: Layer, ctx: Tensor) -> Tensor:
        return rms_norm(ctx, layer.attn_norm, self.spec.eps) if self.spec.context_norm_per_layer else ctx

    def _keys(self, layer: Layer, x: Tensor, positions: Tensor) -> Keys:
        k, v = multiply_all(x, [layer.k, layer.v])
        return self._turned(k, layer.k_norm, positions), v.unflatten(-1, (-1, self.spec.head_dim))

    def _turned(self, x: Tensor, norm: Tensor, positions: Tensor) -> Tensor:
        """[rows, heads · dim] -> per-head norm and rotation [rows, heads, dim], float32."""
        headed = x.float().unflatten(-1, (-1, self.spec.head_dim))
        turned, _ = norm_rope(headed, headed[:, :1], norm, norm, self.spec.eps, positions, self.frequencies)
        return turned

    # Blocks

    @torch.inference_mode()
    def propose(self, blocks: Sequence[Block], most: Sequence[int]) -> list[tuple[int, ...]]:
        """At most so many tokens after each block's first. A pass has all rows that the drafter was trained with,
        whatever is asked for: fewer would see fewer."""
        rows = self.run(blocks)
        wanted = [rows[i, 1 : 1 + count] for i, count in enumerate(most)]
        logits = multiply(torch.cat(wanted), self.head)[:, : self.drawable].float()
        found, start = list[tuple[int, ...]](), 0
        for block, its_rows, count in zip(blocks, wanted, most, strict=True):
            found.append(self._choose(its_rows, logits[start : start + count], block.token))
            start += count
        return found

    def run(self, blocks: Sequence[Block]) -> Tensor:
        """[blocks, rows of a block, hidden], after the final norm."""
        size = self.spec.block
        tokens = [token for block in blocks for token in (block.token, *[self.spec.mask] * (size - 1))]
        inside = torch.arange(size, device=self.device)
        starts = torch.tensor([block.position for block in blocks], device=self.device)
        rows = Rows(size, (starts[:, None] + inside).flatten(), inside.repeat(len(blocks))[:, None])
        h = self.embed(tokens).to(self.device, self.dtype)
        if self.spec.embedding_scale != 1.0:
            h = h * self.spec.embedding_scale
        for number, layer in enumerate(self.layers):
            contexts = [block.context[number] for block in blocks]
            h = h + self._attention(layer, h, rows, contexts)
            h = h + self._ffn(layer, h, rows)
        return rms_norm(h, self.output_norm, self.spec.eps).view(len(blocks), size, -1)

    def _attention(self, layer: Layer, h: Tensor, rows: Rows, contexts: Sequence[Keys]) -> Tensor:
        n = rms_norm(h, layer.attn_norm, self.spec.eps)
        taps = self._taps(layer.attn_sides, n)
        x = _convolved(n, taps, 0, rows)
        query = self._turned(multiply(x, layer.q), layer.q_norm, rows.positions)
        k, v = self._keys(layer, x, rows.positions)
        pieces = zip(query.split(rows.block), k.split(rows.block), v.float().split(rows.block), contexts, strict=True)
        mixed = torch.cat([self._attend(layer.attends, *piece) for piece in pieces])
        if layer.gate is not None:
            mixed = mixed * softplus(multiply(n, layer.gate).float()).unflatten(-1, (self.spec.heads, -1))
        return _convolved(multiply(mixed.flatten(1).to(h.dtype), layer.out), taps, 1, rows)

    def _attend(self, attends: DraftLayer, query: Tensor, k: Tensor, v: Tensor, context: Keys) -> Tensor:
        """One block over its context and itself -> [rows, heads, dim]."""
        count, shared = context[0].shape[0], self.spec.heads // self.spec.kv_heads
        k, v = torch.cat((context[0].float(), k)), torch.cat((context[1].float(), v))
        grouped = query.unflatten(1, (self.spec.kv_heads, shared)).permute(1, 2, 0, 3)  # [kv heads, shared, rows, dim]
        scores = grouped @ k.permute(1, 2, 0)[:, None] * self.spec.head_dim**-0.5
        scores = scores.masked_fill(~_visible(attends, count, len(query), self.device), float("-inf"))
        mixed = scores.softmax(dim=-1) @ v.transpose(0, 1)[:, None]
        return mixed.permute(2, 0, 1, 3).flatten(1, 2)

    def _ffn(self, layer: Layer, h: Tensor, rows: Rows) -> Tensor:
        n = rms_norm(h, layer.ffn_norm, self.spec.eps)
        taps = self._taps(layer.ffn_sides, n)
        gated = swiglu(_convolved(n, taps, 0, rows), layer.ffn_gate, layer.ffn_up)
        return _convolved(multiply(gated, layer.ffn_down), taps, 1, rows)

    def _taps(self, sides: Sides | None, n: Tensor) -> Tensor | None:
        """[rows, side, tap, channel]"""
        conv = self.spec.conv
        if sides is None or conv is None:
            return None
        computed = multiply(n, sides.computed).view(len(n), 2, conv.taps, -1)
        return sides.base.to(n.dtype) + computed.repeat_interleave(conv.group, dim=-1)

    def _choose(self, rows: Tensor, logits: Tensor, anchor: int) -> tuple[int, ...]:
        chooser = self.spec.selector
        if chooser is None or self.selector is None:
            return tuple(logits.argmax(dim=-1).tolist())
        best = (logits * self.spec.logit_scale).topk(chooser.candidates, dim=-1)
        cap = self.spec.softcap
        values = cap * torch.tanh(best.values / cap) if cap else best.values
        bridges = multiply(rows, self.selector.hidden).float()
        after = gather_rows(self.selector.successor, best.indices.flatten()).float().unflatten(0, best.indices.shape)
        tokens, last = list[int](), anchor
        for candidates, value, bridge, successors in zip(best.indices, values, bridges, after, strict=True):
            before = gather_rows(self.selector.predecessor, torch.tensor([last], device=self.device))[0].float()
            last = int(candidates[(value + successors @ (before * bridge)).argmax()])
            tokens.append(last)
        return tuple(tokens)


def _visible(attends: DraftLayer, count: int, rows: int, device: torch.device) -> Tensor:
    """[rows, count + rows]: which keys each row of a block sees, of the context before it and of the block itself."""
    row, key = torch.arange(rows, device=device)[:, None], torch.arange(-count, rows, device=device)[None]
    near = (row - key < attends.window) | (key >= 0) if attends.window is not None else torch.ones_like(row + key) > 0
    return near & ((key <= row) | (key < 0)) if attends.causal else near


def _convolved(x: Tensor, taps: Tensor | None, side: int, rows: Rows) -> Tensor:
    """out[i, c] = Σ_t taps[i, side, t, c] · x[i - t, c]; before the block there is nothing."""
    if taps is None:
        return x
    out = taps[:, side, 0] * x
    for back in range(1, min(taps.shape[2], rows.block)):
        out += torch.where(rows.inside >= back, taps[:, side, back] * x.roll(back, dims=0), 0)
    return out


def load_dflash(
    file: DrafterFile,
    device: torch.device,
    dtype: torch.dtype,
    embed: Callable[[Sequence[int]], Tensor],
    head: Matrix,
    drawable: int,
) -> Dflash:
    return _Loader(file, device, dtype).load(embed, head, drawable)


@dataclass(frozen=True, slots=True)
class _Loader:
    file: DrafterFile
    device: torch.device
    dtype: torch.dtype

    def load(self, embed: Callable[[Sequence[int]], Tensor], head: Matrix, drawable: int) -> Dflash:
        spec, half = self.file.spec, self.file.spec.head_dim // 2
        norms = range(len(spec.taps)) if spec.feature_norms else ()
        return Dflash(
            spec=spec,
            device=self.device,
            dtype=self.dtype,
            fc=self.matrix("fc.weight"),
            feature_norms=tuple(self.vector(f"feature_norm.{tap}.weight") for tap in norms),
            context_norm=self.vector("context_norm.weight"),
            output_norm=self.vector("output_norm.weight"),
            layers=tuple(self.layer(number) for number in range(len(spec.layers))),
            selector=self.selector(),
            frequencies=spec.rope_theta ** (-torch.arange(half, dtype=torch.float64, device=self.device) / half),
            embed=embed,
            head=head,
            drawable=drawable,
        )

    def layer(self, number: int) -> Layer:
        spec, blk = self.file.spec, f"blk.{number}"
        return Layer(
            attends=spec.layers[number],
            attn_norm=self.vector(f"{blk}.attn_norm.weight"),
            q=self.matrix(f"{blk}.attn_q.weight"),
            k=self.matrix(f"{blk}.attn_k.weight"),
            v=self.matrix(f"{blk}.attn_v.weight"),
            q_norm=self.vector(f"{blk}.attn_q_norm.weight"),
            k_norm=self.vector(f"{blk}.attn_k_norm.weight"),
            gate=self.matrix(f"{blk}.attn_gate.weight") if spec.gate else None,
            out=self.matrix(f"{blk}.attn_output.weight"),
            attn_sides=self.sides(f"{blk}.attn_conv", spec.conv),
            ffn_norm=self.vector(f"{blk}.ffn_norm.weight"),
            ffn_gate=self.matrix(f"{blk}.ffn_gate.weight"),
            ffn_up=self.matrix(f"{blk}.ffn_up.weight"),
            ffn_down=self.matrix(f"{blk}.ffn_down.weight"),
            ffn_sides=self.sides(f"{blk}.ffn_conv", spec.conv),
        )

    def sides(self, name: str, conv: ConvSpec | None) -> Sides | None:
        return None if conv is None else Sides(self.vector(f"{name}.base"), self.matrix(f"{name}.weight"))

    def selector(self) -> Selector | None:
        if self.file.spec.selector is None:
            return None
        names = ("selector.predecessor", "selector.successor", "selector.hidden.weight")
        return Selector(*map(self.matrix, names))

    def matrix(self, name: str) -> Matrix:
        info = self.file.tensors[name]
        rows, columns = info.shape
        return make_matrix(self.file.raw(name), info.type, (rows, columns), self.device, self.dtype)

    def vector(self, name: str) -> Tensor:
        """Norms and the like stay float32, in the tensor's own shape."""
        return torch.from_numpy(self.file.values(name)).to(self.device)

"""A DFlash drafter on a device: its weights, K and V of context positions, and the pass over blocks of sequences.

The equations stand in `naive.py`. Here weights stay as the file stores them, rows of all sequences share every product,
and the context's K and V lie in rings of whoever keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from rekindle.kernels.draft import attend_ring, convolve, store_ring, walk
from rekindle.kernels.matmul import Matrix, gather_rows, make_matrix, multiply, multiply_all, swiglu
from rekindle.kernels.norm import add_rms_norm, rms_norm
from rekindle.kernels.rope import norm_rope
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
class DraftBlocks:
    """Rows of some sequences in a pass: of each the last known token, and masks behind it. All are int64 [blocks] where
    the drafter is: no size of a pass hangs on their values, so that it can be recorded."""

    tokens: Tensor
    positions: Tensor  # of these tokens
    slots: Tensor  # whose rings hold …
    starts: Tensor  # … the positions from here up to the block's


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
    frequencies: Tensor  # radians per position [head_dim / 2]: float64, on a GPU float32
    embed: Callable[[Tensor], Tensor]  # the target's: tokens -> [rows, hidden]
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
        k, v = (x.unflatten(-1, (-1, self.spec.head_dim)) for x in multiply_all(x, [layer.k, layer.v]))
        return norm_rope(k[:, :1], k, None, layer.k_norm, self.spec.eps, positions, self.frequencies)[1], v

    @torch.inference_mode()
    def settle(self, features: Sequence[Tensor], blocks: DraftBlocks, counts: Tensor, rings: Sequence[Tensor]) -> None:
        """features: of each tap [blocks · rows, hidden]; the first `counts` of a block's rows stand right before it,
        and their K and V go into the rings."""
        rows, firsts = len(features[0]) // len(counts), blocks.positions - counts
        positions = (firsts[:, None] + torch.arange(rows, device=self.device)).flatten()
        for (k, v), ring in zip(self.context(features, positions), rings, strict=True):
            store_ring(ring, k, v, blocks.slots, firsts, counts)

    # Blocks

    @torch.inference_mode()
    def propose(self, blocks: DraftBlocks, rings: Sequence[Tensor], most: int) -> Tensor:
        """So many tokens after each block's first: [blocks, most]. A pass has all rows that the drafter was trained
        with, whatever is asked for: fewer would see fewer."""
        rows = self.run(blocks, rings)[:, 1 : 1 + most].flatten(0, 1)
        logits = multiply(rows, self.head)[:, : self.drawable]
        if self.selector is None:
            return logits.argmax(dim=-1).view(-1, most)
        return self._path(rows, logits, blocks.tokens)

    @torch.inference_mode()
    def run(self, blocks: DraftBlocks, rings: Sequence[Tensor]) -> Tensor:
        """[blocks, rows of a block, hidden], after the final norm. rings: of every layer, as in `kernels.draft`."""
        size, eps = self.spec.block, self.spec.eps
        tokens = torch.full((len(blocks.tokens), size), self.spec.mask, device=self.device)
        tokens[:, 0] = blocks.tokens
        positions = (blocks.positions[:, None] + torch.arange(size, device=self.device)).flatten()
        h = self.embed(tokens.flatten()).to(self.device, self.dtype)
        if self.spec.embedding_scale != 1.0:
            h = h * self.spec.embedding_scale
        n = rms_norm(h, self.layers[0].attn_norm, eps)
        for number, layer in enumerate(self.layers):
            h, n = add_rms_norm(h, self._attention(layer, n, positions, blocks, rings[number]), layer.ffn_norm, eps)
            last = number + 1 == len(self.layers)
            after = self.output_norm if last else self.layers[number + 1].attn_norm
            h, n = add_rms_norm(h, self._ffn(layer, n), after, eps)
        return n.view(-1, size, self.spec.hidden)

    def _attention(self, layer: Layer, n: Tensor, positions: Tensor, blocks: DraftBlocks, ring: Tensor) -> Tensor:
        computed = self._computed(layer.attn_sides, n)
        x = self._convolved(layer.attn_sides, n, computed, 0)
        q, k, v = multiply_all(x, [layer.q, layer.k, layer.v])
        q, k, v = (x.unflatten(-1, (-1, self.spec.head_dim)) for x in (q, k, v))
        q, k = norm_rope(q, k, layer.q_norm, layer.k_norm, self.spec.eps, positions, self.frequencies)
        where = ring, blocks.slots, blocks.starts, blocks.positions
        mixed = attend_ring(q, k, v, *where, layer.attends.window, layer.attends.causal)
        if layer.gate is not None:
            gate = softplus(multiply(n, layer.gate).float()).unflatten(-1, (self.spec.heads, -1))
            mixed = (mixed * gate).to(mixed.dtype)
        return self._convolved(layer.attn_sides, multiply(mixed.flatten(1), layer.out), computed, 1)

    def _ffn(self, layer: Layer, n: Tensor) -> Tensor:
        computed = self._computed(layer.ffn_sides, n)
        gated = swiglu(self._convolved(layer.ffn_sides, n, computed, 0), layer.ffn_gate, layer.ffn_up)
        return self._convolved(layer.ffn_sides, multiply(gated, layer.ffn_down), computed, 1)

    def _computed(self, sides: Sides | None, n: Tensor) -> Tensor | None:
        return None if sides is None else multiply(n, sides.computed)

    def _convolved(self, sides: Sides | None, x: Tensor, computed: Tensor | None, side: int) -> Tensor:
        return x if sides is None or computed is None else convolve(x, sides.base, computed, side, self.spec.block)

    def _path(self, rows: Tensor, logits: Tensor, anchors: Tensor) -> Tensor:
        """Through the best candidates of every row; a pair of neighbours scores predecessor · bridge · successor."""
        chooser, table = self.spec.selector, self.selector
        assert chooser is not None and table is not None, "a drafter without a selector takes the best of every row"
        logits = logits.float() if self.spec.logit_scale == 1.0 else logits.float() * self.spec.logit_scale
        best = logits.topk(chooser.candidates, dim=-1)
        cap = self.spec.softcap
        values = cap * torch.tanh(best.values / cap) if cap else best.values
        shape = len(anchors), len(rows) // len(anchors), chooser.candidates
        bridges = multiply(rows, table.hidden).float().view(*shape[:2], 1, -1)
        after, before = (
            gather_rows(matrix, best.indices.flatten()).float().view(*shape, -1)
            for matrix in (table.successor, table.predecessor)
        )
        known = gather_rows(table.predecessor, anchors).float()[:, None]
        first = (known * bridges[:, 0]) @ after[:, 0].transpose(-1, -2)
        steps = (before[:, :-1] * bridges[:, 1:]) @ after[:, 1:].transpose(-1, -2)
        chosen = walk(values.view(shape), first[:, 0], steps)
        return best.indices.view(shape).gather(-1, chosen[..., None])[..., 0]


def load_dflash(
    file: DrafterFile,
    device: torch.device,
    dtype: torch.dtype,
    embed: Callable[[Tensor], Tensor],
    head: Matrix,
    drawable: int,
) -> Dflash:
    return _Loader(file, device, dtype).load(embed, head, drawable)


@dataclass(frozen=True, slots=True)
class _Loader:
    file: DrafterFile
    device: torch.device
    dtype: torch.dtype

    def load(self, embed: Callable[[Tensor], Tensor], head: Matrix, drawable: int) -> Dflash:
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
            frequencies=self.frequencies(spec.rope_theta, half),
            embed=embed,
            head=head,
            drawable=drawable,
        )

    def frequencies(self, theta: float, half: int) -> Tensor:
        exact = theta ** (-torch.arange(half, dtype=torch.float64) / half)
        return exact.float().to(self.device) if self.device.type == "cuda" else exact

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

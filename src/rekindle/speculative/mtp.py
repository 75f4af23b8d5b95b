"""A next-token-prediction (MTP) block on a device: K and V of context positions, and chains of guesses.

    x_q  = eh_proj · [RMSNorm(embedding of token q) ‖ RMSNorm(h of position q - 1)]
    y_q  = gated attention and feed-forward over x_q, at position q, with the residual sums
    h'_q = RMSNorm(y_q);  the head's row of h'_q predicts the token at q + 1

For positions that the target has run, h is its last layer's output after its final norm, before position 0 it is 0, and
only K and V of x_q are needed. Behind them a block chains: the token that was guessed is the next row's, and h' of the
row before is its h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rekindle.experts import load_routed_ffn
from rekindle.kernels.matmul import Matrix, make_matrix, multiply, multiply_all
from rekindle.kernels.norm import add, rms_norm
from rekindle.kernels.rope import rope_frequencies
from rekindle.kernels.rope.naive import norm_rope
from rekindle.layers.embedding import DeviceEmbedding
from rekindle.layers.ffn import DenseFfn
from rekindle.models.registry import family_of
from rekindle.speculative.dflash import Keys
from rekindle.speculative.mtp_file import MtpFile, MtpSpec
from rekindle.weights.expected import NEXTN_EMBEDDING, NEXTN_HEAD, NEXTN_JOIN, NEXTN_NORM


class Ffn(Protocol):
    def forward(self, h: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Chain:
    """What one sequence's guesses begin with: the last known token, at `position`."""

    position: int
    token: int
    hidden: Tensor  # [1, hidden], the last layer's output at the position before
    context: Keys  # of the positions right before


@dataclass(frozen=True, slots=True)
class Mtp:
    spec: MtpSpec
    device: torch.device
    dtype: torch.dtype  # of activations
    target_norm: Tensor  # the target's final norm
    enorm: Tensor
    hnorm: Tensor
    join: Matrix
    attn_norm: Tensor
    q: Matrix  # gated: every head is [query | gate]
    k: Matrix
    v: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Matrix
    ffn_norm: Tensor
    ffn: Ffn
    norm: Tensor
    frequencies: Tensor
    embed: Callable[[Tensor], Tensor]  # tokens -> [rows, hidden]
    head: Matrix
    drawable: int  # rows of the head that stand for tokens

    # Context

    @torch.inference_mode()
    def context(self, features: Sequence[Tensor], positions: Tensor) -> list[Keys]:
        """features: the last layer's output at the position before [rows, hidden], and the tokens [rows]."""
        hidden, tokens = features
        x = self._enter(tokens, self._final(hidden))
        n = rms_norm(x, self.attn_norm, self.spec.eps)
        k, v = multiply_all(n, [self.k, self.v])
        return [self._keys(k, v, positions)]

    def _final(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden.to(self.device, self.dtype).contiguous(), self.target_norm, self.spec.eps)

    def _enter(self, tokens: Tensor, h: Tensor) -> Tensor:
        embedded = self.embed(tokens).to(self.device, self.dtype)
        both = rms_norm(embedded, self.enorm, self.spec.eps), rms_norm(h, self.hnorm, self.spec.eps)
        return multiply(torch.cat(both, dim=-1), self.join)

    def _keys(self, k: Tensor, v: Tensor, positions: Tensor) -> Keys:
        heads = (-1, self.spec.head_dim)
        return self._turned(k.unflatten(-1, heads), self.k_norm, positions), v.unflatten(-1, heads)

    def _turned(self, x: Tensor, norm: Tensor | None, positions: Tensor) -> Tensor:
        """Per-head norm and rotation, float32."""
        wide = x.float()
        return norm_rope(wide, wide[:, :1], norm, norm, self.spec.eps, positions, self.frequencies)[0]

    # Guesses

    @torch.inference_mode()
    def propose(self, chains: Sequence[Chain], most: Sequence[int]) -> list[tuple[int, ...]]:
        """At most so many tokens after each chain's first; all chains of a step share its products."""
        found = [list[int]() for _ in chains]
        keys = [(chain.context[0].float(), chain.context[1].float()) for chain in chains]
        h = self._final(torch.cat([chain.hidden for chain in chains]))
        tokens = [chain.token for chain in chains]
        for depth in range(max(most)):
            going = [i for i, count in enumerate(most) if count > depth]
            positions = torch.tensor([chains[i].position + depth for i in going], device=self.device)
            last = torch.tensor([tokens[i] for i in going], device=self.device)
            h[going] = rows = self._row(last, h[going], positions, keys, going)
            guesses = multiply(rows, self.head)[:, : self.drawable].float().argmax(dim=-1).tolist()
            for i, token in zip(going, guesses, strict=True):
                tokens[i] = token
                found[i].append(token)
        return [tuple(tokens) for tokens in found]

    def _row(self, tokens: Tensor, h: Tensor, positions: Tensor, keys: list[Keys], going: Sequence[int]) -> Tensor:
        """One row of each chain in `going` -> [rows, hidden] after the block's norm; K and V join those in `keys`."""
        x = self._enter(tokens, h)
        n = rms_norm(x, self.attn_norm, self.spec.eps)
        q, k, v = multiply_all(n, [self.q, self.k, self.v])
        heads, dim = self.spec.attention.heads, self.spec.head_dim
        q = q.unflatten(-1, (heads, -1))
        query = self._turned(q[:, :, :dim], self.q_norm, positions)
        new_k, new_v = self._keys(k, v, positions)
        mixed = list[Tensor]()
        for row, i in enumerate(going):
            ks, vs = keys[i]
            keys[i] = torch.cat((ks, new_k[row : row + 1])), torch.cat((vs, new_v[row : row + 1].float()))
            mixed.append(self._attend(query[row], *keys[i]))
        attended = torch.stack(mixed)
        if self.spec.attention.gated:
            attended = attended * q[:, :, dim:].float().sigmoid()
        x = x + multiply(attended.flatten(1).to(self.dtype), self.out)
        y = self.ffn.forward(rms_norm(x, self.ffn_norm, self.spec.eps))
        return rms_norm(add(x, y), self.norm, self.spec.eps)

    def _attend(self, query: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """query [heads, dim] over k and v [positions, kv_heads, dim] -> [heads, dim]."""
        grouped = query.unflatten(0, (self.spec.kv_heads, -1))  # [kv heads, shared, dim]
        scores = grouped @ k.permute(1, 2, 0) * self.spec.head_dim**-0.5
        return (scores.softmax(dim=-1) @ v.transpose(0, 1)).flatten(0, 1)


def load_mtp(
    file: MtpFile,
    device: torch.device,
    dtype: torch.dtype,
    embed: Callable[[Tensor], Tensor],
    head: Matrix,
    target_norm: Tensor,
    drawable: int,
) -> Mtp:
    """embed, head, target_norm: of the target, which has to be on the same device; a block may have its own."""
    return _Loader(file, device, dtype).load(embed, head, target_norm, drawable)


@dataclass(frozen=True, slots=True)
class _Loader:
    file: MtpFile
    device: torch.device
    dtype: torch.dtype

    def load(self, embed: Callable[[Tensor], Tensor], head: Matrix, target_norm: Tensor, drawable: int) -> Mtp:
        attention = self.file.spec.attention
        return Mtp(
            spec=self.file.spec,
            device=self.device,
            dtype=self.dtype,
            target_norm=target_norm,
            enorm=self.vector("nextn.enorm.weight"),
            hnorm=self.vector("nextn.hnorm.weight"),
            join=self.matrix(NEXTN_JOIN),
            attn_norm=self.vector("attn_norm.weight"),
            q=self.matrix("attn_q.weight"),
            k=self.matrix("attn_k.weight"),
            v=self.matrix("attn_v.weight"),
            q_norm=self.vector("attn_q_norm.weight") if attention.qk_norm else None,
            k_norm=self.vector("attn_k_norm.weight") if attention.qk_norm else None,
            out=self.matrix("attn_output.weight"),
            ffn_norm=self.vector(family_of(self.file.file.spec.architecture).ffn_norm),
            ffn=self.ffn(),
            norm=self.vector(NEXTN_NORM) if self.file.has(NEXTN_NORM) else target_norm,
            frequencies=rope_frequencies(attention, self.device),
            embed=self.embedding() if self.file.embeds else embed,
            head=self.matrix(NEXTN_HEAD) if self.file.has_head else head,
            drawable=drawable,
        )

    def ffn(self) -> Ffn:
        if not self.file.spec.ffn.is_moe:
            return DenseFfn.load(self)
        return load_routed_ffn(self.file.file, self.file.name("")[:-1], self.device, self.dtype)

    def embedding(self) -> Callable[[Tensor], Tensor]:
        return DeviceEmbedding(self.matrix(NEXTN_EMBEDDING), self.device, self.dtype).rows

    def matrix(self, part: str) -> Matrix:
        info = self.file.tensors[self.file.name(part)]
        rows, columns = info.shape
        return make_matrix(self.file.raw(part), info.type, (rows, columns), self.device, self.dtype)

    def vector(self, part: str) -> Tensor:
        """Norms stay float32."""
        return torch.from_numpy(self.file.values(part).copy()).to(self.device)

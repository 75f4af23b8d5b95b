"""Full attention over pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rekindle.errors import SnapshotMismatch
from rekindle.kernels.attention.rows import KV_DTYPES, row_size
from rekindle.kernels.matmul import Matrix, multiply, multiply_all
from rekindle.kernels.ragged import Ragged
from rekindle.kernels.rope import norm_rope_store, rope_frequencies
from rekindle.layers.base import LayerState, MixerBlock, Tensors, expect, register_mixer
from rekindle.layers.paged import QUERY, PagedKv, PageGroup, PageShape
from rekindle.layers.slot_memory import SlotMemory
from rekindle.snapshots.types import TAIL, Part
from rekindle.spec import PAGE, AttentionSpec


@dataclass(frozen=True, slots=True)
class AttentionState(LayerState):
    """K and V of one attention layer: number `index` of the pool's, which is that of a group of layers."""

    spec: AttentionSpec
    group: PageGroup
    number: int  # of the group
    index: int

    @property
    def kv(self) -> Tensor:
        """[places + 1, 2, PAGE, kv_heads, row]; open pages are always in it, so rows are stored here."""
        return self.group.pool.kv[self.index]

    def attend(self, query: Tensor, rows: Ragged, scale: float, gate: Tensor | None) -> Tensor:
        """query [rows, heads, dim] over every page that counts, wherever it lies, gated -> [rows, heads · dim]."""
        return self.group.reader.attend(self.index, query, rows, scale, gate)

    def live(self, slot: int) -> dict[str, Tensor]:
        """The rows of the open page, and in a sparse run the queries that pages are chosen by."""
        place, rest = self.group.open_page(slot)
        queries = self.group.queries(slot)
        tail = {TAIL: self.kv[place, :, :rest]}
        return tail if queries is None else {**tail, QUERY: queries[self.index]}

    def check(self, part: Part, position: int) -> None:
        if part.position not in (position, None):
            raise SnapshotMismatch(f"layer {part.layer} holds {part.position} positions, not {position}")
        kv, heads = self.kv, (self.spec.heads, self.spec.head_dim)
        wanted = {TAIL: ((2, position % PAGE, *kv.shape[3:]), kv.dtype)}
        if (query := part.tensors.get(QUERY)) is not None:
            both = query.ndim == 3  # also that of the next page
            wanted[QUERY] = ((2, *heads) if both else heads, torch.float32)
        expect(part, wanted)

    def restored(self, slot: int, part: Part) -> list[tuple[Tensor, Tensor]]:
        place, rest = self.group.open_page(slot)
        return [(self.kv[place, :, :rest], part.tensors[TAIL])] if rest else []


@register_mixer("attention")
@dataclass(frozen=True, slots=True)
class AttentionBlock(MixerBlock[AttentionSpec, AttentionState]):
    """Grouped attention over pages, with optional per-head norms and an optional output gate."""

    spec: AttentionSpec
    q: Matrix  # gated: every head is [query | gate], so [heads · 2 · head_dim, hidden]
    k: Matrix
    v: Matrix
    out: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    frequencies: Tensor
    eps: float
    prefetch: Matrix | None = None  # what is read after `out`: its beginning may be fetched meanwhile

    @classmethod
    def load(cls, tensors: Tensors, spec: AttentionSpec, eps: float) -> AttentionBlock:
        return cls(
            spec=spec,
            q=tensors.matrix("attn_q.weight"),
            k=tensors.matrix("attn_k.weight"),
            v=tensors.matrix("attn_v.weight"),
            out=tensors.matrix("attn_output.weight"),
            q_norm=tensors.vector("attn_q_norm.weight") if spec.qk_norm else None,
            k_norm=tensors.vector("attn_k_norm.weight") if spec.qk_norm else None,
            frequencies=rope_frequencies(spec, tensors.device),
            eps=eps,
        )

    @classmethod
    def new_state(cls, spec: AttentionSpec, layer: int, slots: SlotMemory, paged: PagedKv) -> AttentionState:
        return AttentionState(spec, *paged.place_of(layer))

    @classmethod
    def page_shape(cls, spec: AttentionSpec, kv_type: str) -> PageShape:
        return PageShape(spec.kv_heads, row_size(kv_type, spec.head_dim), KV_DTYPES[kv_type])

    @property
    def first(self) -> Matrix:
        return self.q

    def linked(self, behind: Matrix | None) -> AttentionBlock:
        return replace(self, prefetch=behind)

    def forward(self, h: Tensor, rows: Ragged, state: AttentionState) -> Tensor:
        spec, n, rows = self.spec, h.shape[0], rows.of_group(state.number)
        # v goes first: it often has more bits than the others, and its programs then take longest.
        v, q, k = multiply_all(h, [self.v, self.q, self.k], prefetch=self.out)
        q = q.view(n, spec.heads, -1)
        k, v = k.view(n, spec.kv_heads, spec.head_dim), v.view(n, spec.kv_heads, spec.head_dim)
        query = norm_rope_store(
            q[:, :, : spec.head_dim], k, v, self.q_norm, self.k_norm, self.eps, self.frequencies, state.kv, rows
        )
        gate = q[:, :, spec.head_dim :] if spec.gated else None
        return multiply(state.attend(query, rows, spec.head_dim**-0.5, gate), self.out, prefetch=self.prefetch)

"""A span of layers on a device of this process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rekindle.batch import Batch, Wanted
from rekindle.errors import SnapshotMismatch
from rekindle.kernels.gated_delta import replay_rows
from rekindle.kernels.ragged import Ragged
from rekindle.models.model import ModelSpan
from rekindle.models.state import DeltaState, KvState, LayerState
from rekindle.pool import PagePool, PageTable
from rekindle.snapshots.types import DeltaPart, KvPart, Page, Part
from rekindle.spec import PAGE, Span
from rekindle.stages.graphs import DecodeGraphs
from rekindle.stages.types import Ahead, PageCount, StageOutput


class LocalStage:
    """Runs its layers, and holds their state: pages for attention layers, one place per slot for DeltaNet layers."""

    def __init__(self, model: ModelSpan, slots: int, pages: int, kv_dtype: torch.dtype) -> None:
        self.model = model
        self.slots = slots
        spec = model.spec
        self.pool = PagePool(
            pages,
            len(spec.attention_layers(model.span)),
            spec.attention.kv_heads,
            spec.attention.head_dim,
            kv_dtype,
            model.device,
        )
        self._tables = [PageTable() for _ in range(slots)]
        self._states = self._make_states()
        self._kept: set[int] = set()  # slots whose last rows can be gone back into
        self._graphs = None
        if model.device.type == "cuda":
            self._graphs = DecodeGraphs(model, self._states, scratch_slot=slots, scratch_page=pages)

    def _make_states(self) -> dict[int, LayerState]:
        spec, span = self.model.spec, self.model.span
        kv: dict[int, LayerState] = {
            layer: KvState(tensor) for layer, tensor in zip(spec.attention_layers(span), self.pool.kv, strict=True)
        }
        for layer in spec.delta_layers(span):
            assert spec.delta is not None, f"layer {layer} is a DeltaNet layer of a model without DeltaNet sizes"
            kv[layer] = DeltaState.zeros(spec.delta, self.slots, self.model.device)
        return kv

    @property
    def span(self) -> Span:
        return self.model.span

    @property
    def device(self) -> str:
        return str(self.model.device)

    def pages(self) -> PageCount:
        return PageCount(self.pool.free, self.pool.total - self.pool.free, self.pool.total)

    def stop(self) -> None:
        """Nothing outlives the process."""

    # Running

    @torch.inference_mode()
    def forward(self, batch: Batch, hidden: torch.Tensor | None, ahead: Ahead | None = None) -> StageOutput:
        self._prepare(batch)
        if self._graphs is not None and batch.rows == len(batch.segments) and not batch.rewindable:
            tables = [self._tables[segment.slot].pages for segment in batch.segments]
            x = self._graphs.run(batch, tables, hidden, ahead)
            self._advance(batch)
            return StageOutput(None, x) if self.model.is_last else StageOutput(x, None)
        rows = self._lay_out(batch)
        x = self.model.enter(_token_rows(batch, ahead), hidden)
        x = self.model.run(x, rows, self._states)
        self._advance(batch)
        if not self.model.is_last:
            return StageOutput(hidden=x, logits=None)
        wanted = _wanted_rows(batch)
        logits = self.model.leave(x[wanted] if wanted is not None else x) if batch.logit_rows else None
        return StageOutput(hidden=None, logits=logits)

    def _prepare(self, batch: Batch) -> None:
        """Pages for every row; rows kept by the slots' last forward are of no use any more."""
        for segment in batch.segments:
            table = self._tables[segment.slot]
            assert table.position == segment.position, (
                f"slot {segment.slot} stands at {table.position}, the segment begins at {segment.position}"
            )
            if self.pool.kv:
                self.pool.extend(table, segment.end)
            if segment.slot in self._kept:
                self._forget_rows(segment.slot)
        if batch.rewindable:
            self._kept.update(segment.slot for segment in batch.segments)

    def _advance(self, batch: Batch) -> None:
        for segment in batch.segments:
            self._tables[segment.slot].position = segment.end

    def _forget_rows(self, slot: int) -> None:
        self._kept.discard(slot)
        for state in self._states.values():
            if isinstance(state, DeltaState):
                state.kept.pop(slot, None)

    def _lay_out(self, batch: Batch) -> Ragged:
        """The batch as tensors on the device."""
        starts, slots, positions = [0], list[int](), list[int]()
        row_positions, row_segments = list[int](), list[int]()
        for i, segment in enumerate(batch.segments):
            starts.append(starts[-1] + len(segment))
            slots.append(segment.slot)
            positions.append(segment.position)
            row_positions.extend(range(segment.position, segment.end))
            row_segments.extend([i] * len(segment))
        tables = [self._tables[segment.slot].pages for segment in batch.segments]
        longest = max(1, max(map(len, tables)))
        padded = [pages + [self.pool.scratch_page] * (longest - len(pages)) for pages in tables]
        device = self.model.device

        def int32(values: Sequence[object]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)

        return Ragged(
            starts=int32(starts),
            slots=int32(slots),
            positions=int32(positions),
            row_positions=int32(row_positions),
            row_segments=int32(row_segments),
            tables=int32(padded),
            lengths=tuple(map(len, batch.segments)),
            befores=tuple(positions),
            slot_list=tuple(slots),
            rewindable=batch.rewindable,
        )

    # State

    def open(self, slot: int) -> None:
        self.close(slot)

    def close(self, slot: int) -> None:
        self.pool.clear(self._tables[slot])
        for state in self._states.values():
            if isinstance(state, DeltaState):
                state.reset(slot)
        self._kept.discard(slot)

    def capture(self, slot: int) -> list[Part]:
        table = self._tables[slot]
        sealed, rest = divmod(table.position, PAGE)
        pages = [self.pool.export(page) for page in table.pages[:sealed]] if self.pool.kv else []
        parts: list[Part] = []
        kv_index = 0
        for layer in self.span.layers:
            state = self._states[layer]
            if isinstance(state, DeltaState):
                parts.append(DeltaPart(layer, _host_copy(state.states[slot]), _host_copy(state.windows[slot])))
                continue
            tail = state.kv[table.pages[sealed], :, :rest] if rest else state.kv[0, :, :0]
            parts.append(KvPart(layer, tuple(page[kv_index] for page in pages), _host_copy(tail)))
            kv_index += 1
        return parts

    def restore(self, slot: int, position: int, parts: Sequence[Part]) -> None:
        """Put the slot at `position`, or leave it empty and say why."""
        own = [part for part in parts if part.layer in self.span]
        self._check_parts(own, position)
        self.close(slot)
        try:
            self._restore_kv(slot, position, [part for part in own if isinstance(part, KvPart)])
        except Exception:
            self.close(slot)
            raise
        for part in own:
            state = self._states[part.layer]
            if isinstance(part, DeltaPart) and isinstance(state, DeltaState):
                state.states[slot].copy_(part.state)
                state.windows[slot].copy_(part.window)
        self._tables[slot].position = position

    def _restore_kv(self, slot: int, position: int, parts: list[KvPart]) -> None:
        if not parts:
            return
        table = self._tables[slot]
        by_page: list[tuple[Page, ...]] = list(zip(*(part.pages for part in parts), strict=True))
        for copies in by_page:
            table.pages.append(self.pool.adopt(copies))
        self.pool.extend(table, position)
        rest = position % PAGE
        for layer, part in zip(self.pool.kv, parts, strict=True):
            if rest:
                layer[table.pages[-1], :, :rest].copy_(part.tail)

    def _check_parts(self, parts: Sequence[Part], position: int) -> None:
        layers = [part.layer for part in parts]
        if layers != list(self.span.layers):
            raise SnapshotMismatch(f"the stage holds layers {self.span}, the snapshot brings {layers}")
        for part in parts:
            state = self._states[part.layer]
            if isinstance(part, KvPart):
                have, want = tuple(part.tail.shape[2:]), tuple(state.kv.shape[3:]) if isinstance(state, KvState) else ()
                kinds = (part.tail.dtype, state.kv.dtype if isinstance(state, KvState) else "a DeltaNet state")
                if part.position != position:
                    raise SnapshotMismatch(f"layer {part.layer} holds {part.position} positions, not {position}")
            else:
                have = tuple(part.state.shape)
                want = tuple(state.states.shape[1:]) if isinstance(state, DeltaState) else ()
                kinds = (part.state.dtype, state.states.dtype if isinstance(state, DeltaState) else "a KV state")
            if have != want or kinds[0] != kinds[1]:
                raise SnapshotMismatch(
                    f"layer {part.layer}: the snapshot has {have} {kinds[0]}, the stage {want} {kinds[1]}"
                )

    @torch.inference_mode()
    def rewind(self, slot: int, position: int) -> None:
        """Go back into the slot's last forward, which must have been rewindable."""
        table = self._tables[slot]
        if position == table.position:
            return
        for layer in self.model.spec.delta_layers(self.span):
            state = self._states[layer]
            assert isinstance(state, DeltaState)
            kept = state.kept.get(slot)
            assert kept is not None and kept.position <= position, (
                f"slot {slot} cannot go back to {position}: its last rewindable segment does not reach it"
            )
            count = position - kept.position
            state.states[slot].copy_(replay_rows(kept.state, kept.k, kept.delta, kept.g, count))
            rows = torch.cat([kept.window, kept.inputs[:count].to(kept.window.dtype)])
            state.windows[slot].copy_(rows[count:])
        if self.pool.kv:
            self.pool.truncate(table, position)
        table.position = position

    def check(self) -> None:
        """Nothing leaked; called when idle."""
        self.pool.check(self._tables)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _token_rows(batch: Batch, ahead: Ahead | None) -> list[int] | torch.Tensor:
    """The token of every row; those drawn ahead are put in where they were drawn, without a stop at the host."""
    tokens = [token for segment in batch.segments for token in segment.tokens]
    if ahead is None:
        return tokens
    device = ahead.tokens.device
    rows = torch.tensor(tokens, device=device)
    rows[torch.tensor(ahead.rows, device=device)] = ahead.tokens[torch.tensor(ahead.sources, device=device)]
    return rows


def _wanted_rows(batch: Batch) -> torch.Tensor | None:
    """Rows that need logits, or None for all of them."""
    if all(s.wanted is Wanted.ALL or (s.wanted is Wanted.LAST and len(s) == 1) for s in batch.segments):
        return None
    rows, start = list[int](), 0
    for segment in batch.segments:
        stop = start + len(segment)
        if segment.wanted is Wanted.ALL:
            rows.extend(range(start, stop))
        elif segment.wanted is Wanted.LAST:
            rows.append(stop - 1)
        start = stop
    return torch.tensor(rows)

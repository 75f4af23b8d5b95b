"""A span of layers on a device of this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.errors import SnapshotMismatch
from rekindle.kernels.attention.rows import KV_DTYPES, row_size
from rekindle.kernels.gated_delta import replay_rows
from rekindle.kernels.ragged import Ragged
from rekindle.models.model import ModelSpan
from rekindle.models.state import DeltaState, KvState, LayerState
from rekindle.pool import KvMode, PagePool, PagingCounts, Policy, PoolReader, host_copies
from rekindle.snapshots.types import DeltaPart, KvPart, Page, Part
from rekindle.spec import PAGE, Span
from rekindle.stages.graphs import DecodeGraphs, round_up
from rekindle.stages.types import Ahead, PageCount, StageOutput


class LocalStage:
    """Runs its layers, and holds their state: pages for attention layers, one place per slot for DeltaNet layers."""

    def __init__(
        self,
        model: ModelSpan,
        slots: int,
        pages: int,
        kv_type: str,
        host_pages: int = 0,
        kv_mode: KvMode = "exact",
        policy: Policy = "qk",
    ) -> None:
        self.model = model
        self.slots = slots
        spec = model.spec
        self.pool = PagePool(
            pages,
            len(spec.attention_layers(model.span)),
            spec.attention.kv_heads,
            row_size(kv_type, spec.attention.head_dim),
            KV_DTYPES[kv_type],
            model.device,
            host_pages,
        )
        self._reader = PoolReader(self.pool, kv_mode, policy)
        self._tables = [self.pool.new_table() for _ in range(slots)]
        self._states = self._make_states()
        self._prepared: dict[int, tuple[int, tuple[Part, ...]]] = {}  # by slot: position and parts to be restored
        self._kept: set[int] = set()  # slots whose last rows can be gone back into
        self._graphs = None
        if model.device.type == "cuda" and kv_type != "q8":  # no kernel reads packed rows in a graph yet
            self._graphs = DecodeGraphs(model, self._states, scratch_slot=slots, scratch_page=pages)

    def _make_states(self) -> dict[int, LayerState]:
        spec, span = self.model.spec, self.model.span
        kv: dict[int, LayerState] = {
            layer: KvState(self._reader, index) for index, layer in enumerate(spec.attention_layers(span))
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

    @property
    def kv_mode(self) -> KvMode:
        return self._reader.mode

    def pages(self) -> PageCount:
        """Of the pool and the host memory behind it: whatever is free here can be had, if by sending pages away."""
        free = self.pool.free
        return PageCount(free, self.pool.total - free, self.pool.total)

    def paging(self) -> PagingCounts:
        return self.pool.counts

    def stop(self) -> None:
        """Nothing outlives the process."""

    # Running

    def _on_device(self) -> AbstractContextManager[object]:
        """Kernels and streams belong to the current device, and every thread begins on the first one."""
        return torch.cuda.device(self.model.device) if self.model.device.type == "cuda" else nullcontext()

    @torch.inference_mode()
    def forward(self, batch: Batch, hidden: torch.Tensor | None, ahead: Ahead | None = None) -> StageOutput:
        with self._on_device():
            return self._run_portions(self._portions(batch), hidden, ahead)

    def _run_portions(self, portions: list[Batch], hidden: torch.Tensor | None, ahead: Ahead | None) -> StageOutput:
        if len(portions) == 1:
            return self._forward(portions[0], hidden, ahead)
        outputs, start = list[StageOutput](), 0
        for portion in portions:
            rows = range(start, start + portion.rows)
            part = None if hidden is None else hidden[rows.start : rows.stop]
            outputs.append(self._forward(portion, part, _ahead_of(ahead, rows)))
            start = rows.stop
        return _join(outputs)

    def _portions(self, batch: Batch) -> list[Batch]:
        """The batch; or its segments in turns, where the pages they write do not fit the device at once."""
        open_pages = sum(table.position % PAGE > 0 for table in self._tables)
        turns, left = [list[Segment]()], self.pool.places - open_pages
        for segment in batch.segments if self.pool.kv else ():
            missing = self._tables[segment.slot].missing(segment.end)
            if missing > left and turns[-1]:
                open_pages += sum((s.end % PAGE > 0) - (s.position % PAGE > 0) for s in turns[-1])
                turns.append([])
                left = self.pool.places - open_pages
            turns[-1].append(segment)
            left -= missing
        return [batch] if len(turns) == 1 else [replace(batch, segments=tuple(turn)) for turn in turns]

    def _forward(self, batch: Batch, hidden: torch.Tensor | None, ahead: Ahead | None) -> StageOutput:
        self._prepare(batch)
        if self._graphs is not None and self._replayable(batch):
            self.model.settle(batch.rows)
            tables = [self._tables[segment.slot].places(self.pool.scratch_page) for segment in batch.segments]
            x = self._graphs.run(batch, tables, hidden, ahead)
            self._advance(batch)
            return StageOutput(None, x) if self.model.is_last else StageOutput(x, None)
        rows = self._lay_out(batch)
        x = self.model.enter(_token_rows(batch, ahead), hidden)
        x = self.model.run(x, rows, self._states)
        self._advance(batch)
        if not self.model.is_last:
            return StageOutput(x, None, self._reader.skips)
        wanted = _wanted_rows(batch)
        logits = self.model.leave(x[wanted] if wanted is not None else x) if batch.logit_rows else None
        return StageOutput(None, logits, self._reader.skips)

    def _replayable(self, batch: Batch) -> bool:
        """A decode step that needs nothing of the host: no rows to keep, no pages or experts that lie there."""
        decodes = batch.rows == len(batch.segments) and not batch.rewindable
        return decodes and self._reader.replayable and self.model.can_record(round_up(batch.rows))

    def _prepare(self, batch: Batch) -> None:
        """Pages for every row; rows kept by the slots' last forward are of no use any more."""
        for segment in batch.segments:
            table = self._tables[segment.slot]
            assert table.position == segment.position, (
                f"slot {segment.slot} stands at {table.position}, the segment begins at {segment.position}"
            )
            if segment.slot in self._kept:
                self._forget_rows(segment.slot)
        if self.pool.kv:
            tables = [self._tables[segment.slot] for segment in batch.segments]
            self._reader.prepare(batch.segments, tables, batch.rewindable)
        if batch.rewindable:
            self._kept.update(segment.slot for segment in batch.segments)

    def _advance(self, batch: Batch) -> None:
        self._reader.advance()
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
        tables = [self._tables[segment.slot].places(self.pool.scratch_page) for segment in batch.segments]
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
        self._prepared.pop(slot, None)
        self.pool.clear(self._tables[slot])
        with self._on_device():
            for state in self._states.values():
                if isinstance(state, DeltaState):
                    state.reset(slot)
        self._kept.discard(slot)

    def capture(self, slot: int) -> list[Part]:
        with self._on_device():
            return self._capture(slot)

    def _capture(self, slot: int) -> list[Part]:
        table = self._tables[slot]
        sealed, rest = divmod(table.position, PAGE)
        pages = self.pool.export(table.pages[:sealed]) if self.pool.kv else []
        copies = iter(host_copies(self._own_tensors(slot, sealed, rest)))
        parts: list[Part] = []
        kv_index = 0
        for layer in self.span.layers:
            if isinstance(self._states[layer], DeltaState):
                parts.append(DeltaPart(layer, next(copies), next(copies)))
                continue
            query = None if table.query is None else host_copies([table.query[kv_index]])[0]
            parts.append(KvPart(layer, tuple(page[kv_index] for page in pages), next(copies), query))
            kv_index += 1
        return parts

    def _own_tensors(self, slot: int, sealed: int, rest: int) -> list[torch.Tensor]:
        """What no other snapshot can share, layer by layer: state and window, or the rows of the open page."""
        tensors = list[torch.Tensor]()
        for layer in self.span.layers:
            state = self._states[layer]
            if isinstance(state, DeltaState):
                tensors += [state.states[slot], state.windows[slot]]
            else:
                place = self._tables[slot].pages[sealed].place if rest else 0
                tensors.append(state.kv[place, :, :rest])
        return tensors

    def restore(self, slot: int, position: int, parts: Sequence[Part]) -> None:
        """Put the slot at `position`, or say why not."""
        self.prepare_restore(slot, position, parts)
        self.commit_restore(slot)

    def prepare_restore(self, slot: int, position: int, parts: Sequence[Part]) -> None:
        own = tuple(part for part in parts if part.layer in self.span)
        self._check_parts(own, position)
        pages = next((part.pages for part in own if isinstance(part, KvPart)), ())
        self.pool.check_room(self._tables[slot], pages, position)
        self._prepared[slot] = position, own

    def abort_restore(self, slot: int) -> None:
        self._prepared.pop(slot, None)

    def commit_restore(self, slot: int) -> None:
        position, own = self._prepared.pop(slot)
        self.close(slot)
        try:
            with self._on_device():
                self._adopt(slot, position, own)
        except Exception:
            self.close(slot)
            raise

    def _adopt(self, slot: int, position: int, own: Sequence[Part]) -> None:
        self._restore_kv(slot, position, [part for part in own if isinstance(part, KvPart)])
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
        self.pool.tick([table])
        by_page: list[tuple[Page, ...]] = list(zip(*(part.pages for part in parts), strict=True))
        for copies in by_page:
            table.pages.append(self.pool.adopt(copies))
        self.pool.extend(table, position)
        rest = position % PAGE
        for layer, part in zip(self.pool.kv, parts, strict=True):
            if rest:
                layer[table.pages[-1].place, :, :rest].copy_(part.tail)
        table.position = position
        queries = [part.query for part in parts if part.query is not None]
        self._reader.take_up(table, torch.stack(queries) if len(queries) == len(parts) else None)

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
                self._check_query(part)
            else:
                have = tuple(part.state.shape)
                want = tuple(state.states.shape[1:]) if isinstance(state, DeltaState) else ()
                kinds = (part.state.dtype, state.states.dtype if isinstance(state, DeltaState) else "a KV state")
            if have != want or kinds[0] != kinds[1]:
                raise SnapshotMismatch(
                    f"layer {part.layer}: the snapshot has {have} {kinds[0]}, the stage {want} {kinds[1]}"
                )

    def _check_query(self, part: KvPart) -> None:
        attention = self.model.spec.attention
        want = (attention.heads, attention.head_dim)
        if part.query is not None and tuple(part.query.shape) != want:
            have = tuple(part.query.shape)
            raise SnapshotMismatch(f"layer {part.layer}: the snapshot's query is {have}, the stage has {want}")

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
        self.pool.check()


def _ahead_of(ahead: Ahead | None, rows: range) -> Ahead | None:
    """What was drawn ahead for these rows of the batch."""
    if ahead is None:
        return None
    pairs = [(row - rows.start, source) for row, source in zip(ahead.rows, ahead.sources, strict=True) if row in rows]
    return Ahead(ahead.tokens, tuple(row for row, _ in pairs), tuple(source for _, source in pairs)) if pairs else None


def _join(outputs: Sequence[StageOutput]) -> StageOutput:
    """The outputs of a batch's portions, as that of the batch."""

    def rows(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present) if present else None

    return StageOutput(
        rows([output.hidden for output in outputs]),
        rows([output.logits for output in outputs]),
        any(output.skipped_pages for output in outputs),
    )


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

"""A span of layers on a device of this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.errors import SnapshotMismatch
from rekindle.kernels.attention.rows import KV_DTYPES, row_size
from rekindle.kernels.matmul.scratch import Scratch, expanding_into
from rekindle.models.model import ModelSpan
from rekindle.models.state import DeltaState, KvState, LayerState
from rekindle.pool import STOCK, KvMode, PagePool, PagingCounts, Policy, PoolReader, Recorder, Seat
from rekindle.snapshots.slabs import Slabs
from rekindle.snapshots.types import DeltaPart, KvPart, Page, Part, wait_for
from rekindle.spec import PAGE, Span
from rekindle.stages.graphs import GraphRecorder, RecordedSteps, rewind_layers
from rekindle.stages.layout import Form, Layout, round_up
from rekindle.stages.scores import join_scores, score_prompts
from rekindle.stages.types import Ahead, PageCount, StageOutput

WORK = ("step:recorded", "step:eager", "experts:ring", "experts:ring and cpu", "experts:stream", "experts:host")
NOWHERE = Seat(np.zeros(0, dtype=np.int32), 0, None, 0)  # the pages of a segment in a span without attention


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
        rewind_rows: int = 0,
        record: Recorder | None = None,
        slabs: int = STOCK,
        widest: int = 0,
    ) -> None:
        """rewind_rows: of the longest block to verify, for which there is room from the start.
        slabs: of pinned memory that wait for captures, on a GPU.
        widest: quantised weights that are values at one time, as the plan counts them; 0 where nobody has counted.
        record: who records the steps that are replayed; on a GPU, unless told, CUDA graphs."""
        self.model = model
        self.slots = slots
        self.scratch = Scratch(widest)
        spec = model.spec
        if record is None and model.device.type == "cuda":
            record = GraphRecorder(model.device)
        self.pool = PagePool(
            pages,
            len(spec.attention_layers(model.span)),
            spec.attention.kv_heads,
            row_size(kv_type, spec.attention.head_dim),
            KV_DTYPES[kv_type],
            model.device,
            host_pages,
            slabs,
            record if model.device.type == "cuda" else None,
        )
        self._reader = PoolReader(self.pool, kv_mode, policy, open_pages=2 if rewind_rows else 1)
        self._tables = [self.pool.new_table() for _ in range(slots)]
        self._states = self._make_states()
        self._prepared: dict[int, tuple[int, tuple[Part, ...]]] = {}  # by slot: position and parts to be restored
        self._kept: dict[int, int] = {}  # by slot: the position where the block began that can be gone back into
        self._kept_rows = 0  # of a block that there is room for
        self._work = Counter(dict.fromkeys(WORK, 0))
        self._ways: dict[int, Counter[str]] = {}
        self._steps = None
        if record is not None:
            self._steps = RecordedSteps(model, self._states, self.slots, self.pool.scratch_page, record)
        if rewind_rows:
            self._make_room(rewind_rows)

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

    @property
    def slabs(self) -> Slabs | None:
        """Of pinned memory, on a GPU."""
        return self.pool.copies.slabs

    def work(self) -> Counter[str]:
        """Asked from any thread: nothing but numbers changes here."""
        moved = self.pool.counts
        counts = Counter(self._work)
        counts["swaps:"] = self.model.swaps
        counts["pages:out"], counts["pages:in"] = moved.page_outs, moved.page_ins
        counts["pages:away"], counts["pages:skipped"] = moved.away_attended, moved.skipped
        if self.slabs is not None:
            counts["slabs:late"], counts["slabs:refused"] = self.slabs.late, self.slabs.refused
        return counts

    def settle(self) -> None:
        with self._on_device():
            self.model.settle(0)

    def _count(self, how: str, rows: int) -> None:
        self._work[f"step:{how}"] += 1
        if rows not in self._ways:  # a function of the rows alone
            self._ways[rows] = self.model.ways(rows)
        for way, layers in self._ways[rows].items():
            self._work[f"experts:{way}"] += layers

    def stop(self) -> None:
        """End the threads. It holds its state, and can be asked for it, until the process ends."""
        self.pool.stop()

    # Running

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Kernels and streams belong to the current device, and every thread begins on the first one."""
        gpu = self.model.device.type == "cuda"
        with torch.cuda.device(self.model.device) if gpu else nullcontext(), expanding_into(self.scratch):
            yield

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
        seats = self._reader.seats() if self.pool.kv else [NOWHERE] * len(batch.segments)
        form = Form.of(batch, seats)
        recorded = self._recorded(form)
        wanted = _wanted_rows(batch) if self.model.is_last else None
        if self._steps is not None and recorded is not None:
            self.model.settle(batch.rows)
            x = self._steps.run(recorded, batch, seats, hidden, ahead)
            x = x if wanted is None else x[wanted]
            assert not batch.scored_rows, "rows in a recorded step are single, or verified"
            scores = None
            self._count("recorded", recorded.rows)
        else:
            self._count("eager", batch.rows)
            layout = self._lay_out(form, batch, seats, ahead)
            x = self.model.run(self.model.enter(layout.tokens, hidden), layout.ragged, self._states)
            scores = self._score(batch, x) if self.model.is_last else None
            if self.model.is_last and batch.logit_rows:
                x = self.model.leave(x if wanted is None else x[wanted]).float()
            self._record_what_follows(batch, seats)
        self._advance(batch)
        skipping = self._reader.skipping
        if not self.model.is_last:
            return StageOutput(x, None, skipping)
        return StageOutput(None, x if batch.logit_rows else None, skipping, scores)

    def _score(self, batch: Batch, x: torch.Tensor) -> torch.Tensor | None:
        return score_prompts(batch, x, self.model.leave, self.model.spec.vocab)

    def _recorded(self, form: Form) -> Form | None:
        """The form of the recorded step that serves this one, where the device reaches all that it reads."""
        padded = form.padded()
        longest = max(form.lengths)
        can = padded is not None and self._reader.replayable(longest) and self.model.can_record(padded.rows)
        return padded if can else None

    def _record_what_follows(self, batch: Batch, seats: Sequence[Seat]) -> None:
        """The decode steps behind the end of a prompt are recorded while the device is busy with the chunk; the one
        that notes a query, once in a page, is not: the chunk may be over before it is."""
        for segment, seat in zip(batch.segments, seats, strict=True):
            if self._steps is not None and segment.wanted is Wanted.LAST and len(segment) > 1:
                width = max(1, len(seat.places) + (segment.end % PAGE == 0))
                far, sparse = self._reader.far(1), self.kv_mode == "sparse"
                may_come = (
                    sparse and self.pool.away > 0 and self.pool.returns is not None and self.pool.returns.by_layer
                )
                for coming in (True, False) if may_come else (False,):
                    recorded = self._recorded(Form((1,), 1, width, False, False, far, coming))
                    # What a sparse chunk has no room for beside its own pages, the step behind it has.
                    if recorded is not None and not (far and sparse):
                        self._steps.make_ready(recorded)

    def _prepare(self, batch: Batch) -> None:
        """Pages for every row; rows kept by the slots' last forward are of no use any more."""
        for segment in batch.segments:
            table = self._tables[segment.slot]
            assert table.position == segment.position, (
                f"slot {segment.slot} stands at {table.position}, the segment begins at {segment.position}"
            )
            self._kept.pop(segment.slot, None)
        if self.pool.kv:
            tables = [self._tables[segment.slot] for segment in batch.segments]
            self._reader.prepare(batch.segments, tables, batch.rewindable)
        if batch.rewindable:
            self._make_room(max(map(len, batch.segments)))
            self._kept.update((segment.slot, segment.position) for segment in batch.segments)

    def _make_room(self, rows: int) -> None:
        """Blocks of so many rows can be kept in every slot; the plan counts these bytes."""
        if rows <= self._kept_rows:
            return
        self._kept_rows = round_up(rows)
        for state in self._states.values():
            if isinstance(state, DeltaState):
                assert self.model.spec.delta is not None, "a DeltaNet state of a model without DeltaNet sizes"
                state.make_room(self.model.spec.delta, self._kept_rows)
        if self._steps is not None:
            self._steps.forget_blocks()

    def _advance(self, batch: Batch) -> None:
        self._reader.advance()
        for segment in batch.segments:
            self._tables[segment.slot].position = segment.end

    def _lay_out(self, form: Form, batch: Batch, seats: Sequence[Seat], ahead: Ahead | None) -> Layout:
        layout = Layout(form, self.model.device, self.slots, self.pool.scratch_page)
        layout.fill(batch, seats, torch.zeros(form.size, dtype=torch.int32))
        if ahead is not None:
            layout.take_drawn(ahead)
        return layout

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
        self._kept.pop(slot, None)

    def capture(self, slot: int) -> list[Part]:
        with self._on_device():
            return self._capture(slot)

    def _capture(self, slot: int) -> list[Part]:
        table = self._tables[slot]
        sealed, rest = divmod(table.position, PAGE)
        pages = self.pool.export(table.pages[:sealed]) if self.pool.kv else []
        own = iter(self.pool.copies.take_live(self._own_tensors(slot, sealed, rest)))
        ready = self.pool.ready(table.pages[:sealed])
        by_layer = iter(zip(*pages, strict=True))
        parts: list[Part] = []
        for layer in self.span.layers:
            if isinstance(self._states[layer], DeltaState):
                parts.append(DeltaPart(layer, next(own), next(own), ready))
                continue
            tail, query = next(own), None if table.queries.now is None else next(own)
            parts.append(KvPart(layer, next(by_layer, ()), tail, query, ready))
        return parts

    def _own_tensors(self, slot: int, sealed: int, rest: int) -> list[torch.Tensor]:
        """What no other snapshot can share, layer by layer: state and window, or the open page's rows and
        the queries that a sparse run chooses by."""
        tensors, table = list[torch.Tensor](), self._tables[slot]
        queries = table.queries.stacked()
        for layer in self.span.layers:
            state = self._states[layer]
            if isinstance(state, DeltaState):
                tensors += [state.states[slot], state.windows[slot]]
                continue
            place = table.pages[sealed].place if rest else 0
            tensors.append(state.kv[place, :, :rest])
            if queries is not None:
                tensors.append(queries[state.index])
        return tensors

    def restore(self, slot: int, position: int, parts: Sequence[Part]) -> None:
        """Put the slot at `position`, or say why not."""
        self.prepare_restore(slot, position, parts)
        self.commit_restore(slot)

    def prepare_restore(self, slot: int, position: int, parts: Sequence[Part]) -> None:
        own = tuple(part for part in parts if part.layer in self.span)
        wait_for(own)
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
        pairs = list[tuple[torch.Tensor, torch.Tensor]]()
        for part in own:
            state = self._states[part.layer]
            if isinstance(part, DeltaPart) and isinstance(state, DeltaState):
                pairs += [(state.states[slot], part.state), (state.windows[slot], part.window)]
        self.pool.copies.send(pairs)
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
        if rest := position % PAGE:
            place = table.pages[-1].place
            rows = [layer[place, :, :rest] for layer in self.pool.kv]
            self.pool.copies.send(list(zip(rows, (part.tail for part in parts), strict=True)))
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
        if len({part.query.ndim for part in parts if isinstance(part, KvPart) and part.query is not None}) > 1:
            raise SnapshotMismatch("some layers of the snapshot bring one query, others two")

    def _check_query(self, part: KvPart) -> None:
        attention = self.model.spec.attention
        want = (attention.heads, attention.head_dim)
        if part.query is not None and tuple(part.query.shape) not in (want, (2, *want)):
            have = tuple(part.query.shape)
            raise SnapshotMismatch(
                f"layer {part.layer}: the snapshot's query is {have}, the stage has {want}, once or twice"
            )

    @torch.inference_mode()
    def rewind(self, slot: int, position: int) -> None:
        """Go back into the slot's last forward, which must have been rewindable."""
        table = self._tables[slot]
        if position == table.position:
            return
        began = self._kept.get(slot)
        assert began is not None, f"slot {slot} cannot go back to {position}: its last forward was not rewindable"
        assert began <= position < table.position, (
            f"slot {slot} cannot go to {position}: its last rewindable segment reaches from {began} to {table.position}"
        )
        with self._on_device():
            if self._steps is not None and self.model.spec.delta_layers(self.span):
                self._steps.rewind(slot, position - began)
            else:
                where = torch.tensor([slot, position - began], dtype=torch.int32, device=self.model.device)
                rewind_layers(self._states, where)
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
        frozenset[int]().union(*(output.skipping for output in outputs)),
        join_scores([output.scores for output in outputs if output.scores is not None]),
    )


def _wanted_rows(batch: Batch) -> torch.Tensor | None:
    """Rows that need logits, or None for all of them."""
    if batch.logit_rows == batch.rows:
        return None
    rows, start = list[int](), 0
    for segment in batch.segments:
        stop = start + len(segment)
        if segment.wanted is Wanted.ALL:
            rows.extend(range(start, stop))
        elif segment.logit_rows:
            rows.append(stop - 1)
        start = stop
    return torch.tensor(rows, dtype=torch.long)

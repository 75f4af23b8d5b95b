"""A span of layers on a device of this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from rekindle.batch import Batch
from rekindle.buffers import STOCK, captures_in_flight
from rekindle.kernels import native
from rekindle.kernels.device_memory import DeviceMemory
from rekindle.kernels.first_launches import counting_first_launches
from rekindle.kernels.matmul.scratch import Scratch, expanding_into
from rekindle.layers import ModelSpan, PagedKv, SlotMemory
from rekindle.layers.base import page_shapes
from rekindle.pool import KvMode, PagingCounts, Policy, Recorder, SegmentPages
from rekindle.snapshots.slabs import Slabs
from rekindle.snapshots.types import Part
from rekindle.spec import Span
from rekindle.stages.cpu_steps import CpuSteps
from rekindle.stages.graphs import GraphRecorder, Replay, Taps
from rekindle.stages.idle_slots import IdleSlots
from rekindle.stages.layout import GraphShape, Layout
from rekindle.stages.paused import PausedForward
from rekindle.stages.portions import portions_of, run_portions
from rekindle.stages.recording import Recording
from rekindle.stages.scores import score_prompts
from rekindle.stages.state import SpanState
from rekindle.stages.trade import Trade
from rekindle.stages.types import PageCount, PendingTokens, StageOutput

Outputs = Sequence[torch.Tensor] | torch.Tensor | None  # [rows, hidden] of every tap, apart or in one tensor
WORK = (
    "step:recorded", "step:eager", "kernels:compiled", "kernels:loaded",
    "experts:cache", "experts:cache and cpu", "experts:stream", "experts:host",
)  # fmt: skip


class LocalStage:
    """Runs its layers, and holds their state: pages, which the layers share, and what every layer keeps per slot."""

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
        table_width: int = 0,
        attended: int | None = None,
        memory: DeviceMemory | None = None,
        taps: Sequence[int] = (),
    ) -> None:
        """memory: that the model's expert slots are cut from, or the state of slots; parts of it are lent to the pool.
        rewind_rows: of the longest block to verify, for which there is room from the start.
        slabs: of pinned memory that wait for captures, on a GPU.
        widest: quantised weights that are values at one time, as the plan counts them; 0 where no plan was made.
        table_width: pages of a sequence at the context limit; where it is known, short chunks are recorded too.
        attended: pages that a row attends at most in sparse mode, the same in all stages; None: what the pool holds.
        record: records the steps that are replayed; on a GPU, if None, CUDA graphs.
        taps: layers, of any stage, that a drafter reads: steps are recorded with their outputs."""
        self.model = model
        self.slots = slots
        self.scratch = Scratch(widest)
        on_gpu = model.device.type == "cuda"
        if record is None and on_gpu:
            record = GraphRecorder(model.device)
        self._paged = PagedKv(
            page_shapes(model.spec, model.span, kv_type),
            model.device,
            slots,
            pages,
            host_pages=host_pages,
            slabs=slabs,
            mode=kv_mode,
            policy=policy,
            attended=attended,
            record=record if on_gpu else None,
            memory=memory,
        )
        self.pool, self._tables = self._paged.pool, self._paged.tables
        self._state = SpanState(model.spec, model.span, SlotMemory(slots, model.device, memory), self._paged)
        units = [] if memory is None else model.units(memory)
        self._trade = Trade(self.pool, units) if units else None
        self._idle: IdleSlots | None = None
        if memory is not None and memory.states is not None:
            self._idle = IdleSlots(self.pool, [memory.places_in_slot(slot) for slot in range(slots)])
        self._unsettled: dict[int, int] = {}  # by slot: where its last segment began, if that is not settled yet
        self._work = Counter(dict.fromkeys(WORK, 0))
        self._ways: dict[int, Counter[str]] = {}
        self._taps: dict[Taps, Taps] = {}  # of a batch: those of this stage's layers
        self._paused: PausedForward | None = None  # a chunk of which some sections are still to be run
        self._recording: Recording | None = None
        self._cpu_steps: CpuSteps | None = None
        if record is not None:
            own = self._own_taps(tuple(taps))
            self._recording = Recording(model, self._state, slots, table_width, record, own)
        elif not on_gpu and model.dtype is torch.float32 and native.library() is not None:
            self._cpu_steps = CpuSteps(model, self._state, slots)
        self._rewind_rows = rewind_rows
        if rewind_rows:
            self._make_room(rewind_rows)

    @property
    def span(self) -> Span:
        return self.model.span

    @property
    def device(self) -> str:
        return str(self.model.device)

    @property
    def kv_mode(self) -> KvMode:
        return self._paged.mode

    def pages(self) -> PageCount:
        """Of the pool and its host memory: every free one can be had, if by sending others away."""
        free, slot = self.pool.free, 0 if self._idle is None else self._idle.most
        return PageCount(free, self.pool.total - free, self.pool.total, self.pool.free_places, slot)

    def paging(self) -> PagingCounts:
        return self._paged.counts

    @property
    def slabs(self) -> Slabs | None:
        """Of pinned memory, on a GPU."""
        return self.pool.copies.slabs

    def work(self) -> Counter[str]:
        """Asked from any thread: nothing but numbers changes here."""
        moved = self._paged.counts
        counts = Counter(self._work)
        counts["swaps:"] = self.model.swaps
        counts["pages:out"], counts["pages:in"] = moved.page_outs, moved.page_ins
        counts["pages:away"], counts["pages:skipped"] = moved.away_attended, moved.skipped
        if self._trade is not None:
            counts.update({f"pages:{how}": count for how, count in self._trade.moves.items()})
        if self.slabs is not None:
            counts["slabs:late"], counts["slabs:refused"] = self.slabs.late, self.slabs.refused
        return counts

    def poll_experts(self) -> None:
        with self._on_device():
            self.model.poll_experts(0)

    def stop(self) -> None:
        """End the threads. It holds its state, and can be asked for it, until the process ends."""
        self._paged.stop()

    def check(self) -> None:
        """Nothing leaked; called when idle."""
        self._paged.leak_check()

    # Running

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Kernels and streams belong to the current device, and every thread begins on the first one."""
        gpu = self.model.device.type == "cuda"
        with (
            torch.cuda.device(self.model.device) if gpu else nullcontext(),
            expanding_into(self.scratch),
            counting_first_launches(self._work) if gpu else nullcontext(),
        ):
            yield

    @torch.inference_mode()
    def forward(self, batch: Batch, hidden: torch.Tensor | None, pending: PendingTokens | None = None) -> StageOutput:
        with self._on_device():
            self._before(batch)
            return run_portions(portions_of(batch, self._paged), hidden, pending, self._forward)

    @torch.inference_mode()
    def begin(self, batch: Batch, pending: PendingTokens | None = None) -> PausedForward:
        """Of the first stage: a chunk that may pause between its layers, for forwards of other slots, and of which no
        layer has run yet; or, where it cannot pause, one that has run."""
        with self._on_device():
            self._before(batch)
            portions, recording = portions_of(batch, self._paged), self._recording
            if recording is None or self.kv_mode == "sparse" or len(portions) > 1:
                return PausedForward(batch, None, lambda: run_portions(portions, None, pending, self._forward))
            pages = self._prepare(batch)
            shape = recording.serving(GraphShape.of(batch, pages))
            if shape is None or not shape.is_chunk or self.pool.away:
                return PausedForward(batch, None, lambda: self._run(batch, pages, None, pending))
            self._count_recorded(batch, shape)
            replay = recording.steps.begin(shape, batch, pages, None, pending, self._own_taps(batch.taps))
            self._advance(batch)
            self._paused = PausedForward(batch, replay, lambda: self._end(batch, pages, replay), self._running)
            return self._paused

    def can_pause(self, rows: int) -> bool:
        """Whether a chunk of so many rows would have several sections, as things are now."""
        recording, near = self._recording, self.kv_mode == "exact" and not self.pool.away
        shape = None if recording is None or not near else recording.chunk_of(rows)
        return shape is not None and len(self.model.sections(shape.rows)) > 1

    def _end(self, batch: Batch, pages: Sequence[SegmentPages], replay: Replay) -> StageOutput:
        """All sections of a chunk have run."""
        self._paused = None
        return self._finish(batch, pages, *replay.output(), headless=True)

    @contextmanager
    def _running(self) -> Iterator[None]:
        with torch.inference_mode(), self._on_device():
            yield

    def _before(self, batch: Batch) -> None:
        """Memory changes hands. While a chunk pauses it does not, so that its pages stay where they are, unless some
        have to leave for those of this batch; and there is room for one chunk only."""
        if self._trade is None and self._paused is None:
            return
        tables = [self._tables[segment.slot] for segment in batch.segments]
        more = sum(table.missing(segment.end) for table, segment in zip(tables, batch.segments, strict=True))
        is_chunk = batch.rows > len(batch.segments) and not batch.rewindable
        self._end_pause(unless_free=None if is_chunk else more)
        if self._trade is not None and self._paused is None:
            self._trade.before(tables, more, batch.rows)

    def _end_pause(self, unless_free: int | None = None) -> None:
        """The rest of a chunk that pauses runs now; unless so many places are free, where that is enough."""
        if self._paused is not None and (unless_free is None or unless_free > self.pool.free_places):
            self._paused.go_on(self._paused.left)
            self._paused = None

    def _forward(self, batch: Batch, hidden: torch.Tensor | None, pending: PendingTokens | None) -> StageOutput:
        return self._run(batch, self._prepare(batch), hidden, pending)

    def _run(
        self,
        batch: Batch,
        pages: Sequence[SegmentPages],
        hidden: torch.Tensor | None,
        pending: PendingTokens | None,
    ) -> StageOutput:
        """A batch for which pages are prepared."""
        x, outputs, headless = self._run_layers(batch, pages, hidden, pending)
        output = self._finish(batch, pages, x, outputs, headless)
        self._advance(batch)
        return output

    def _finish(
        self, batch: Batch, pages: Sequence[SegmentPages], x: torch.Tensor, outputs: Outputs, headless: bool
    ) -> StageOutput:
        """What a batch gives whose layers have run. headless: the head is still to come."""
        scores = self._score(batch, x) if self.model.is_last and headless else None
        if self.model.is_last and batch.logit_rows:
            x = _rows_with_logits(x, batch)
            x = self.model.leave(x).float() if headless else x
        if headless and self._recording is not None:
            self._recording.record_following(batch, pages)
        skipping = self._paged.skipping
        features = _features(outputs, batch)
        if not self.model.is_last:
            return StageOutput(x, None, skipping, features=features)
        return StageOutput(None, self._drawable(x) if batch.logit_rows else None, skipping, scores, features)

    def _run_layers(
        self,
        batch: Batch,
        pages: Sequence[SegmentPages],
        hidden: torch.Tensor | None,
        pending: PendingTokens | None,
    ) -> tuple[torch.Tensor, Outputs, bool]:
        """What the layers make of the batch, the outputs of those that are tapped, and whether the head is still to
        come."""
        shape = GraphShape.of(batch, pages)
        taps = self._own_taps(batch.taps)
        if self._cpu_steps is not None:
            served = self._cpu_steps.serving(shape, batch, taps)
            if served is not None:
                self._count("recorded", batch.rows)
                x, *tapped = self._cpu_steps.run(served, batch, pages, hidden, pending, taps)
                return x, tapped, False
        recorded = None if self._recording is None else self._recording.serving(shape)
        if self._recording is not None and recorded is not None:
            self._count_recorded(batch, recorded)
            x, joined = self._recording.steps.begin(recorded, batch, pages, hidden, pending, taps).output()
            return x, joined, recorded.is_chunk
        self._count("eager", batch.rows)
        layout = self._lay_out(shape, batch, pages, pending)
        entered = self.model.enter(layout.tokens, hidden)
        x, outputs = self.model.run(entered, layout.ragged, self._state.layers, taps=taps)
        return x, outputs, True

    def _count_recorded(self, batch: Batch, shape: GraphShape) -> None:
        self.model.poll_experts(batch.rows)
        self._count("recorded", shape.rows)

    def _own_taps(self, taps: Taps) -> Taps:
        """Those of this stage's layers; a drafter names the same ones in every batch."""
        if taps not in self._taps:
            self._taps[taps] = tuple(layer for layer in taps if layer in self.span)
        return self._taps[taps]

    def _prepare(self, batch: Batch) -> list[SegmentPages]:
        """Pages for every row; what is pending of the slots' earlier blocks stays."""
        for segment in batch.segments:
            self._check_open(segment.slot)
            position = self._tables[segment.slot].position
            assert position == segment.position, (
                f"slot {segment.slot} stands at {position}, the segment begins at {segment.position}"
            )
            self._settle(segment.slot)
        pages = self._paged.prepare(batch)
        if batch.rewindable:
            self._make_room(max(map(len, batch.segments)))
        return pages

    def _advance(self, batch: Batch) -> None:
        self._paged.advance(batch)
        if batch.rewindable:
            self._unsettled.update((segment.slot, segment.position) for segment in batch.segments)

    def _make_room(self, rows: int) -> None:
        in_float32 = self.model.device.type == "cpu"  # whatever the type of activations
        if not self._state.make_room(rows, torch.float32 if in_float32 else self.model.dtype):
            return
        if self._recording is not None:
            self._recording.steps.forget_blocks()
        if self._cpu_steps is not None:
            self._cpu_steps.forget_blocks()

    def _lay_out(
        self, shape: GraphShape, batch: Batch, pages: Sequence[SegmentPages], pending: PendingTokens | None
    ) -> Layout:
        layout = Layout(shape, self.model.device, self.slots, self.pool.scratch_page)
        layout.fill(batch, pages, torch.zeros(shape.size, dtype=torch.int32))
        if pending is not None:
            layout.take_pending(pending)
        return layout

    def _drawable(self, logits: torch.Tensor) -> torch.Tensor:
        """Without the rows of the head that stand for no token: a view, whose rows lie as far apart as before."""
        return logits[:, : self.model.spec.drawable]

    def _score(self, batch: Batch, x: torch.Tensor) -> torch.Tensor | None:
        def leave(rows: torch.Tensor) -> torch.Tensor:
            return self._drawable(self.model.leave(rows))

        return score_prompts(batch, x, leave, self.model.spec.vocab)

    def _count(self, how: str, rows: int) -> None:
        self._work[f"step:{how}"] += 1
        if rows not in self._ways:  # a function of the rows alone
            self._ways[rows] = self.model.ways(rows)
        for way, layers in self._ways[rows].items():
            self._work[f"experts:{way}"] += layers

    @torch.inference_mode()
    def record_steps(self, chunk: int) -> int:
        """Record what requests will need, with chunks of up to `chunk` rows; how many steps there are. The stage must
        be idle."""
        if self._recording is None:
            return 0
        self.pool.copies.most_in_flight = captures_in_flight(chunk)
        with self._on_device():
            return self._recording.record_all(chunk, self._rewind_rows, self._state.logs_rows)

    def blank(self, rows: int) -> torch.Tensor | None:
        """Activations of no meaning, as the stage before would send them; None for the first."""
        shape = (rows, self.model.spec.hidden)
        return None if self.model.is_first else torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)

    # State

    def open(self, slot: int) -> None:
        """A stage whose slots are lent raises PoolFull where the slot's memory is held by pages that cannot leave."""
        self._unsettled.pop(slot, None)
        with self._on_device():
            self._make_slot_room(slot)
            self._state.clear(slot)

    def close(self, slot: int) -> None:
        self._unsettled.pop(slot, None)
        if self._paused is not None and slot in self._paused.slots:
            if len(self._paused.slots) > 1:  # the others' chunks are in it, too
                self._end_pause()
            else:
                self._paused.drop()
            self._paused = None
        if self._idle is not None and slot in self._idle:  # others' pages lie there
            self._state.abort(slot)
            return
        with self._on_device():
            self._state.clear(slot)
        if self._idle is not None:
            self._idle.lend(slot)

    def _make_slot_room(self, slot: int, more: int = 0) -> None:
        """Before a sequence comes, which brings `more` pages: memory for them, and the slot's own."""
        leaving = 0 if self._idle is None else self._idle.places_of(slot)
        moves = self._idle is not None and self._idle.holds_pages(slot)
        self._end_pause(unless_free=None if moves else more + leaving + 1)  # one that is open, behind them
        if self._trade is not None and self._paused is None:
            self._trade.before([self._tables[slot]], more + leaving, rows=1)
        if self._idle is not None:
            self._idle.take_back(slot)

    def _check_open(self, slot: int) -> None:
        assert self._idle is None or slot not in self._idle, f"slot {slot} is not open: its memory is lent"

    def capture(self, slot: int) -> list[Part]:
        return self.begin_capture(slot)()

    def begin_capture(self, slot: int) -> Callable[[], list[Part]]:
        self._check_open(slot)
        with self._on_device():
            if self._paused is not None and slot in self._paused.slots:
                self._end_pause()
            self._settle(slot)
            finish = self._state.begin_capture(slot)

        def finish_on_device() -> list[Part]:
            with self._on_device():
                return finish()

        return finish_on_device

    def has_room_for_capture(self, others: int = 0) -> bool:
        return self.pool.copies.has_room(others)

    def restore(self, slot: int, position: int, parts: Sequence[Part]) -> None:
        """Put the slot at `position`, or say why not."""
        self.prepare_restore(slot, position, parts)
        self.commit_restore(slot)

    def prepare_restore(self, slot: int, position: int, parts: Sequence[Part]) -> None:
        self._state.prepare(slot, position, parts)

    def abort_restore(self, slot: int) -> None:
        self._state.abort(slot)

    def commit_restore(self, slot: int) -> None:
        self._unsettled.pop(slot, None)
        with self._on_device():
            self._make_slot_room(slot, self._state.missing(slot))
            self._state.commit(slot)

    @torch.inference_mode()
    def rewind(self, slot: int, position: int) -> None:
        """Settle the slot's last forward: what lies behind `position` goes. It must have been rewindable, and none may
        have asked for the slot's state since: whoever does lets all rows stay."""
        now, began = self._tables[slot].position, self._unsettled.get(slot)
        if began is None and position == now:
            return
        assert began is not None, (
            f"slot {slot} cannot go back to {position}: its last forward was not rewindable, or is settled at {now}"
        )
        assert began <= position <= now, (
            f"slot {slot} cannot go to {position}: its last rewindable segment reaches from {began} to {now}"
        )
        with self._on_device():
            self._settle(slot, position)
            if position < now:
                self._end_pause(unless_free=1)  # a page that others share is copied
                self._paged.truncate(slot, position)

    @torch.inference_mode()
    def _settle(self, slot: int, position: int | None = None) -> None:
        """Of the slot's pending rows those before `position` stay, all if it is None."""
        if (began := self._unsettled.pop(slot, None)) is None or not self._state.logs_rows:
            return
        rows = (self._tables[slot].position if position is None else position) - began
        if self._recording is not None:
            self._recording.steps.rewind(slot, rows)
        else:
            self._state.rewind(torch.tensor([slot, rows], dtype=torch.int32, device=self.model.device))


def _rows_with_logits(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The host waits for nothing: the device may still have all of the batch to run."""
    if batch.logit_rows == batch.rows:
        return x
    wanted = _last_rows(x, batch, [segment.logit_rows for segment in batch.segments])
    return wanted[0] if len(wanted) == 1 else torch.cat(wanted)


def _features(outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, ...]:
    """The rows of every tap that a drafter reads, in memory of their own: the next recorded step writes over it. Where
    all taps lie in one tensor, one launch."""
    if outputs is None or not len(outputs):
        return ()
    counts = [segment.features for segment in batch.segments]
    if not isinstance(outputs, torch.Tensor):
        return tuple(torch.cat(_last_rows(x, batch, counts) or [x[:0]]) for x in outputs)
    if batch.feature_rows == batch.rows:
        return outputs.clone(memory_format=torch.contiguous_format).unbind()
    return torch.cat(_last_rows(outputs, batch, counts) or [outputs[:, :0]], dim=1).unbind()


def _last_rows(x: torch.Tensor, batch: Batch, counts: Sequence[int]) -> list[torch.Tensor]:
    """So many of each segment, of segments that have some; x: […, rows, values]."""
    ends = [row + len(segment) for row, segment in batch.row_starts()]
    whole = (slice(None),) * (x.dim() - 2)
    return [x[(*whole, slice(end - count, end))] for end, count in zip(ends, counts, strict=True) if count]

"""Steps that are recorded once and replayed: on a GPU one launch for all layers, without gaps.

A step is recorded per shape (rows and width of the page tables, both rounded up), before the first request or when it
is first needed. Its inputs are static buffers that a layout fills; what a step computes is the code that runs a batch
unrecorded. The recorder is a parameter: CUDA graphs on a GPU, or anything that runs the step again.

A chunk is recorded in sections of a few layers each. Between two of them steps of other slots may be replayed, so a
long chunk keeps nobody's answer waiting for longer than a section takes; all together have the bits of the whole.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch

from rekindle.batch import Batch
from rekindle.buffers import RECORDED_ROWS
from rekindle.kernels.host_buffers import HostBuffers
from rekindle.layers import HybridLayer, ModelSpan
from rekindle.pool import Recorder, SegmentPages
from rekindle.stages.layout import LONGEST_BLOCK, GraphShape, Layout, round_up
from rekindle.stages.state import SpanState
from rekindle.stages.types import PendingTokens

log = logging.getLogger("rekindle.stages")

Taps = tuple[int, ...]  # layers whose outputs a drafter reads, ascending
MOST_BLOCKS = 48  # recorded steps with blocks of several sequences: each holds some megabytes

_recording = threading.Lock()  # one stage at a time: a device that is waited for must not be recording elsewhere


class GraphRecorder:
    """Records into CUDA graphs, which share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream(device)  # torch's own for graphs lies on whichever device recorded first
        mark = torch.zeros(1, device=device)

        def nothing() -> None:
            mark.zero_()

        # Never dropped: with the last of its graphs torch would give their memory up, and refuse it to the next one.
        self._first = self(nothing)

    def __call__(self, step: Callable[[], None], warm: Callable[[], None] | None = None) -> Callable[[], None]:
        """Runs the step first, outside the graph, so that every kernel is compiled and loaded; or `warm`, which has the
        same kernels and takes less time."""
        with _recording:
            return self._capture(step, warm or step)

    def _capture(self, step: Callable[[], None], warm: Callable[[], None]) -> Callable[[], None]:
        """Waits for nothing that the device still does, so that a chunk may be under way meanwhile. (torch's own
        `torch.cuda.graph` would wait for it, and give back all memory that is kept for later, pinned memory too.)"""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        try:
            with torch.cuda.stream(self._side):
                warm()
                try:
                    return self._record_on_side(step)
                except RuntimeError as error:
                    # While it records, torch does not give back what it keeps for later; and no kernel can be loaded.
                    log.info("a step is recorded once more: %s", error)
                    torch.cuda.synchronize(self._device)
                    torch.cuda.empty_cache()
                    step()
                    return self._record_on_side(step)
        finally:
            current.wait_stream(self._side)

    def _record_on_side(self, step: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads go on allocating while this one records: in that mode only this one must not.
        graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
        try:
            step()
        finally:
            graph.capture_end()
        return graph.replay


class _Step:
    """One shape of a step: static inputs, and the output of the last run."""

    def __init__(
        self,
        model: ModelSpan,
        state: SpanState,
        layout: Layout,
        logits: torch.Tensor | None,
        taps: Taps,
        features: torch.Tensor,
        sections: Sequence[Sequence[HybridLayer]],
        between: torch.Tensor | None,
    ) -> None:
        """logits: float32 [at least the shape's rows, vocab], where the head is part of the step. features: [taps, at
        least the shape's rows, hidden]. between: [at least the shape's rows, hidden], what one section leaves to the
        next; None where there is only one."""
        self._model = model
        self._taps = taps
        self._state = state
        self._logits = logits
        self._between = between
        self.sections = sections
        self.features = features  # what leaves each tapped layer
        self.layout = layout
        self.host = HostBuffers((layout.shape.size,), model.device)
        self.output: torch.Tensor | None = None  # hidden or logits; recorded, the buffer that every replay fills
        self.hidden_in: torch.Tensor | None = None
        if not model.is_first:
            shape = (layout.shape.rows, model.spec.hidden)
            self.hidden_in = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.replays: list[Callable[[], None]] = []  # of the sections, once they are recorded

    def run(self) -> None:
        for number in range(len(self.sections)):
            self.run_section(number)

    def warm(self, layers: Sequence[HybridLayer]) -> None:
        """Through some layers alone: of every kind one, for all kernels of the step."""
        self._leave(*self._run(self._enter(), layers))

    def run_section(self, number: int) -> None:
        layers = self.sections[number]
        entered = self._between[: self.layout.shape.rows] if number and self._between is not None else self._enter()
        x, tapped = self._run(entered, layers)
        first = sum(tap < layers[0].index for tap in self._taps)
        if number + 1 < len(self.sections):
            assert self._between is not None, "sections leave their output to the next one"
            self._keep(tapped, first, len(x))
            self._between[: len(x)].copy_(x)
        else:
            self._leave(x, tapped, first)

    def _enter(self) -> torch.Tensor:
        return self._model.enter(self.layout.tokens, self.hidden_in)

    def _run(self, x: torch.Tensor, layers: Sequence[HybridLayer]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return self._model.run(x, self.layout.ragged, self._state.layers, layers, self._taps)

    def _keep(self, tapped: Sequence[torch.Tensor], first: int, rows: int) -> None:
        """What left the tapped layers, from number `first` on: one launch for all."""
        if tapped:
            rooms = self.features[first : first + len(tapped)]  # fewer than the taps where `warm` leaves layers out
            torch._foreach_copy_([room[:rows] for room in rooms], list(tapped))

    def _leave(self, x: torch.Tensor, tapped: Sequence[torch.Tensor], first: int = 0) -> None:
        self._keep(tapped, first, len(x))
        if self._logits is not None:
            self._logits[: x.shape[0]].copy_(self._model.leave(x))
        self.output = x if self._logits is None else self._logits


class Replay:
    """A recorded step over one batch, which is replayed section by section."""

    def __init__(self, step: _Step, rows: int, with_features: bool, overwritten: bool) -> None:
        """rows: of the batch. overwritten: whoever asks for the output takes it before the next step runs."""
        self._step = step
        self._rows = rows
        self._with_features = with_features
        self._overwritten = overwritten
        self._done = 0

    @property
    def left(self) -> int:
        """Sections that are still to be replayed."""
        return len(self._step.replays) - self._done

    def go_on(self, sections: int) -> None:
        for replay in self._step.replays[self._done : self._done + sections]:
            self._done += 1  # first: one that fails does not run again
            replay()

    def output(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """After the last section: hidden [rows, …], or logits in float32; and what left the tapped layers."""
        self.go_on(self.left)
        assert self._step.output is not None, "a step that ran has an output"
        output = self._step.output[: self._rows]
        features = self._step.features[:, : self._rows] if self._with_features else None
        return (output if self._overwritten else output.clone()), features


class RecordedSteps:
    """The recorded steps of one stage."""

    def __init__(
        self,
        model: ModelSpan,
        state: SpanState,
        scratch_slot: int,
        scratch_page: int,
        record: Recorder,
        taps: Taps = (),
    ) -> None:
        """taps: that a drafter reads; steps recorded for it serve batches of which it reads nothing, too."""
        self._model = model
        self._state = state
        self._scratch_slot = scratch_slot
        self._scratch_page = scratch_page
        self._record = record
        self._taps = taps
        self.longest_chunk = RECORDED_ROWS  # of those that are recorded
        self._features: dict[tuple[Taps, bool], torch.Tensor] = {}  # of the last chunk, and of the last other step
        self._between: torch.Tensor | None = None  # what sections of chunks leave to the next ones: one chunk at a time
        self._steps: dict[tuple[GraphShape, Taps], _Step] = {}  # by shape and taps, those used last behind
        self._run_once = set[tuple[bool, ...]]()  # kinds of steps that have run through all layers
        self._logits: torch.Tensor | None = None  # of the last step, whichever it was: all of them write there
        self._rewind: Callable[[], None] | None = None
        self._where = torch.zeros(2, dtype=torch.int32, device=model.device)  # slot and rows of a rewind
        self._where_host = HostBuffers((2,), model.device)

    def begin(
        self,
        shape: GraphShape,
        batch: Batch,
        pages: Sequence[SegmentPages],
        hidden: torch.Tensor | None,
        pending: PendingTokens | None,
        taps: Taps = (),
    ) -> Replay:
        """A batch that `shape` serves, to be replayed. Its output is hidden [batch.rows, …], or logits in float32;
        later steps do not touch it. A chunk gives hidden in the last stage too, which the next step overwrites: the
        head takes its rows at once. Beside it is what left the tapped layers [taps, batch.rows, hidden], which the next
        chunk overwrites, or the next step that is none. No other chunk may begin before all sections of one have run.
        """
        step = self._step(shape, taps or self._taps)
        with step.host.next() as host:
            step.layout.fill(batch, pages, host)
        if pending is not None:
            step.layout.take_pending(pending)
        if step.hidden_in is not None:
            assert hidden is not None, "a stage that is not the first gets activations"
            step.hidden_in[: batch.rows].copy_(hidden, non_blocking=True)
        return Replay(step, batch.rows, bool(taps), overwritten=shape.is_chunk and self._model.is_last)

    def make_ready(self, shape: GraphShape) -> None:
        """Record the step now if it is not yet."""
        self._step(shape, self._taps)

    def _step(self, shape: GraphShape, taps: Taps) -> _Step:
        """Blocks of several sequences come in many shapes, so those that were not used for long are given up."""
        step = self._steps.pop((shape, taps), None) or self._make(shape, taps)
        self._steps[shape, taps] = step
        if shape.has_blocks:
            held = [key for key in self._steps if key[0].has_blocks]
            if len(held) > MOST_BLOCKS:
                self._give_up(held[0])
        return step

    @cached_property
    def _unlike_layers(self) -> Sequence[HybridLayer]:
        return self._model.unlike_layers

    def _give_up(self, key: tuple[GraphShape, Taps]) -> None:
        if self._model.device.type == "cuda":
            with _recording:
                torch.cuda.synchronize(self._model.device)  # it may still be running
        del self._steps[key]

    def _make(self, shape: GraphShape, taps: Taps) -> _Step:
        """Recorded over padding alone, so that no slot's state moves."""
        layout = Layout(shape, self._model.device, self._scratch_slot, self._scratch_page)
        sections = self._model.sections(shape.rows) if shape.is_chunk else (self._model.layers,)
        step = _Step(
            self._model,
            self._state,
            layout,
            self._room_for_logits(shape),
            taps,
            self._room_for_features(taps, shape),
            sections,
            self._room_between(shape.rows) if len(sections) > 1 else None,
        )
        with step.host.next() as host:
            layout.fill(None, (), host)
        # The first of its kind runs through all layers: some keep memory that is made when they first run, and what is
        # made while a step is recorded holds nothing before that step is replayed.
        kind = (shape.is_chunk, shape.rewindable, shape.far, shape.notes)
        warm = partial(step.warm, self._unlike_layers) if kind in self._run_once else step.run
        for number in range(len(sections)):
            step.replays.append(self._record(partial(step.run_section, number), warm if number == 0 else _nothing))
        self._run_once.add(kind)
        return step

    def _room_for_features(self, taps: Taps, shape: GraphShape) -> torch.Tensor:
        """Of chunks apart: others' steps run between their sections. Steps that were recorded over less keep that."""
        others = max(LONGEST_BLOCK, round_up(self._scratch_slot))
        key, rows = (taps, shape.is_chunk), self.longest_chunk if shape.is_chunk else others
        if key not in self._features or self._features[key].shape[1] < shape.rows:
            self._features[key] = self._rows_of(len(taps), max(rows, shape.rows))
        return self._features[key]

    def _room_between(self, rows: int) -> torch.Tensor:
        if self._between is None or self._between.shape[0] < rows:
            self._between = self._rows_of(max(rows, self.longest_chunk))
        return self._between

    def _rows_of(self, *sizes: int) -> torch.Tensor:
        """Of the residual stream."""
        return torch.zeros(*sizes, self._model.spec.hidden, dtype=self._model.dtype, device=self._model.device)

    def _room_for_logits(self, shape: GraphShape) -> torch.Tensor | None:
        """One buffer for all steps; steps that were recorded over a smaller one keep that."""
        if shape.is_chunk or not self._model.is_last:
            return None
        if self._logits is None or self._logits.shape[0] < shape.rows:
            rows = max(shape.rows, round_up(self._scratch_slot))
            self._logits = torch.zeros(rows, self._model.spec.vocab, device=self._model.device)
        return self._logits

    def rewind(self, slot: int, count: int) -> None:
        """Every layer's state of the slot moves on by the first `count` rows of its last block, which settles it."""
        replay = self._rewind or self.make_rewind_ready()
        self._send_where(slot, count)
        replay()

    def make_rewind_ready(self) -> Callable[[], None]:
        """Recorded over no rows, so that no state moves."""
        self._send_where(self._scratch_slot, 0)
        self._rewind = self._record(lambda: self._state.rewind(self._where))
        return self._rewind

    def _send_where(self, slot: int, count: int) -> None:
        with self._where_host.next() as host:
            host[0], host[1] = slot, count
            self._where.copy_(host, non_blocking=True)

    def forget_blocks(self) -> None:
        """Blocks are logged in new memory: steps over the old one are of no use."""
        self._steps = {key: step for key, step in self._steps.items() if not key[0].rewindable}
        self._rewind = None


def _nothing() -> None:
    """In place of a run before recording: another has run the same kernels."""

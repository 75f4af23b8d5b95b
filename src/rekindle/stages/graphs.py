"""Steps that are recorded once and replayed: on a GPU one launch for all layers, without gaps.

A step is recorded per shape (rows and width of the page tables, both rounded up), before the first request or when it
is first needed. Its inputs are static buffers that a layout fills; what a step computes is the code that runs a batch
unrecorded. The recorder is a parameter: CUDA graphs on a GPU, or anything that runs the step again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch

from rekindle.batch import Batch
from rekindle.buffers import RECORDED_ROWS
from rekindle.kernels.host_buffers import HostBuffers
from rekindle.layers import HybridLayer, ModelSpan
from rekindle.pool import Recorder, SegmentPages
from rekindle.stages.layout import GraphShape, Layout, round_up
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
    ) -> None:
        """logits: float32 [at least the shape's rows, vocab], where the head is part of the step. features: [taps, at
        least the shape's rows, hidden]."""
        self._model = model
        self._taps = taps
        self._state = state
        self._logits = logits
        self.features = features  # what leaves each tapped layer
        self.layout = layout
        self.host = HostBuffers((layout.shape.size,), model.device)
        self.output: torch.Tensor | None = None  # hidden or logits; recorded, the buffer that every replay fills
        self.hidden_in: torch.Tensor | None = None
        if not model.is_first:
            shape = (layout.shape.rows, model.spec.hidden)
            self.hidden_in = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.replay: Callable[[], None] = self.run

    def run(self) -> None:
        self._run(self._model.layers)

    def warm(self) -> None:
        """One layer of every kind: all kernels of the step."""
        self._run(self._model.unlike_layers)

    def _run(self, layers: Sequence[HybridLayer]) -> None:
        x = self._model.enter(self.layout.tokens, self.hidden_in)
        x, tapped = self._model.run(x, self.layout.ragged, self._state.layers, layers, self._taps)
        if tapped:  # one launch for all; `warm` may leave tapped layers out
            torch._foreach_copy_([room[: len(x)] for room in self.features[: len(tapped)]], tapped)
        if self._logits is not None:
            self._logits[: x.shape[0]].copy_(self._model.leave(x))
        self.output = x if self._logits is None else self._logits


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
        self._features: dict[Taps, torch.Tensor] = {}  # of the last step: all steps write there
        self._steps: dict[tuple[GraphShape, Taps], _Step] = {}  # by shape and taps, those used last behind
        self._run_once = set[tuple[bool, ...]]()  # kinds of steps that have run through all layers
        self._logits: torch.Tensor | None = None  # of the last step, whichever it was: all of them write there
        self._rewind: Callable[[], None] | None = None
        self._where = torch.zeros(2, dtype=torch.int32, device=model.device)  # slot and rows of a rewind
        self._where_host = HostBuffers((2,), model.device)

    def run(
        self,
        shape: GraphShape,
        batch: Batch,
        pages: Sequence[SegmentPages],
        hidden: torch.Tensor | None,
        pending: PendingTokens | None,
        taps: Taps = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A batch that `shape` serves -> hidden [batch.rows, …], or logits in float32; later steps do not touch it. A
        chunk gives hidden in the last stage too, which the next step overwrites: the head takes its rows at once.
        Beside it what left the tapped layers [taps, batch.rows, hidden], which the next step overwrites too.
        """
        step = self._step(shape, taps or self._taps)
        with step.host.next() as host:
            step.layout.fill(batch, pages, host)
        if pending is not None:
            step.layout.take_pending(pending)
        if step.hidden_in is not None:
            assert hidden is not None, "a stage that is not the first gets activations"
            step.hidden_in[: batch.rows].copy_(hidden, non_blocking=True)
        step.replay()
        assert step.output is not None, "a step that ran has an output"
        output = step.output[: batch.rows]
        features = step.features[:, : batch.rows] if taps else None
        return (output if shape.is_chunk and self._model.is_last else output.clone()), features

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

    def _give_up(self, key: tuple[GraphShape, Taps]) -> None:
        if self._model.device.type == "cuda":
            with _recording:
                torch.cuda.synchronize(self._model.device)  # it may still be running
        del self._steps[key]

    def _make(self, shape: GraphShape, taps: Taps) -> _Step:
        """Recorded over padding alone, so that no slot's state moves."""
        layout = Layout(shape, self._model.device, self._scratch_slot, self._scratch_page)
        step = _Step(
            self._model, self._state, layout, self._room_for_logits(shape), taps, self._room_for_features(taps)
        )
        with step.host.next() as host:
            layout.fill(None, (), host)
        # The first of its kind runs through all layers: some keep memory that is made when they first run, and what is
        # made while a step is recorded holds nothing before that step is replayed.
        kind = (shape.is_chunk, shape.rewindable, shape.far, shape.notes)
        step.replay = self._record(step.run, step.warm if kind in self._run_once else step.run)
        self._run_once.add(kind)
        return step

    def _room_for_features(self, taps: Taps) -> torch.Tensor:
        if taps not in self._features:
            shape = len(taps), RECORDED_ROWS, self._model.spec.hidden
            self._features[taps] = torch.zeros(shape, dtype=self._model.dtype, device=self._model.device)
        return self._features[taps]

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

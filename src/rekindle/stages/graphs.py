"""Decode and verify steps that are recorded once and replayed: on a GPU one launch for all layers, without gaps.

A step is recorded per form (rows and width of the page tables, both rounded up), the first time it is needed. Its
inputs are static buffers that a layout fills; what a step computes is the code that runs a batch unrecorded. Who
records is given: CUDA graphs on a GPU, or anything that runs the step again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from rekindle.batch import Batch
from rekindle.kernels.gated_delta import replay_rows
from rekindle.models.model import ModelSpan
from rekindle.models.state import DeltaState, LayerState
from rekindle.pool import Recorder, Seat
from rekindle.stages.layout import Form, Layout
from rekindle.stages.types import Ahead

BUFFERS = 3  # host buffers in turn: a copy may still be under way while the next step is laid out

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

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        """Runs the step first, outside the graph, so that every kernel is compiled."""
        with _recording:
            return self._capture(step)

    def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Waits for nothing that the device still does, so that a chunk may be under way meanwhile. (torch's own
        `torch.cuda.graph` would wait for it, and give back all memory that is kept for later, pinned memory too.)"""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        try:
            with torch.cuda.stream(self._side):
                step()
                try:
                    return self._record_on_side(step)
                except torch.cuda.OutOfMemoryError:
                    # While it records, torch does not give back what it keeps for later.
                    torch.cuda.synchronize(self._device)
                    torch.cuda.empty_cache()
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


class _Host:
    """Buffers in host memory, pinned beside a GPU, in turn; none is given again before its copy is done."""

    def __init__(self, size: int, device: torch.device) -> None:
        gpu = device.type == "cuda"
        self._buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=gpu) for _ in range(BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in range(BUFFERS)] if gpu else []
        self._turn = 0

    @contextmanager
    def next(self) -> Iterator[torch.Tensor]:
        """A buffer to fill and to copy from, inside the block."""
        self._turn = (self._turn + 1) % BUFFERS
        if self._copied:
            self._copied[self._turn].synchronize()
        yield self._buffers[self._turn]
        if self._copied:
            self._copied[self._turn].record()


class _Step:
    """One form of a step: static inputs, and the output of the last run."""

    def __init__(self, model: ModelSpan, states: Mapping[int, LayerState], layout: Layout) -> None:
        self._model = model
        self._states = states
        self.layout = layout
        self.host = _Host(layout.form.size, model.device)
        self.output: torch.Tensor | None = None  # hidden or logits; recorded, the buffer that every replay fills
        self.hidden_in: torch.Tensor | None = None
        if not model.is_first:
            shape = (layout.form.rows, model.spec.hidden)
            self.hidden_in = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.replay: Callable[[], None] = self.run

    def run(self) -> None:
        x = self._model.enter(self.layout.tokens, self.hidden_in)
        x = self._model.run(x, self.layout.ragged, self._states)
        self.output = self._model.leave(x) if self._model.is_last else x


class RecordedSteps:
    """The recorded steps of one stage."""

    def __init__(
        self,
        model: ModelSpan,
        states: Mapping[int, LayerState],
        scratch_slot: int,
        scratch_page: int,
        record: Recorder,
    ) -> None:
        self._model = model
        self._states = states
        self._scratch_slot = scratch_slot
        self._scratch_page = scratch_page
        self._record = record
        self._steps: dict[Form, _Step] = {}
        self._rewind: Callable[[], None] | None = None
        self._where = torch.zeros(2, dtype=torch.int32, device=model.device)  # slot and rows of a rewind
        self._where_host = _Host(2, model.device)

    def run(
        self, form: Form, batch: Batch, seats: Sequence[Seat], hidden: torch.Tensor | None, ahead: Ahead | None
    ) -> torch.Tensor:
        """A batch that `form` serves -> hidden [batch.rows, …], or logits in float32; later steps do not touch it."""
        step = self._steps.get(form) or self._make(form)
        with step.host.next() as host:
            step.layout.fill(batch, seats, host)
        if ahead is not None:
            step.layout.take_drawn(ahead)
        if step.hidden_in is not None:
            assert hidden is not None, "a stage that is not the first gets activations"
            step.hidden_in[: batch.rows].copy_(hidden, non_blocking=True)
        step.replay()
        assert step.output is not None, "a step that ran has an output"
        output = step.output[: batch.rows]
        return output.to(torch.float32, copy=True) if self._model.is_last else output.clone()

    def make_ready(self, form: Form) -> None:
        """Record the step now if it is not yet."""
        if form not in self._steps:
            self._make(form)

    def _make(self, form: Form) -> _Step:
        """Recorded over padding alone, so that nobody's state moves."""
        layout = Layout(form, self._model.device, self._scratch_slot, self._scratch_page)
        step = _Step(self._model, self._states, layout)
        with step.host.next() as host:
            layout.fill(None, (), host)
        step.replay = self._record(step.run)
        self._steps[form] = step
        return step

    def rewind(self, slot: int, count: int) -> None:
        """All DeltaNet layers of the slot go to where they stood after `count` rows of its last block."""
        if self._rewind is None:
            self._send_where(self._scratch_slot, 0)
            self._rewind = self._record(lambda: rewind_layers(self._states, self._where))
        self._send_where(slot, count)
        self._rewind()

    def _send_where(self, slot: int, count: int) -> None:
        with self._where_host.next() as host:
            host[0], host[1] = slot, count
            self._where.copy_(host, non_blocking=True)

    def forget_blocks(self) -> None:
        """What rewind goes back into lies in new memory: steps over the old one are of no use."""
        self._steps = {form: step for form, step in self._steps.items() if not form.rewindable}
        self._rewind = None


def rewind_layers(states: Mapping[int, LayerState], where: torch.Tensor) -> None:
    for state in states.values():
        if isinstance(state, DeltaState):
            assert state.kept is not None, "only a rewindable forward can be gone back into"
            replay_rows(state.kept, where, state.states, state.windows)

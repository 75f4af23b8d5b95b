"""Steps of few rows on a CPU: run as they are the first time, by one call afterwards (`kernels/native/program.py`).

Nothing is padded, so a step is recorded for each number of rows, with page tables rounded up. The bits are those of the
step that is not recorded: the same kernels get the same arguments.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import torch

from rekindle.batch import Batch
from rekindle.kernels import native
from rekindle.kernels.native.program import Arena, Program, Tape
from rekindle.layers import ModelSpan
from rekindle.pool import SegmentPages
from rekindle.stages.layout import GraphShape, Layout, round_width
from rekindle.stages.state import SpanState
from rekindle.stages.types import PendingTokens

log = logging.getLogger("rekindle.stages")

MOST_ROWS = 16  # with more of them Python's calls do not count
MOST_STEPS = 64  # those used last


Taps = tuple[int, ...]
Outputs = tuple[torch.Tensor, ...]  # hidden or logits, then what leaves each tapped layer


class _Step:
    """One shape of a step, with the layers that are tapped."""

    def __init__(self, model: ModelSpan, state: SpanState, layout: Layout, taps: Taps) -> None:
        self._model = model
        self._state = state
        self._taps = taps
        self.layout = layout
        self.host = torch.zeros(layout.shape.size, dtype=torch.int32)
        self.hidden_in: torch.Tensor | None = None
        if not model.is_first:
            self.hidden_in = torch.zeros(layout.shape.rows, model.spec.hidden, dtype=model.dtype)
        self.program: Program | None = None
        self.outputs: Outputs = ()  # of the last run
        self.refused: str | None = None  # why it cannot be recorded

    def run(self, arena: Arena) -> Outputs:
        """Copies, since the next step may overwrite what this one gives."""
        if self.program is not None and self.outputs:
            self.program.run()
            return tuple(output.clone() for output in self.outputs)
        with Tape(native.library(), arena) as tape:
            x = self._model.enter(self.layout.tokens, self.hidden_in)
            x, tapped = self._model.run(x, self.layout.ragged, self._state.layers, taps=self._taps)
            outputs = (self._model.leave(x) if self._model.is_last else x, *tapped)
        self.program, self.refused = tape.program, tape.refused
        if self.refused:
            log.debug("steps of %d rows are not recorded because of %s", len(x), self.refused)
        else:
            self.outputs = tuple(map(arena.let_go, outputs))
        return tuple(output.clone() for output in outputs)


class CpuSteps:
    """The recorded steps of one stage."""

    def __init__(self, model: ModelSpan, state: SpanState, slots: int) -> None:
        self._model = model
        self._state = state
        self._slots = slots
        self._arena = Arena()
        self._steps = OrderedDict[tuple[GraphShape, Taps], _Step]()

    def serving(self, shape: GraphShape, batch: Batch, taps: Taps = ()) -> GraphShape | None:
        """The shape of the recorded step that serves this one."""
        plain = shape.groups == 1 and not (shape.notes or shape.far or shape.coming or batch.scored_rows)
        headed = not self._model.is_last or batch.logit_rows == batch.rows
        if shape.rows > MOST_ROWS or not (plain and headed) or not self._state.paged.replayable(max(shape.lengths)):
            return None
        padded = replace(shape, width=round_width(shape.width))
        known = self._steps.get((padded, taps))
        refused = not self._model.can_record(shape.rows) if known is None else known.refused
        return None if refused else padded

    def run(
        self,
        shape: GraphShape,
        batch: Batch,
        pages: Sequence[SegmentPages],
        hidden: torch.Tensor | None,
        pending: PendingTokens | None,
        taps: Taps = (),
    ) -> Outputs:
        """A batch that `shape` serves -> hidden [rows, …], or logits, and the outputs of tapped layers; later steps do
        not touch them."""
        step = self._steps.get((shape, taps)) or self._make(shape, taps)
        self._steps.move_to_end((shape, taps))
        step.layout.fill(batch, pages, step.host)
        if pending is not None:
            step.layout.take_pending(pending)
        if step.hidden_in is not None:
            assert hidden is not None, "a stage that is not the first gets activations"
            step.hidden_in.copy_(hidden)
        return step.run(self._arena)

    def _make(self, shape: GraphShape, taps: Taps) -> _Step:
        layout = Layout(shape, self._model.device, self._slots, self._state.paged.pool.scratch_page)
        self._steps[shape, taps] = step = _Step(self._model, self._state, layout, taps)
        if len(self._steps) > MOST_STEPS:
            self._steps.popitem(last=False)
        return step

    def forget_blocks(self) -> None:
        """Blocks are logged in new memory: steps over the old one are of no use."""
        for key in [key for key in self._steps if key[0].rewindable]:
            del self._steps[key]

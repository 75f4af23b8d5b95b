"""Which steps of a stage are recorded, and when: before the first request, or while the device is busy with a chunk."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from rekindle.batch import Batch, Wanted
from rekindle.buffers import USUAL_ROWS
from rekindle.layers import ModelSpan
from rekindle.pool import Recorder, SegmentPages
from rekindle.spec import PAGE
from rekindle.stages.graphs import RecordedSteps, Taps
from rekindle.stages.layout import LONGEST_CHUNK, GraphShape, chunk_shape, recorded_shapes
from rekindle.stages.state import SpanState

log = logging.getLogger("rekindle.stages")


class Recording:
    def __init__(
        self,
        model: ModelSpan,
        state: SpanState,
        slots: int,
        table_width: int,
        record: Recorder,
        taps: Taps = (),
    ) -> None:
        """table_width: pages of a sequence at the context limit, 0 where that is not known. taps: of this stage's
        layers, that a drafter reads."""
        self.steps = RecordedSteps(model, state, slots, state.paged.pool.scratch_page, record, taps)
        self._model = model
        self._paged = state.paged
        self._slots = slots
        self._table_width = table_width
        self._longest_chunk = LONGEST_CHUNK  # that is recorded: less where memory does not suffice

    def serving(self, shape: GraphShape) -> GraphShape | None:
        """The shape of the recorded step that serves this one, where the device can read every page it attends."""
        padded = shape.padded(self._table_width)
        if padded is None or not self._paged.replayable(max(shape.lengths)):
            return None
        if padded.is_chunk and padded.rows > self._longest_chunk:
            return None
        return padded if self._model.can_record(padded.rows) else None

    def chunk_of(self, rows: int) -> GraphShape | None:
        """The shape of the recorded chunk that would serve so many rows, of one prompt."""
        longest = min(LONGEST_CHUNK, self._longest_chunk)
        if not 1 < rows <= longest or not self._table_width:
            return None
        shape = chunk_shape(rows, self._table_width)
        return shape if shape.rows <= longest and self._model.can_record(shape.rows) else None

    def record_all(self, chunk: int, block: int, rewinds: bool) -> int:
        """Record every step that requests will need, with chunks of up to `chunk` rows and blocks of up to `block`,
        over padding alone; how many there are. rewinds: some layer replays rows when a slot goes back. The stage must
        be idle."""
        if not self._table_width:
            return 0
        self.steps.longest_chunk = max(USUAL_ROWS, min(chunk, LONGEST_CHUNK))
        known = recorded_shapes(self._slots, self._table_width, chunk, len(self._paged.groups), block)
        if block and rewinds:
            self.steps.make_rewind_ready()
        shapes = [shape for shape in known if self._model.can_record(shape.rows)]
        for count, shape in enumerate(shapes):
            try:
                self.steps.make_ready(shape)
            except torch.cuda.OutOfMemoryError as error:
                if not shape.is_chunk:
                    raise
                self._longest_chunk = shape.rows - 1
                log.warning("chunks of %d rows and more are not recorded, and start slower: %s", shape.rows, error)
                return count
        return len(shapes)

    def record_following(self, batch: Batch, pages: Sequence[SegmentPages]) -> None:
        """Records the decode steps that follow a prompt, while the device runs the prompt's last chunk. The step that
        keeps a query, once per page, is left out: recording it too could take longer than the chunk."""
        for segment, its_pages in zip(batch.segments, pages, strict=True):
            if segment.wanted is Wanted.LAST and len(segment) > 1:
                self._record_decode(max(1, its_pages.places.shape[1] + (segment.end % PAGE == 0)))

    def _record_decode(self, width: int) -> None:
        """One row over `width` pages."""
        pool, groups = self._paged.pool, len(self._paged.groups)
        far, sparse = self._paged.far(1), self._paged.mode == "sparse"
        may_come = sparse and pool.away > 0 and pool.page_ins is not None and pool.page_ins.by_layer
        for coming in (True, False) if may_come else (False,):
            recorded = self.serving(GraphShape((1,), 1, width, False, False, far, coming, groups))
            # In sparse mode pages are away only while the chunk's own fill the pool: no later step reads pages far.
            if recorded is not None and not (far and sparse):
                self.steps.make_ready(recorded)

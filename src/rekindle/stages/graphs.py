"""Decode steps as replayed CUDA graphs: one launch for all layers, no gaps between kernels.

A graph is recorded per number of rows and per width of the page tables, both rounded up, the first time it is
needed. Its inputs are static buffers: one packed copy per step brings tokens, slots, positions and page tables to the
device. Padded rows work on a slot and a page that nobody else reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rekindle.batch import Batch
from rekindle.kernels.ragged import Ragged
from rekindle.models.model import ModelSpan
from rekindle.models.state import LayerState
from rekindle.stages.types import Ahead

BUFFERS = 3  # host buffers in turn: a copy may still be under way while the next step is laid out


def round_up(count: int) -> int:
    """1, 2, 4, 8, 12, 16, 24, 32, 48, 64, …: at most a third of the rows are padding."""
    size = 1
    while size < count:
        size = size * 3 // 2 if size >= 8 and size & (size - 1) == 0 else 1 << size.bit_length()
    return size


def round_width(pages: int) -> int:
    """Page-table widths in powers of four from 16: few graphs, and short contexts do not pay for long ones."""
    width = 16
    while width < pages:
        width *= 4
    return width


@dataclass(frozen=True, slots=True, eq=False)
class _Graph:
    replay: torch.cuda.CUDAGraph
    packed: torch.Tensor  # int32 on the device: tokens, slots, positions, tables
    ragged: Ragged  # its tensors must live as long as the graph that reads them
    hidden_in: torch.Tensor | None
    output: torch.Tensor  # hidden or logits
    host: list[torch.Tensor]  # pinned, in turn


class DecodeGraphs:
    """The recorded decode steps of one stage."""

    def __init__(
        self, model: ModelSpan, states: Mapping[int, LayerState], scratch_slot: int, scratch_page: int
    ) -> None:
        self._model = model
        self._states = states
        self._scratch_slot = scratch_slot
        self._scratch_page = scratch_page
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._memory = torch.cuda.graph_pool_handle()
        self._turn = 0

    def run(
        self, batch: Batch, tables: Sequence[Sequence[int]], hidden: torch.Tensor | None, ahead: Ahead | None
    ) -> torch.Tensor:
        """One row per segment -> hidden or logits [segments, …], a copy that later steps do not touch."""
        rows, width = round_up(len(batch.segments)), round_width(max(map(len, tables), default=1))
        graph = self._graphs.get((rows, width)) or self._record(rows, width)
        self._fill(graph, batch, tables, rows, width)
        if ahead is not None:
            self._take_drawn(graph, ahead)
        if graph.hidden_in is not None:
            assert hidden is not None, "a stage that is not the first gets activations"
            graph.hidden_in[: len(batch.segments)].copy_(hidden, non_blocking=True)
        graph.replay.replay()
        return graph.output[: len(batch.segments)].clone()

    def _fill(self, graph: _Graph, batch: Batch, tables: Sequence[Sequence[int]], rows: int, width: int) -> None:
        self._turn = (self._turn + 1) % BUFFERS
        host = graph.host[self._turn]
        values = host.numpy()
        count = len(batch.segments)
        values[:rows] = 0
        values[rows : 2 * rows] = self._scratch_slot
        values[2 * rows : 3 * rows] = 0
        values[:count] = [max(0, segment.tokens[0]) for segment in batch.segments]
        values[rows : rows + count] = [segment.slot for segment in batch.segments]
        values[2 * rows : 2 * rows + count] = [segment.position for segment in batch.segments]
        pages = values[3 * rows :].reshape(rows, width)
        pages[:] = self._scratch_page
        for row, table in zip(pages, tables, strict=False):
            row[: len(table)] = table
        graph.packed.copy_(host, non_blocking=True)

    def _take_drawn(self, graph: _Graph, ahead: Ahead) -> None:
        count = len(ahead.rows)
        if ahead.rows == tuple(range(count)) and ahead.sources == ahead.rows:
            graph.packed[:count].copy_(ahead.tokens[:count])
        else:
            device = ahead.tokens.device
            drawn = ahead.tokens[torch.tensor(ahead.sources, device=device)]
            graph.packed[torch.tensor(ahead.rows, device=device)] = drawn.int()

    def _record(self, rows: int, width: int) -> _Graph:
        """Record the step for so many rows. Runs it first, outside the graph, so that every kernel is compiled."""
        model, device = self._model, self._model.device
        size = 3 * rows + rows * width
        packed = torch.zeros(size, dtype=torch.int32, device=device)
        packed[rows : 2 * rows] = self._scratch_slot
        packed[3 * rows :] = self._scratch_page
        hidden_in = None
        if not model.is_first:
            hidden_in = torch.zeros(rows, model.spec.hidden, dtype=model.dtype, device=device)
        ragged = Ragged(
            starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
            slots=packed[rows : 2 * rows],
            positions=packed[2 * rows : 3 * rows],
            row_positions=packed[2 * rows : 3 * rows],
            row_segments=torch.arange(rows, dtype=torch.int32, device=device),
            tables=packed[3 * rows :].view(rows, width),
            lengths=(1,) * rows,
            befores=(0,) * rows,
            slot_list=(self._scratch_slot,) * rows,
        )

        def step() -> torch.Tensor:
            x = model.enter(packed[:rows], hidden_in)
            x = model.run(x, ragged, self._states)
            return model.leave(x) if model.is_last else x

        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream(device).wait_stream(side)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            output = step()
        host = [torch.zeros(size, dtype=torch.int32).pin_memory() for _ in range(BUFFERS)]
        self._graphs[rows, width] = _Graph(graph, packed, ragged, hidden_in, output, host)
        return self._graphs[rows, width]

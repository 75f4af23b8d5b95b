"""A ragged batch as the kernels see it: tensors on the device, with the host's bound of the sizes beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of several sequences, concatenated; segment i is rows [starts[i], starts[i + 1]).

    The state of segment i lives in slot slots[i]; its KV in the pages tables[i]. A table lists the attended pages in
    ascending position and no others, so a row has two numbers: its absolute position, used for RoPE, and its place, the
    compacted KV index (position less PAGE for every page left out before it), used to store its KV and for the causal
    mask.

    In a replayed graph the tensors are static buffers and only their values change, so kernels read sizes from the
    tensors; `lengths` bounds them, for grids and for the choice of a kernel.
    """

    starts: torch.Tensor  # int32 [segments + 1]
    slots: torch.Tensor  # int32 [segments]
    row_positions: torch.Tensor  # int32 [rows], absolute position of every row
    row_places: torch.Tensor  # int32 [rows], place of every row in its table
    row_segments: torch.Tensor  # int32 [rows], segment of every row
    tables: torch.Tensor  # int32 [segments, pages of the longest], page of every PAGE places; rest undefined
    lengths: tuple[int, ...]  # host: upper bounds of the segments' rows; the rows of a padding segment count none
    rewindable: bool = False  # the batch's rows are kept for rewind
    noted: torch.Tensor | None = None  # int32 [2, segments]: a row whose query is noted, and where
    far: bool = False  # tables name pages by numbers that say where each lies, perhaps in host memory
    coming: bool = False  # some pages are on their way to the device: every layer waits for its own
    group_tables: tuple[torch.Tensor, ...] = ()  # where groups of layers attend other pages: the tables of each group

    def __post_init__(self) -> None:
        numbers = (self.starts, self.slots, self.row_positions, self.row_places, self.row_segments, self.tables)
        assert all(tensor.dtype is torch.int32 for tensor in numbers), "kernels read numbers of 32 bits"

    def of_group(self, number: int) -> Ragged:
        """As the layers of one group see it."""
        return replace(self, tables=self.group_tables[number]) if number < len(self.group_tables) else self

    @property
    def segments(self) -> int:
        return len(self.lengths)

    @property
    def decodes(self) -> bool:
        """Every segment is a single row."""
        return all(length == 1 for length in self.lengths)

    def walk(self) -> list[tuple[int, int, slice]]:
        """Number, slot and rows of every segment that has rows; for kernels that run on the host."""
        starts = self.starts.tolist()
        pieces = zip(self.slots.tolist(), starts[:-1], starts[1:], strict=True)
        return [(i, slot, slice(start, stop)) for i, (slot, start, stop) in enumerate(pieces) if stop > start]

"""A ragged batch as the kernels see it: tensors on the device, with the host's copy of the sizes beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of several sequences behind one another; segment i is rows [starts[i], starts[i + 1]).

    The state of segment i lives in slot slots[i]; its KV in the pages tables[i]. In a replayed graph the tensors
    are static buffers and only their values change, so kernels read sizes from the tensors, never from `lengths`.
    """

    starts: torch.Tensor  # int32 [segments + 1]
    slots: torch.Tensor  # int32 [segments]
    positions: torch.Tensor  # int32 [segments], tokens consumed before the segment
    row_positions: torch.Tensor  # int32 [rows], absolute position of every row
    row_segments: torch.Tensor  # int32 [rows], segment of every row
    tables: torch.Tensor  # int32 [segments, pages of the longest], page of every PAGE positions; rest undefined
    lengths: tuple[int, ...]  # host: rows of every segment
    befores: tuple[int, ...]  # host: positions, again
    slot_list: tuple[int, ...]  # host: slots, again
    rewindable: bool = False  # the batch's rows are kept for rewind

    @property
    def segments(self) -> int:
        return len(self.lengths)

    @property
    def decodes(self) -> bool:
        """Every segment is a single row."""
        return self.row_positions.shape[0] == len(self.lengths)

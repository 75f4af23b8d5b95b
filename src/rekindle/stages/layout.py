"""A batch as one packed run of int32 on the device, and the Ragged that looks into it: one copy per forward.

The same layout serves a batch that is run once and a step that is recorded: there rows and tables are rounded up, and
padding lies in segments of its own, on a slot and a page that nobody else reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from rekindle.batch import Batch
from rekindle.kernels.ragged import Ragged
from rekindle.pool import Seat
from rekindle.spec import PAGE
from rekindle.stages.types import Ahead

ZERO = torch.tensor(0)
LONGEST_BLOCK = PAGE  # rows of a block that is verified as a recorded step: its padding fits one page

T = TypeVar("T", np.ndarray, torch.Tensor)


class Fields(NamedTuple, Generic[T]):
    tokens: T  # [rows]
    row_positions: T  # [rows]
    row_places: T  # [rows]
    row_segments: T  # [rows]
    starts: T  # [segments + 1]
    slots: T  # [segments]
    noted: T  # [2, segments] or nothing
    tables: T  # [segments, width]


@dataclass(frozen=True, slots=True)
class Form:
    """The sizes of a layout. Batches of one form can share a recorded step."""

    lengths: tuple[int, ...]  # of the segments, at most; 0: the segment takes whatever rows are left, as padding
    rows: int
    width: int  # pages of the widest table
    rewindable: bool
    notes: bool  # some query is noted
    far: bool = False  # some pages are read where they lie, in host memory
    coming: bool = False  # some are on their way to the device: every layer waits for its own

    @classmethod
    def of(cls, batch: Batch, seats: Sequence[Seat]) -> Form:
        width = max(1, *(len(seat.places) for seat in seats))
        notes = any(seat.noted is not None for seat in seats)
        far, coming = any(seat.far for seat in seats), any(seat.coming for seat in seats)
        return cls(tuple(map(len, batch.segments)), batch.rows, width, batch.rewindable, notes, far, coming)

    def padded(self) -> Form | None:
        """The form of the recorded step that serves this one: decode rows, or a block to verify. None: none does."""
        width = round_width(self.width)
        if len(self.lengths) == 1 and self.rewindable and self.rows <= LONGEST_BLOCK:
            rows = round_up(self.rows)
            return replace(self, lengths=(rows, 0), rows=rows, width=width)
        if self.rows == len(self.lengths) and not self.rewindable:
            rows = round_up(self.rows)
            return replace(self, lengths=(1,) * rows, rows=rows, width=width)
        return None

    @property
    def size(self) -> int:
        return sum(map(_aligned, self._sizes()))

    def cut(self, packed: T) -> Fields[T]:
        """The fields of a packed run, as views."""
        parts, at = list[T](), 0
        for size in self._sizes():
            parts.append(packed[at : at + size])
            at += _aligned(size)
        tokens, positions, places, numbers, starts, slots, noted, tables = parts
        shaped = noted.reshape(2, -1), tables.reshape(len(self.lengths), self.width)
        return Fields(tokens, positions, places, numbers, starts, slots, *shaped)

    def _sizes(self) -> tuple[int, ...]:
        rows, segments = self.rows, len(self.lengths)
        noted = 2 * segments if self.notes else 0
        return (rows, rows, rows, rows, segments + 1, segments, noted, segments * self.width)


class Layout:
    """One form with its memory on the device."""

    def __init__(self, form: Form, device: torch.device, scratch_slot: int, scratch_page: int) -> None:
        self.form = form
        self.packed = torch.zeros(form.size, dtype=torch.int32, device=device)
        self._scratch_slot = scratch_slot
        self._scratch_page = scratch_page
        fields = form.cut(self.packed)
        self.tokens = fields.tokens
        self.ragged = Ragged(
            starts=fields.starts,
            slots=fields.slots,
            row_positions=fields.row_positions,
            row_places=fields.row_places,
            row_segments=fields.row_segments,
            tables=fields.tables,
            lengths=form.lengths,
            rewindable=form.rewindable,
            noted=fields.noted if form.notes else None,
            far=form.far,
            coming=form.coming,
        )

    def fill(self, batch: Batch | None, seats: Sequence[Seat], host: torch.Tensor) -> None:
        """Lay out the batch in host memory and send it over; no batch: padding alone."""
        self._write(self.form.cut(host.numpy()), batch, seats)
        self.packed.copy_(host, non_blocking=True)

    def _write(self, fields: Fields[np.ndarray], batch: Batch | None, seats: Sequence[Seat]) -> None:
        segments = batch.segments if batch is not None else ()
        rows, count, total = self.form.rows, len(segments), len(self.form.lengths)
        more = total - count  # segments of padding: a row each, the last one what is left
        lengths = np.array([*map(len, segments), *[1] * more])
        if more:
            lengths[-1] = rows - lengths[:-1].sum()
        starts = fields.starts
        starts[0] = 0
        np.cumsum(lengths, out=starts[1:])
        assert starts[-1] == rows, f"{starts[-1]} rows are laid out in a form of {rows}"
        numbers = np.repeat(np.arange(total), lengths)
        firsts = np.array([*(segment.position for segment in segments), *[0] * more])
        skipped = np.array([*(seat.skipped for seat in seats), *[0] * more])
        tokens = list(chain.from_iterable(segment.tokens for segment in segments))
        fields.tokens[: len(tokens)] = np.maximum(tokens, 0) if tokens else 0  # those still to be drawn come later
        fields.tokens[len(tokens) :] = 0
        fields.row_segments[:] = numbers
        fields.row_positions[:] = firsts[numbers] + np.arange(rows) - starts[numbers]
        fields.row_places[:] = fields.row_positions - skipped[numbers] * PAGE
        fields.slots[:] = [*(segment.slot for segment in segments), *[self._scratch_slot] * more]
        fields.tables[count:, 0] = self._scratch_page
        for table, seat in zip(fields.tables, seats, strict=False):
            table[: len(seat.places)] = seat.places
        if self.form.notes:
            noted = [None if seat.noted is None else (seat.noted, seat.table) for seat in seats]
            fields.noted[:] = np.array([pair or (0, self._scratch_slot) for pair in (*noted, *[None] * more)]).T

    def take_drawn(self, ahead: Ahead) -> None:
        """Tokens that were drawn on the device are put in there, without a stop at the host. Where none could be drawn
        any will do: what comes of it is thrown away."""
        count = len(ahead.rows)
        if ahead.rows == tuple(range(count)) and ahead.sources == ahead.rows:
            torch.maximum(ahead.tokens[:count], ZERO, out=self.tokens[:count])  # one launch, the new type included
        else:
            device = ahead.tokens.device
            drawn = ahead.tokens[torch.tensor(ahead.sources, device=device)]
            self.tokens[torch.tensor(ahead.rows, device=device)] = drawn.clamp(min=0).int()


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


def _aligned(size: int) -> int:
    """Fields begin on 16-byte edges: kernels are compiled by the alignment of what they get."""
    return -(-size // 4) * 4

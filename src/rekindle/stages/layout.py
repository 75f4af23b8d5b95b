"""A batch as one packed run of int32 on the device, and the Ragged that looks into it: one copy per forward.

The same layout serves a batch that is run once and a step that is recorded: there rows and tables are rounded up, and
padding lies in segments of its own, on a slot and a page that no other segment reads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from rekindle.batch import Batch
from rekindle.buffers import RECORDED_ROWS
from rekindle.kernels.ragged import Ragged
from rekindle.pool import SegmentPages
from rekindle.spec import PAGE
from rekindle.stages.types import PendingTokens

ZERO = torch.tensor(0)
LONGEST_BLOCK = PAGE  # rows of a block that is verified as a recorded step
LONGEST_OF_SEVERAL = 16  # rows of each of several blocks that are verified in one recorded step
CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, RECORDED_ROWS)  # rows, if recorded
LONGEST_CHUNK = CHUNKS[-1]  # with more rows the device has enough to do while the host launches
SHARED = 512  # rows of each of several prompts' chunks that share a recorded step …
SHARERS = {2: (256, 512, 1024), 4: (256, 512, 1024, 2048), 8: (RECORDED_ROWS,)}  # … and the steps' rows
# More of them share only chunks of the longest kind, and with so many rows together: padding takes time, too.
FEW_SHARERS = 4
MANY_FILL = RECORDED_ROWS * 5 // 8
LEAST_SHARED = min(size for sizes in SHARERS.values() for size in sizes)
NARROW = 128  # pages of all rows' tables together, up to which attention has a program for each

T = TypeVar("T", np.ndarray, torch.Tensor)


class Fields(NamedTuple, Generic[T]):
    tokens: T  # [rows]
    row_positions: T  # [rows]
    row_places: T  # [rows]
    row_segments: T  # [rows]
    starts: T  # [segments + 1]
    slots: T  # [segments]
    noted: T  # [2, segments] or nothing
    tables: tuple[T, ...]  # [segments, width] of every group


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The sizes of a layout. Batches of one shape can share a recorded step."""

    lengths: tuple[int, ...]  # of the segments, at most; 0: the segment takes whatever rows are left, as padding
    rows: int
    width: int  # pages of the widest table
    rewindable: bool
    notes: bool  # some query is noted
    far: bool = False  # some pages are read where they lie, in host memory
    coming: bool = False  # some are on their way to the device: every layer waits for its own
    groups: int = 1  # of layers, each with page tables of its own

    @classmethod
    def of(cls, batch: Batch, pages: Sequence[SegmentPages]) -> GraphShape:
        width = max(1, *(its_pages.places.shape[1] for its_pages in pages))
        notes = any(its_pages.noted is not None for its_pages in pages)
        far, coming = any(its_pages.far for its_pages in pages), any(its_pages.coming for its_pages in pages)
        lengths, groups = tuple(map(len, batch.segments)), len(pages[0].places)
        return cls(lengths, batch.rows, width, batch.rewindable, notes, far, coming, groups)

    def padded(self, widest: int = 0) -> GraphShape | None:
        """The shape of the recorded step that serves this one: decode rows, a block to verify, or, where it is known
        how wide tables become, a chunk, or the short chunks of several prompts. None: none does."""
        rows = round_up(self.rows)
        width = round_width(self.width, widest, rows)
        if self.rows == len(self.lengths) and not self.rewindable:
            return replace(self, lengths=(1,) * rows, rows=rows, width=width)
        if self.rewindable:
            if len(self.lengths) > 1:
                return self._padded_blocks(widest)
            return replace(self, lengths=(rows, 0), rows=rows, width=width) if rows <= LONGEST_BLOCK else None
        if self.notes or self.far or self.coming or self.width > widest:
            return None
        if len(self.lengths) > 1:
            return self._padded_chunks(widest)
        return chunk_shape(self.rows, widest, self.groups) if self.rows <= LONGEST_CHUNK else None

    def _padded_chunks(self, widest: int) -> GraphShape | None:
        """Chunks of several prompts; segments that none of them takes are padding, of a row at least."""
        if max(self.lengths) > SHARED:
            return None
        count = len(self.lengths)
        for sharers, sizes in SHARERS.items():
            rows = next((size for size in sizes if size >= self.rows + max(0, sharers - count)), None)
            if count <= sharers and rows is not None:
                return shared_shape(sharers, rows, widest, self.groups)
        return None

    def _padded_blocks(self, widest: int) -> GraphShape | None:
        """Blocks of several sequences, each of up to as many rows as the longest, rounded up. Whatever is left behind
        them is a segment of padding with fewer rows than that: the log has no room for more."""
        longest = round_up(max(self.lengths))
        if longest > LONGEST_OF_SEVERAL:
            return None
        segments = round_up(len(self.lengths))
        rows = -(-(self.rows + segments - len(self.lengths)) // longest) * longest
        width = round_width(self.width, widest, rows)
        return replace(self, lengths=(*(longest,) * segments, 0), rows=rows, width=width)

    @property
    def is_chunk(self) -> bool:
        """A recorded chunk, or several: segments that want the logits of their last rows at most, and padding."""
        return self.lengths[-1] == 0 and not self.rewindable

    @property
    def has_blocks(self) -> bool:
        """Blocks of several sequences, to be verified in one step."""
        return self.rewindable and len(self.lengths) > 2

    @property
    def size(self) -> int:
        return sum(map(_aligned, self._sizes()))

    def cut(self, packed: T) -> Fields[T]:
        """The fields of a packed run, as views."""
        parts, at = list[T](), 0
        for size in self._sizes():
            parts.append(packed[at : at + size])
            at += _aligned(size)
        tokens, positions, places, numbers, starts, slots, noted = parts[: -self.groups]
        tables = list[T]()
        for table in parts[-self.groups :]:
            tables.append(table.reshape(len(self.lengths), self.width))
        return Fields(tokens, positions, places, numbers, starts, slots, noted.reshape(2, -1), tuple(tables))

    def _sizes(self) -> tuple[int, ...]:
        rows, segments = self.rows, len(self.lengths)
        noted = 2 * segments if self.notes else 0
        return (rows, rows, rows, rows, segments + 1, segments, noted, *[segments * self.width] * self.groups)


class Layout:
    """One shape with its memory on the device."""

    def __init__(self, shape: GraphShape, device: torch.device, scratch_slot: int, scratch_page: int) -> None:
        self.shape = shape
        self.packed = torch.zeros(shape.size, dtype=torch.int32, device=device)
        self._scratch_slot = scratch_slot
        self._scratch_page = scratch_page
        fields = shape.cut(self.packed)
        self.tokens = fields.tokens
        self.ragged = Ragged(
            starts=fields.starts,
            slots=fields.slots,
            row_positions=fields.row_positions,
            row_places=fields.row_places,
            row_segments=fields.row_segments,
            tables=fields.tables[0],
            lengths=shape.lengths,
            rewindable=shape.rewindable,
            noted=fields.noted if shape.notes else None,
            far=shape.far,
            coming=shape.coming,
            group_tables=fields.tables if shape.groups > 1 else (),
        )

    def fill(self, batch: Batch | None, pages: Sequence[SegmentPages], host: torch.Tensor) -> None:
        """Lay out the batch in host memory and send it over; no batch: padding alone."""
        self._write(self.shape.cut(host.numpy()), batch, pages)
        self.packed.copy_(host, non_blocking=True)

    @property
    def _last_position(self) -> int:
        """That a table of this width holds."""
        return self.shape.width * PAGE - 1

    def _write(self, fields: Fields[np.ndarray], batch: Batch | None, pages: Sequence[SegmentPages]) -> None:
        segments = batch.segments if batch is not None else ()
        rows, count, total = self.shape.rows, len(segments), len(self.shape.lengths)
        more = total - count  # segments of padding
        real = [len(segment) for segment in segments]
        lengths = np.array([*real, *_padding(self.shape.lengths[count:], rows - sum(real))])
        starts = fields.starts
        starts[0] = 0
        np.cumsum(lengths, out=starts[1:])
        assert starts[-1] == rows, f"{starts[-1]} rows are laid out in a shape of {rows}"
        numbers = np.repeat(np.arange(total), lengths)
        firsts = np.array([*(segment.position for segment in segments), *[0] * more])
        skipped = np.array([*(its_pages.skipped for its_pages in pages), *[0] * more])
        tokens = list(chain.from_iterable(segment.tokens for segment in segments))
        fields.tokens[: len(tokens)] = np.maximum(tokens, 0) if tokens else 0  # those still to be drawn come later
        fields.tokens[len(tokens) :] = 0
        fields.row_segments[:] = numbers
        positions = firsts[numbers] + np.arange(rows) - starts[numbers]
        # Of padding there may be more rows than a sequence has positions: they stay inside its table.
        fields.row_positions[:] = np.where(numbers < count, positions, np.minimum(positions, self._last_position))
        fields.row_places[:] = fields.row_positions - skipped[numbers] * PAGE
        fields.slots[:] = [*(segment.slot for segment in segments), *[self._scratch_slot] * more]
        for group, tables in enumerate(fields.tables):
            tables[count:, : -(-rows // PAGE)] = self._scratch_page
            for table, its_pages in zip(tables, pages, strict=False):
                table[: its_pages.places.shape[1]] = its_pages.places[group]
        if self.shape.notes:
            noted = [None if its_pages.noted is None else (its_pages.noted, its_pages.table) for its_pages in pages]
            fields.noted[:] = np.array([pair or (0, self._scratch_slot) for pair in (*noted, *[None] * more)]).T

    def take_pending(self, pending: PendingTokens) -> None:
        """Tokens that were drawn on the device are put in there, without a stop at the host: a launch for each run of
        them, the new type included. Where none could be drawn any will do: what comes of it is thrown away."""
        for row, source, count in pending.runs():
            torch.maximum(pending.tokens[source : source + count], ZERO, out=self.tokens[row : row + count])


def _padding(bounds: Sequence[int], rows: int) -> list[int]:
    """So many rows over segments of padding: at least one each, at most its bound; where that is 0, what is left."""
    lengths = [min(1, bound) for bound in bounds]
    left = rows - sum(lengths)
    for number, bound in enumerate(bounds):
        taken = left if bound == 0 else min(left, bound - lengths[number])
        lengths[number] += taken
        left -= taken
    return lengths


def fills_its_step(batch: Batch) -> bool:
    """Of chunks: whether the recorded step that serves them has no padding, if it has one of their size at all."""
    count = len(batch.segments)
    return count == 1 or batch.rows in SHARERS.get(count, ())


def round_up(count: int) -> int:
    """1, 2, 4, 8, 12, 16, 24, 32, 48, 64, …: at most a third of the rows are padding."""
    size = 1
    while size < count:
        size = size * 3 // 2 if size >= 8 and size & (size - 1) == 0 else 1 << size.bit_length()
    return size


def round_width(pages: int, widest: int = 0, rows: int = 1) -> int:
    """Page-table widths in powers of four from 16: few graphs, and short contexts do not pay for long ones. Where it is
    known how wide tables become, only widths for which attention is cut up in another way, and then the widest."""
    width = 16
    while width < pages:
        width *= 4
    if pages > widest:
        return width
    return min(width, widest) if width * rows <= NARROW else widest


def chunk_shape(rows: int, widest: int, groups: int = 1) -> GraphShape:
    """Of the recorded chunk that serves so many rows. One width serves all: among many rows what is idle in attention
    does not count."""
    rows = next(size for size in CHUNKS if size >= rows)
    return GraphShape((rows, 0), rows, widest, rewindable=False, notes=False, groups=groups)


def shared_shape(sharers: int, rows: int, widest: int, groups: int = 1) -> GraphShape:
    """Of the recorded step that serves chunks of up to so many prompts."""
    return GraphShape((*(min(SHARED, rows),) * sharers, 0), rows, widest, False, notes=False, groups=groups)


def recorded_shapes(slots: int, widest: int, chunk: int, groups: int = 1, block: int = 0) -> list[GraphShape]:
    """What a stage records before its first request: decode rows over every width, blocks of one sequence of up to
    `block` rows, and chunks of up to `chunk` rows, shortest first, of one prompt and of several."""
    decode = [
        GraphShape((1,) * rows, rows, width, False, notes=False, groups=groups)
        for rows, width in _sizes(1, slots, widest)
    ]
    blocks = [
        GraphShape((rows, 0), rows, width, True, notes=False, groups=groups)
        for rows, width in _sizes(2, min(block, LONGEST_BLOCK), widest)
    ]
    longest = min(max(chunk, 2), LONGEST_CHUNK)
    chunks = dict.fromkeys(chunk_shape(rows, widest, groups) for rows in (*CHUNKS, longest) if rows <= longest)
    shared = [
        shared_shape(sharers, rows, widest, groups)
        for sharers, sizes in SHARERS.items()
        for rows in sizes[: bisect_right(sizes, longest) + 1]  # padding may ask for the next size
        if sharers // 2 < slots and (sharers <= FEW_SHARERS or longest == LONGEST_CHUNK)
    ]
    return [*decode, *blocks, *sorted((*chunks, *shared), key=lambda shape: shape.rows)]


def _sizes(least: int, most: int, widest: int) -> dict[tuple[int, int], None]:
    """Rows and widths of the recorded steps that serve from `least` to `most` rows."""
    counts = sorted({round_up(rows) for rows in range(least, most + 1)})
    pages = (1, min(64, widest), widest)
    return dict.fromkeys((rows, round_width(count, widest, rows)) for rows in counts for count in pages)


def _aligned(size: int) -> int:
    """Fields begin on 16-byte edges: kernels are compiled by the alignment of what they get."""
    return -(-size // 4) * 4

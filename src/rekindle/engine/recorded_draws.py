"""Draws that are recorded once and replayed: one upload and one launch, whatever the settings of the rows.

A draw is recorded per number of rows, rounded up, and width of the selection. What it does with each row (penalties,
mask, settings, a forced token, where the token goes) is written by the host into one block of pinned memory, see
`kernels/sampling/ordered.py`. Rows that cannot be drawn so are drawn by `sampler.draw`; the tokens are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rekindle.buffers import DRAWN_ROWS
from rekindle.engine.sampler import COLDEST, HIGHEST, Drawable, draw, has_penalties, uniform
from rekindle.grammar.guide import Mask
from rekindle.kernels.host_buffers import HostBuffers
from rekindle.stages.layout import round_up

log = logging.getLogger("rekindle.engine")

Recorder = Callable[[Callable[[], None]], Callable[[], None]]  # a step -> how it is run again

OPEN, GREEDY = 0, 1  # widths of draws among all of the vocabulary and of the highest, as in `ordered`
# Widths that are recorded before the first request: no top-k, top-k 20, and temperature 0 with a card's penalties.
LIKELY = (OPEN, 32, GREEDY)


class _HostParts(NamedTuple):
    """`OrderParts` in host memory."""

    orders: NDArray[np.int64]
    settings: NDArray[np.float32]
    masks: NDArray[np.int32]


class RecordedDraws:
    """Of one device, and of the thread that draws there."""

    def __init__(self, record: Recorder, device: torch.device, vocab: int, slots: int) -> None:
        """vocab: tokens that may be drawn. slots: rows that are drawn among all of the vocabulary at most, since that
        takes a copy of their logits."""
        from rekindle.kernels.sampling import ordered, triton  # not where there is no Triton

        self._ordered, self._triton = ordered, triton
        self._record = record
        self._device = device
        self._vocab = vocab
        self._most_open = min(slots, DRAWN_ROWS)
        size = ordered.block_words(DRAWN_ROWS, vocab, DRAWN_ROWS)
        self._block = torch.zeros(size, dtype=torch.int64, device=device)  # all recorded draws read it
        self._host = HostBuffers((size,), device, torch.int64)
        self._parts: dict[tuple[int, int], _HostParts] = {}  # by buffer and rows
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}  # by rows and width
        self._refused = set[tuple[int, int]]()  # that could not be recorded: memory was short

    def make_ready(self) -> None:
        """Record what requests are likely to need, the largest first: the others fit into its memory."""
        for width in LIKELY:
            for rows in sorted({self._padded(count, width) for count in range(1, self._most_open + 1)}, reverse=True):
                self._replay_of(rows, width)

    def __call__(self, logits: torch.Tensor, rows: Sequence[Drawable]) -> torch.Tensor:
        """`sampler.draw`."""
        width = self._width(rows) if self._reads(logits) else None
        if width is None or len(rows) > (self._most_open if width == OPEN else DRAWN_ROWS):
            return draw(logits, rows)
        with torch.cuda.device_of(logits):
            return self._draw(logits, rows, width) if self._is_ready(len(rows), width) else draw(logits, rows)

    def _is_ready(self, rows: int, width: int) -> bool:
        """Whether the draw is recorded, now or before. What cannot be recorded is not tried again."""
        key = self._padded(rows, width), width
        if key in self._refused:
            return False
        try:
            self._replay_of(*key)
        except RuntimeError as error:
            log.warning("draws of %d rows are not recorded, and take longer: %s", key[0], error)
            self._refused.add(key)
        return key not in self._refused

    def _reads(self, logits: torch.Tensor) -> bool:
        """Whether they lie as the kernels expect: rows begin at multiples of 16 bytes."""
        aligned = logits.data_ptr() % 16 == 0 and (logits.shape[0] == 1 or logits.stride(0) % 4 == 0)
        lie_so = logits.stride(1) == 1 and aligned
        return lie_so and logits.dtype is torch.float32 and logits.shape[1] == self._vocab

    def _width(self, rows: Sequence[Drawable]) -> int | None:
        """Of the selection that serves all rows; None where none does, or where two plain launches do it all."""
        plain, opens, greedy, highest = True, 0, 0, 0
        for row in rows:
            s = row.sampling
            if s.logit_bias or len(row.drafted) > self._ordered.MOST_DRAFTED or s.top_k > self._triton.MOST:
                return None
            is_greedy = s.temperature < COLDEST
            plain = plain and is_greedy and not has_penalties(s) and row.mask is None
            greedy += is_greedy
            opens += not is_greedy and s.top_k == 0
            highest = max(highest, s.top_k)
        if plain or opens not in (0, len(rows)):
            return None
        if greedy == len(rows):
            return GREEDY
        return OPEN if opens else self._triton.width_for(highest)

    def _draw(self, logits: torch.Tensor, rows: Sequence[Drawable], width: int) -> torch.Tensor:
        padded = self._padded(len(rows), width)
        replay = self._replay_of(padded, width)
        # New memory for every draw: the next step takes its tokens from here while others are drawn.
        drawn = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        with self._host.next() as host:
            masks = self._write(self._parts_of(host, padded), logits, rows, drawn)
            used = self._ordered.block_words(padded, self._vocab, masks)
            self._block[:used].copy_(host[:used], non_blocking=True)
        replay()
        for row in rows:
            if _counts(row):
                row.token_counts.note_drawn()
        return drawn

    def _padded(self, rows: int, width: int) -> int:
        return min(round_up(rows), self._most_open if width == OPEN else DRAWN_ROWS)

    def _parts_of(self, host: torch.Tensor, padded: int) -> _HostParts:
        key = host.data_ptr(), padded
        if key not in self._parts:
            views = self._ordered.parts_of(host, padded, self._vocab)
            self._parts[key] = _HostParts(*(view.numpy() for view in views))
        return self._parts[key]

    def _write(self, to: _HostParts, logits: torch.Tensor, rows: Sequence[Drawable], drawn: torch.Tensor) -> int:
        """The orders of all rows; behind them padding, which does nothing. Returns how many masks there are."""
        count, at = len(rows), self._ordered.FIELDS
        first, step, out = logits.data_ptr(), 4 * logits.stride(0), drawn.data_ptr()
        orders, masks = list[tuple[int, ...]](), list[Mask]()
        for number, row in enumerate(rows):
            if (mask := row.mask) is not None:
                masks.append(mask)
            own_mask = 0 if mask is None else len(masks)
            orders.append((first + number * step, out + 8 * number, own_mask, *_fields(row, logits)))
            if row.drafted:
                to.orders[number, at : at + len(row.drafted)] = row.drafted
        to.orders[:count, :at] = orders
        to.settings[:, :count] = np.array([_settings(row) for row in rows]).T
        to.orders[count:] = 0
        to.settings[:, count:] = 0
        _write_masks(to.masks, masks)
        return len(masks)

    def _replay_of(self, rows: int, width: int) -> Callable[[], None]:
        """Recorded over padding alone, which writes nothing."""
        if (rows, width) not in self._replays:
            self._block.zero_()
            parts = self._ordered.parts_of(self._block, rows, self._vocab)
            step = self._ordered.draw_ordered
            self._replays[rows, width] = self._record(lambda: step(parts, self._vocab, width))
        return self._replays[rows, width]


def _counts(row: Drawable) -> bool:
    """Whether what is drawn is counted behind the draw: in a block it may not stay."""
    return not row.in_block and has_penalties(row.sampling)


def _fields(row: Drawable, logits: torch.Tensor) -> tuple[int, int, int, int]:
    """Of its order, those behind the mask."""
    counts, forced = 0, row.forced
    if has_penalties(row.sampling):
        length = row.position - len(row.drafted)
        counts = row.token_counts.up_to(length, row.tokens, row.prompt_length, logits).data_ptr()
    return 0 if forced is None else forced + 1, counts, 0 if row.in_block else counts, len(row.drafted)


def _settings(row: Drawable) -> tuple[float, ...]:
    """In the order that `kernels/sampling/ordered.py` names."""
    s = row.sampling
    return (
        s.temperature if s.temperature >= COLDEST else 0.0,
        s.top_k,
        s.top_p,
        s.min_p,
        min(uniform(s.seed, row.position), HIGHEST),
        s.presence_penalty,
        s.frequency_penalty,
        s.repetition_penalty,
    )


def _write_masks(to: NDArray[np.int32], masks: Sequence[Mask]) -> None:
    """Tokens beyond a mask are not allowed."""
    for room, mask in zip(to, masks, strict=False):
        words = min(len(mask), len(room))
        room[:words] = mask[:words]
        room[words:] = 0

"""Pages that are away, streamed through two small buffers on the device while the rows attend what has arrived.

For many rows, which would read a page over PCIe many times if each read it where it lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rekindle.buffers import STAGED_PAGES
from rekindle.kernels.paging import fetch_pages
from rekindle.pool.page_addresses import sent
from rekindle.pool.page_memory import PageMemory
from rekindle.pool.page_table import HeldPage
from rekindle.spec import PAGE


@dataclass(frozen=True, slots=True, eq=False)
class AwayPages:
    """Up to STAGED_PAGES pages that are away."""

    pages: list[HeldPage]
    addresses: Tensor | None  # int64 [layers, pages], if the device reads all of them itself

    def data(self, layer: int) -> list[Tensor]:
        copies = [page.copies for page in self.pages if page.copies is not None]
        assert len(copies) == len(self.pages), "a page that is away has copies"
        return [copy[layer].data for copy in copies]


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Where the pages that some rows attend lie, as tensors on the device; the same for all layers of the pool."""

    places: Tensor  # int32, of resident pages
    positions: Tensor  # int32, the first position in each
    away: list[AwayPages]

    @classmethod
    def of(cls, pages: Sequence[HeldPage], attended: Sequence[int], memory: PageMemory) -> Route:
        def int32(values: Sequence[int]) -> Tensor:
            return sent(torch.tensor(values, dtype=torch.int32), memory.device)

        away = [i for i in attended if pages[i].place is None]
        resident = {i: place for i in attended if (place := pages[i].place) is not None}
        groups = []
        for at in range(0, len(away), STAGED_PAGES):
            group = [pages[i] for i in away[at : at + STAGED_PAGES]]
            groups.append(AwayPages(group, memory.addresses_of(group)))
        return cls(int32(list(resident.values())), int32([i * PAGE for i in resident]), groups)


class StagingBuffers:
    """Two buffers on the device, filled in turn on a stream of their own."""

    def __init__(self, kv: Tensor) -> None:
        self._buffers = [torch.empty((STAGED_PAGES, *kv.shape[1:]), dtype=kv.dtype, device=kv.device) for _ in range(2)]
        self._stream = torch.cuda.Stream(kv.device)
        self._index = torch.arange(STAGED_PAGES, dtype=torch.int32, device=kv.device)
        # Where the pages of each buffer lie, [1, STAGED_PAGES].
        steps = torch.arange(STAGED_PAGES, device=kv.device) * self._buffers[0][0].nbytes
        self._places = [(steps + buffer.data_ptr())[None] for buffer in self._buffers]
        self._read = [torch.cuda.Event() for _ in range(2)]  # the buffer's last reader is done
        self._turn = 0

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Read nothing before all that was handed to the stream so far is done."""
        self._stream.wait_stream(stream)

    @contextmanager
    def staged(self, away: AwayPages, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A buffer and the places of these pages in it; it is filled again once the readers in the block are done."""
        self._turn = 1 - self._turn
        buffer, read = self._buffers[self._turn], self._read[self._turn]
        current = torch.cuda.current_stream(buffer.device)
        self._stream.wait_event(read)
        count = len(away.pages)
        with torch.cuda.stream(self._stream):
            if away.addresses is not None:
                targets = self._places[self._turn][:, :count]
                fetch_pages(targets, away.addresses[layer : layer + 1], buffer[0].nbytes)
            else:
                for place, data in zip(buffer, away.data(layer), strict=False):
                    place.copy_(data, non_blocking=True)
        current.wait_stream(self._stream)
        try:
            yield buffer, self._index[:count]
        finally:
            read.record(current)


class SharedStaging:
    """The buffers of all readers of a stage, made when the first one needs them: layers run one after another."""

    def __init__(self) -> None:
        self._buffers: StagingBuffers | None = None

    def of(self, kv: Tensor) -> StagingBuffers:
        if self._buffers is None:
            self._buffers = StagingBuffers(kv)
        return self._buffers

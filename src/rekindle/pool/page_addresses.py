"""Where a GPU finds every page: a number means the same address in every layer's row of one table on the device.

0 …     places of the pool, the scratch page, and what others lend: all that lies in one run with the pool
… then  host_page_ids: copies in pinned host memory, which a GPU reads itself
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rekindle.kernels.paging import fetch_listed


class PageAddresses:
    """A page's copies keep their host_page_id while they live, so paging a page out or in changes nothing here."""

    def __init__(self, kv: Sequence[torch.Tensor], host_pages: int, most: int | None = None) -> None:
        """most: pages that come at once; None: as many as `kv` has."""
        numbers, self.page_bytes = kv[0].shape[0], kv[0][0].nbytes
        places = torch.arange(numbers) * self.page_bytes
        own = torch.stack([places + layer.data_ptr() for layer in kv])
        self.table = torch.zeros(len(kv), numbers + host_pages, dtype=torch.int64, device=kv[0].device)
        self.table[:, :numbers] = own.to(self.table.device)
        self._free = list(range(numbers + host_pages - 1, numbers - 1, -1))
        self._unsent: dict[int, tuple[int, ...]] = {}  # host_page_ids that the device does not know yet
        # Which page comes to which place, as `fetch_listed` reads it, behind their number.
        listed = numbers if most is None else most
        self._page_ins = torch.zeros(2, 1 + listed, dtype=torch.int32, device=self.table.device)
        self.fetch(0)  # nothing is listed: compiled now, not by the first page-in

    def register(self, addresses: tuple[int, ...]) -> int:
        """A host_page_id for copies at these addresses, one per layer."""
        host_page_id = self._free.pop()
        self._unsent[host_page_id] = addresses
        return host_page_id

    def release(self, host_page_id: int) -> None:
        self._free.append(host_page_id)

    def send(self) -> None:
        """Writes new addresses to the table on the current stream, before anything there reads it."""
        if self._unsent:
            device = self.table.device
            addresses = torch.tensor(list(self._unsent.values())).T.contiguous()
            self.table.index_copy_(1, sent(torch.tensor(list(self._unsent)), device), sent(addresses, device))
            self._unsent.clear()

    def of(self, numbers: Sequence[int]) -> torch.Tensor:
        """Addresses of these pages, int64 [layers, pages]."""
        self.send()
        return self.table.index_select(1, sent(torch.tensor(numbers), self.table.device))

    def list_page_ins(self, places: Mapping[int, int]) -> None:
        """What `fetch` brings from now on, on the current stream: {host_page_id: place}."""
        self.send()
        listed = np.zeros(self._page_ins.shape, np.int32)
        listed[0, 0] = len(places)
        listed[:, 1 : 1 + len(places)] = [*places.values()], [*places.keys()]
        self._page_ins.copy_(pinned(torch.from_numpy(listed), self._page_ins.device), non_blocking=True)

    def fetch(self, layer: int) -> None:
        """The listed page-ins of this layer; it can be recorded."""
        fetch_listed(self.table, self._page_ins, layer, self.page_bytes)


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A few numbers on the device."""
    return pinned(values, device).to(device, non_blocking=True)


def pinned(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On their way to a GPU: from memory that is not pinned the driver would first wait for the whole stream."""
    return values.pin_memory() if device.type == "cuda" else values

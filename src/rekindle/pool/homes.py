"""Where a GPU finds every page: a number means the same address in every layer's row of one table on the device.

0 … places - 1     the places of the pool
places             the scratch page
places + 1 …       berths: copies in pinned host memory, which a GPU reads itself
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rekindle.kernels.paging import fetch_listed


class Homes:
    """A page's copies keep their berth while they live, so a page that goes or comes back changes nothing here."""

    def __init__(self, kv: Sequence[torch.Tensor], berths: int) -> None:
        numbers, self.page_bytes = kv[0].shape[0], kv[0][0].nbytes
        places = torch.arange(numbers) * self.page_bytes
        own = torch.stack([places + layer.data_ptr() for layer in kv])
        self.table = torch.zeros(len(kv), numbers + berths, dtype=torch.int64, device=kv[0].device)
        self.table[:, :numbers] = own.to(self.table.device)
        self._free = list(range(numbers + berths - 1, numbers - 1, -1))
        self._news: dict[int, tuple[int, ...]] = {}  # berths that the device does not know yet
        # What comes back to which place, as `fetch_listed` reads it: at most every place of the pool.
        self._ways = torch.zeros(2, numbers, dtype=torch.int32, device=self.table.device)
        self.fetch(0)  # nothing is listed: compiled now, not amid a request

    def take(self, addresses: tuple[int, ...]) -> int:
        """A berth for copies at these addresses, one per layer."""
        berth = self._free.pop()
        self._news[berth] = addresses
        return berth

    def give_back(self, berth: int) -> None:
        self._free.append(berth)

    def send(self) -> None:
        """Tell the device, on the current stream, before anything there reads the table; layers wait for it."""
        if self._news:
            device = self.table.device
            addresses = torch.tensor(list(self._news.values())).T.contiguous()
            self.table.index_copy_(1, sent(torch.tensor(list(self._news)), device), sent(addresses, device))
            self._news.clear()

    def of(self, numbers: Sequence[int]) -> torch.Tensor:
        """Addresses of these pages, int64 [layers, pages]."""
        self.send()
        return self.table.index_select(1, sent(torch.tensor(numbers), self.table.device))

    def list_returns(self, returns: Mapping[int, int]) -> None:
        """What `fetch` brings from now on, on the current stream: {berth: place}."""
        self.send()
        ways = np.zeros(self._ways.shape, np.int32)
        ways[0, 0] = len(returns)
        ways[:, 1 : 1 + len(returns)] = [*returns.values()], [*returns.keys()]
        self._ways.copy_(pinned(torch.from_numpy(ways), self._ways.device), non_blocking=True)

    def fetch(self, layer: int) -> None:
        """What is listed, in this layer; it can be recorded."""
        fetch_listed(self.table, self._ways, layer, self.page_bytes)


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A few numbers on the device."""
    return pinned(values, device).to(device, non_blocking=True)


def pinned(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On their way to a GPU: from memory that is not pinned the driver would first wait for the whole stream."""
    return values.pin_memory() if device.type == "cuda" else values

"""Where the bytes of pages are, and how they travel: places on the device, copies in host memory, and page-ins.

On a GPU every page is found by number (`PageAddresses`), pages come back on a stream of their own (`PageIns`), and
copies that are not pinned go through pinned slabs (`HostCopies`). On a CPU all of these are plain copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rekindle.buffers import STOCK
from rekindle.kernels.device_memory import DeviceMemory, PagePlaces, zeros
from rekindle.kernels.paging import fetch_pages
from rekindle.pool.copies import HostCopies, stack_or_view
from rekindle.pool.page_addresses import PageAddresses, sent
from rekindle.pool.page_ins import PageIns, Recorder
from rekindle.pool.page_table import HeldPage
from rekindle.spec import PAGE


class PageMemory:
    """The memory of a pool's pages. A place holds one page of all layers of the pool alike."""

    def __init__(
        self,
        places: int,
        layers: int,
        kv_heads: int,
        row: int,
        dtype: torch.dtype,
        device: torch.device,
        host_pages: int = 0,
        slabs: int = STOCK,
        record: Recorder | None = None,
        copies: HostCopies | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """slabs: of pinned memory, kept ready for captures.
        copies: of another pool of the stage, whose slabs this one shares.
        record: records the page-in, a launch per layer, as a graph; without it the launches are made each time.
        memory: that the pages are cut from, beside others who may lend more of it; None: memory of their own."""
        self.places = places
        self.total = places + host_pages
        step, shape = 1, (2, PAGE, kv_heads, row)
        if memory is None:
            self.kv = [zeros((places + 1, *shape), dtype, device) for _ in range(layers)]
        else:
            want = PagePlaces(memory.pages.page_bytes, layers, places + 1)
            assert memory.pages == want, f"the memory was cut for {memory.pages}, the pool has {want}"
            self.kv, step = memory.view_pages(shape, dtype), layers
        self._first_places = range(0, places * step, step)  # those that are the pool's own
        # One place more than the pool has: padded rows of a replayed graph write there, and nothing reads it.
        self.scratch_page = places * step
        self.device = device
        self.page_ins = PageIns(layers, device) if device.type == "cuda" else None
        self.copies = copies or HostCopies(device, slabs)
        # An id for every page: while a table is restored all its pages are away, whatever places are free.
        self.addresses = PageAddresses(self.kv, self.total, self.total) if self.copies.pinned and layers else None
        if memory is not None and self.addresses is not None:
            self._copy_places([self.scratch_page], [self.scratch_page])  # compiled now, not when a page first moves
        self._record = record
        self._fetch_all: Callable[[], None] | None = None  # set, and recorded, at the first page-in

    def stop(self) -> None:
        """End the threads. Copies that snapshots hold stay good."""
        self.copies.stop()

    # Reading

    def data(self, page: HeldPage, layer: int) -> torch.Tensor:
        """[2, PAGE, kv_heads, row] on the device or, of a page that is away, in host memory."""
        if page.place is not None:
            return self.kv[layer][page.place]
        assert page.copies is not None, "a page that is away has copies"
        return page.copies[layer].data

    def all_data(self, page: HeldPage) -> list[torch.Tensor]:
        return [self.data(page, layer) for layer in range(len(self.kv))]

    def number_of(self, page: HeldPage) -> int:
        """By which page tables name the page: its place, its host_page_id, or the scratch page if it has neither."""
        number = page.host_page_id if page.place is None else page.place
        return self.scratch_page if number is None else number

    def addresses_of(self, pages: Sequence[HeldPage]) -> torch.Tensor | None:
        """Where the pages lie, int64 [layers, pages] on the device; None where it cannot read all of them itself."""
        if self.addresses is None or any(page.place is None and page.host_page_id is None for page in pages):
            return None
        return self.addresses.of([self.number_of(page) for page in pages])

    def keys_of(self, pages: Sequence[HeldPage]) -> torch.Tensor:
        """The keys of all their positions, on the device: [layers, pages, PAGE, kv_heads, row]."""
        sources = self.addresses_of(pages)
        if sources is None:
            by_layer = ([self.data(page, i)[0].to(self.device) for page in pages] for i in range(len(self.kv)))
            return torch.stack([torch.stack(layer) for layer in by_layer])
        kv = self.kv[0]
        keys = torch.empty(len(self.kv), len(pages), *kv.shape[2:], dtype=kv.dtype, device=self.device)
        nbytes = keys[0, 0].nbytes  # a page begins with its keys
        places = torch.arange(sources.numel(), device=self.device) * nbytes + keys.data_ptr()
        fetch_pages(places.view(sources.shape), sources, nbytes)
        return keys

    # Host copies by number

    def _register(self, page: HeldPage) -> None:
        """Give the copies of a page that is away an id, if they are pinned. Copies from disk or a shard are not."""
        copies = page.copies or ()
        if self.addresses is not None and page.host_page_id is None and all(copy.pinned for copy in copies):
            page.host_page_id = self.addresses.register(tuple(copy.address for copy in copies))

    def _unregister(self, page: HeldPage) -> None:
        if page.host_page_id is not None and self.addresses is not None:
            self.addresses.release(page.host_page_id)
        page.host_page_id = None

    # Bringing pages to the device

    @property
    def under_way(self) -> bool:
        """Some page-ins have not been waited for."""
        return self.page_ins is not None and self.page_ins.under_way

    def wait_for(self, layer: int) -> None:
        """What is handed to the device from now on finds the pages of this layer in their places."""
        if self.page_ins is not None:
            self.page_ins.wait_for(layer)

    def join(self) -> None:
        """The same of all layers."""
        if self.page_ins is not None:
            self.page_ins.join()

    def _on_page_in_stream(self, move: Callable[[], None]) -> None:
        """The host and the layers before go on meanwhile."""
        if self.page_ins is None:
            move()
            return
        with self.page_ins.handing_over():
            move()

    def _write(self, page: HeldPage, data: Sequence[torch.Tensor]) -> None:
        """data, one [2, PAGE, kv_heads, row] per layer, to the place of the page."""
        for layer, tensor in zip(self.kv, data, strict=True):
            layer[page.place].copy_(tensor, non_blocking=True)

    def _copy_places(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """From place to place on the device, in the order of the current stream."""
        if self.addresses is not None:
            to, at = self.addresses.of(targets), self.addresses.of(sources)
            fetch_pages(to, at, self.addresses.page_bytes)
            return
        for layer in self.kv:
            for source, target in zip(sources, targets, strict=True):
                layer[target].copy_(layer[source])

    def _fetch(self, pages: Sequence[HeldPage]) -> None:
        """Copies in host memory to the places of the pages; a GPU reads those that are pinned itself."""
        pinned = {
            page.host_page_id: page.place
            for page in pages
            if page.host_page_id is not None and page.place is not None
        }  # fmt: skip
        others = [page for page in pages if page.host_page_id is None]
        if self.copies.pinned and others:
            self._upload(others)
        elif others:
            for page in others:
                self._write(page, [copy.data for copy in page.copies or ()])
        if self.addresses is not None:
            self.addresses.list_page_ins(pinned)
        if self._fetch_all is None:
            self._fetch_all = self._fetch_layers if self._record is None else self._record(self._fetch_layers)
        self._fetch_all()

    def _fetch_layers(self) -> None:
        """The listed page-ins, layer by layer."""
        for layer in range(len(self.kv)):
            if self.addresses is not None:
                self.addresses.fetch(layer)
            if self.page_ins is not None:
                self.page_ins.all_handed_over(layer)

    def _upload(self, pages: Sequence[HeldPage]) -> None:
        """Pages that are not pinned, as many at a time as a slab holds, with all their layers."""
        places = sent(torch.tensor([page.place for page in pages]), self.device)
        columns = (stack_or_view([copy.data for copy in page.copies]) for page in pages if page.copies is not None)
        for group in self.copies.through(columns):
            arrived = stack_or_view(group).to(self.device, non_blocking=True)  # [pages, layers, 2, PAGE, kv_heads, row]
            for i, layer in enumerate(self.kv):
                layer[places[: len(group)]] = arrived[:, i]
            places = places[len(group) :]

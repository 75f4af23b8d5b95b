"""Pages on their way back to the device, on a stream of their own.

They come layer by layer, and a layer waits for its own pages only: the PCIe bus is at work while the layers before it
compute. A recorded step waits too, for what is under way when it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch


class Recorder(Protocol):
    def __call__(self, step: Callable[[], None], warm: Callable[[], None] | None = None) -> Callable[[], None]:
        """Gives a function that replays the step. Before, it runs the step once, or `warm`, which only loads the step's
        kernels, where that is given."""


class PageIns:
    def __init__(self, layers: int, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # External: a graph that waits for one looks at it anew whenever it is launched. HIP has none.
        self._arrived = [torch.cuda.Event(external=True) for _ in range(layers)] if torch.version.hip is None else []
        for arrived in self._arrived:
            arrived.record(self._stream)  # a wait for an event that was never recorded would leave no node in a graph
        self.under_way = False  # the current stream may not have waited for some page-ins

    @property
    def by_layer(self) -> bool:
        """A layer can wait for its own pages. Otherwise the stream waits for all after `handing_over`."""
        return bool(self._arrived)

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """Copies made in the block wait for launches that still read the places; the host waits for nothing."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self.under_way = True
        with torch.cuda.stream(self._stream):
            yield
        if not self.by_layer:
            self.join()

    def all_handed_over(self, layer: int) -> None:
        """Inside the block: the copies of this layer are complete; it can be recorded."""
        if self.by_layer:
            self._arrived[layer].record(torch.cuda.current_stream(self._device))

    def wait_for(self, layer: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._arrived[layer])

    def join(self) -> None:
        """What is handed to the current stream from now on finds every page in its place."""
        if self.under_way:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self.under_way = False

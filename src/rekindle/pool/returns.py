"""Pages on their way back to the device, on a stream of their own.

They come layer by layer, and a layer waits for its own pages only: the link is at work while the layers before it
compute. A recorded step waits too, for what is under way when it is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Recorder = Callable[[Callable[[], None]], Callable[[], None]]  # runs a step, and gives what runs it again


class Returns:
    def __init__(self, layers: int, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # External: a graph that waits for one looks at it anew whenever it is launched. HIP has none.
        self._here = [torch.cuda.Event(external=True) for _ in range(layers)] if torch.version.hip is None else []
        for here in self._here:
            here.record(self._stream)  # one that was never recorded would leave nothing in a graph that waits for it
        self.under_way = False  # something that the current stream may not have waited for

    @property
    def by_layer(self) -> bool:
        """A layer can wait for its own pages. Where not, everything is waited for as it is handed over."""
        return bool(self._here)

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """What is handed over in the block waits for whoever still reads the places, and the host for nothing."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self.under_way = True
        with torch.cuda.stream(self._stream):
            yield
        if not self.by_layer:
            self.join()

    def all_handed_over(self, layer: int) -> None:
        """All that this layer waits for, inside the block; it can be recorded."""
        if self.by_layer:
            self._here[layer].record(torch.cuda.current_stream(self._device))

    def wait_for(self, layer: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._here[layer])

    def join(self) -> None:
        """What is handed to the current stream from now on finds everything there."""
        if self.under_way:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self.under_way = False

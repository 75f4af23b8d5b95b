"""Tensors on their way from a device to host memory, without a wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

_idle: dict[tuple[torch.dtype, torch.Size], list[torch.Tensor]] = {}  # pinned memory, by what fits it


def _pinned(like: torch.Tensor) -> torch.Tensor:
    """Memory that was used before, if there is some: to pin new memory takes longer than to launch a decode step."""
    try:
        return _idle[like.dtype, like.shape].pop()
    except (KeyError, IndexError):
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


class OnHost:
    """A copy to host memory, enqueued after the work the device has now and before the work it is given next."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.is_cuda:
            self._tensor = _pinned(tensor)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            # The copy runs on the tensor's device, which need not be the current one.
            self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def take(self, read: Callable[[torch.Tensor], T]) -> T:
        """Wait for the copy and read it, once: its memory serves the next copy afterwards."""
        if self._event is None:
            return read(self._tensor)
        self.wait()
        found = read(self._tensor)
        _idle.setdefault((self._tensor.dtype, self._tensor.shape), []).append(self._tensor)
        return found


class DrawnTokens:
    """Tokens that the sampler drew: on the device, and on their way to the host."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens  # int64 [rows]
        self._host = OnHost(tokens)

    @property
    def arrived(self) -> bool:
        """`on_host` would not wait."""
        return self._host.arrived

    def wait(self) -> None:
        self._host.wait()

    def on_host(self) -> list[int]:
        found: list[int] = self._host.take(torch.Tensor.tolist)
        return found

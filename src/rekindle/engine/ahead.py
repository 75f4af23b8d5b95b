"""Blocks that the pipeline's drafter is drafting: the next step takes their tokens on the device, and the host learns
them with the tokens which that step draws."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from rekindle.batch import Ask
from rekindle.engine.to_host import OnHost
from rekindle.stages.types import Unseen


class Stopwatch:
    """How long a device works on what is launched between the start and `stop`. Nobody waits for it."""

    def __init__(self, device: torch.device) -> None:
        gpu = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if gpu else None
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if gpu else []
        self._seconds = -time.monotonic()  # of the host, which runs a CPU's kernels itself
        self._mark(0)

    def stop(self) -> None:
        self._seconds += time.monotonic()
        self._mark(1)

    def seconds(self) -> float:
        """When the device has passed both."""
        if not self._marks:
            return self._seconds
        self._marks[1].synchronize()
        return float(self._marks[0].elapsed_time(self._marks[1])) / 1e3

    def _mark(self, which: int) -> None:
        if self._marks:
            self._marks[which].record(self._stream)


class Ahead:
    """What one pass drafts for some sequences, in order of the asks."""

    def __init__(self, tokens: torch.Tensor, asks: Sequence[Ask], began: float, watch: Stopwatch) -> None:
        """tokens: int64 [asks, tokens], which the next pass may write over. began: when the host turned to the pass."""
        self.tokens = tokens.flatten()
        self.began = began
        self.counts = [min(ask.most, tokens.shape[1]) for ask in asks]
        self._width = tokens.shape[1]
        self._places = {ask.slot: place for place, ask in enumerate(asks)}
        self._watch = watch
        # Read when the next pass may have run: a GPU's copy stands before that, a CPU makes none.
        self._host = OnHost(tokens if tokens.is_cuda else tokens.clone())
        self._known: list[list[int]] | None = None

    def first(self, slot: int) -> int:
        """Where in `tokens` the slot's block begins."""
        return self._places[slot] * self._width

    def known(self, slot: int) -> list[int]:
        """The slot's tokens, once the device has drafted them."""
        if self._known is None:
            self._known = self._host.take(torch.Tensor.tolist)
        return self._known[self._places[slot]]

    def seconds(self) -> float:
        """Of the pass, once the device has made it."""
        return self._watch.seconds()


class PassBehind:
    """A pass that drafts the block behind one which is being verified, before the host knows what is accepted of it."""

    def __init__(self, slot: int, tokens: torch.Tensor, began: float, watch: Stopwatch) -> None:
        self.used = False
        self._slot = slot
        self._stands: tuple[int, int, int] | None = None  # behind this slot's position and token, once the host agrees
        self._given = tokens, began, watch

    def note(self, position: int, token: int) -> None:
        """The answer has taken what it assumed: `token` is the last, and `position` is that token's."""
        self._stands = self._slot, position, token

    def ahead(self, asks: Sequence[Ask]) -> Ahead | None:
        """Its tokens, where they are what is asked for."""
        if [(ask.slot, ask.position, ask.token) for ask in asks] != [self._stands]:
            return None
        self.used = True
        tokens, began, watch = self._given
        return Ahead(tokens, asks, began, watch)


def launch_behind(
    propose: Callable[[Unseen], torch.Tensor | None], block: Unseen, device: torch.device
) -> PassBehind | None:
    """device: of the drafter, which is that of the logits where drafted tokens stay on it."""
    began, watch = time.monotonic(), Stopwatch(device)
    tokens = propose(block)
    watch.stop()
    return None if tokens is None else PassBehind(block.slot, tokens, began, watch)


def launch_pass(
    ask: Callable[[Sequence[Ask]], torch.Tensor | None], asks: Sequence[Ask], device: torch.device
) -> Ahead | None:
    """None where nothing is drafted. device: of the drafter."""
    began, watch = time.monotonic(), Stopwatch(device)
    tokens = ask(asks)
    watch.stop()
    return None if tokens is None else Ahead(tokens, asks, began, watch)

"""Tokens on their way to the host, from a device that need not be the current one. Devices here are paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rekindle.engine import sampler
from rekindle.engine.to_host import OnHost
from rekindle.engine.types import Sampling

SECOND = torch.device("cuda", 1)


class OnSecond(torch.Tensor):
    """A tensor that says it lies on the second GPU."""

    is_cuda = True  # type: ignore[assignment]
    device = SECOND  # type: ignore[assignment]


def on_second(values: list[int]) -> torch.Tensor:
    return torch.tensor(values).as_subclass(OnSecond)


class PaperEvent:
    """Remembers behind which stream it was recorded: without a name, behind the current device's."""

    def __init__(self) -> None:
        self.stream: Any = None
        PaperEvent.last = self

    last: PaperEvent

    def record(self, stream: Any = "of the current device") -> None:
        self.stream = stream


def test_a_copy_to_the_host_is_done_when_the_stream_of_its_own_device_has_come_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, pin_memory: empty(shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "Event", PaperEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: ("stream of", device))
    OnHost(on_second([3, 1, 2]))
    assert PaperEvent.last.stream == ("stream of", SECOND)


def test_tokens_are_drawn_on_the_device_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    def exchange(index: int) -> int:
        entered.append(index)
        return 0

    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    monkeypatch.setattr(OnSecond, "get_device", lambda self: SECOND.index, raising=False)
    monkeypatch.setattr(sampler, "_prepared", lambda logits, sequences: logits)
    monkeypatch.setattr(sampler, "argmax", lambda logits: current.append(entered[-1]) or logits)
    sampler.draw(on_second([0]), [], [])
    assert current == [1]
    assert entered == [1, 0], "and the device before is the current one again"


@dataclass(frozen=True)
class PaperSequence:
    sampling: Sampling
    tokens: tuple[int, ...] = (1, 2, 3)
    prompt_length: int = 3
    mask: None = None


def test_a_temperature_too_small_to_divide_by_is_none() -> None:
    """Among equals, too: the lowest id, whatever the random number."""
    tied = torch.zeros(3, 8)
    for seed in range(4):
        rows = [PaperSequence(Sampling(temperature=each, seed=seed)) for each in (1e-300, 1e-40, 1e-6)]
        warm = PaperSequence(Sampling(temperature=1.0, seed=seed))
        assert sampler.draw(tied, rows, [3, 3, 3]).tolist() == [0, 0, 0]
        assert sampler.draw(tied, [*rows[:2], warm], [3, 3, 3]).tolist()[:2] == [0, 0], "beside a warm one"

"""Tokens on their way to the host, from a device that need not be the current one. Devices here are paper."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from rekindle.engine import sampler
from rekindle.engine.to_host import OnHost
from rekindle.engine.token_counts import TokenCounts
from rekindle.engine.types import Sampling
from rekindle.kernels.sampling import IN_PROMPT

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
    sampler.draw(on_second([0]), [])
    assert current == [1]
    assert entered == [1, 0], "and the device before is the current one again"


@dataclass(frozen=True)
class PaperSequence:
    sampling: Sampling
    position: int = 3
    tokens: tuple[int, ...] = (1, 2, 3)
    prompt_length: int = 3
    drafted: tuple[int, ...] = ()
    in_block: bool = False
    token_counts: TokenCounts = field(default_factory=TokenCounts)
    mask: None = None
    forced: None = None


def test_a_temperature_too_small_to_divide_by_is_none() -> None:
    """Among equals, too: the lowest id, whatever the random number."""
    tied = torch.zeros(3, 8)
    for seed in range(4):
        rows = [PaperSequence(Sampling(temperature=each, seed=seed)) for each in (1e-300, 1e-40, 1e-6)]
        warm = PaperSequence(Sampling(temperature=1.0, seed=seed))
        assert sampler.draw(tied, rows).tolist() == [0, 0, 0]
        assert sampler.draw(tied, [*rows[:2], warm]).tolist()[:2] == [0, 0], "beside a warm one"


def test_each_token_is_counted_once_whoever_counted_it() -> None:
    """Known ones by the host, drawn ones behind the draw, and all of them anew where a drawn one did not stay."""
    like, prompt, counts = torch.zeros(1, 8), [1, 2, 2], TokenCounts()
    assert _entries(counts.up_to(3, prompt, 3, like)) == {1: IN_PROMPT, 2: IN_PROMPT}
    sampler.count_drawn(torch.tensor([2]), [counts.tensor])
    counts.note_drawn()
    assert _entries(counts.up_to(4, prompt, 3, like)) == {1: IN_PROMPT, 2: IN_PROMPT + 1}, "not known to the host yet"
    assert _entries(counts.up_to(6, [*prompt, 2, 5, 5], 3, like)) == {1: IN_PROMPT, 2: IN_PROMPT + 1, 5: 2}
    sampler.count_drawn(torch.tensor([7]), [counts.tensor])
    counts.note_drawn()  # the step was lost
    assert _entries(counts.up_to(6, [*prompt, 2, 5, 5], 3, like)) == {1: IN_PROMPT, 2: IN_PROMPT + 1, 5: 2}


def _entries(counts: torch.Tensor) -> dict[int, int]:
    return {token: int(count) for token, count in enumerate(counts) if count}

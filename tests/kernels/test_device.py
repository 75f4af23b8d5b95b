"""How kernels have the memory of a multiprocessor divided."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rekindle.kernels import device


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The functions that asked for a division of their own."""
    found: list[int] = []
    monkeypatch.setattr(device, "_divide", found.append)
    monkeypatch.setattr(device, "_is_here_roomy", lambda: True)
    return found


def load(name: str, function: int) -> None:
    """As Triton tells of a kernel that is on the device."""
    device.knobs.runtime.kernel_load_end_hook(None, function, name, {}, "")


def test_kernels_that_read_much_ask_for_a_division_when_they_are_loaded_and_others_do_not(divided: list[int]) -> None:
    device.reads_much(SimpleNamespace(__name__="_large_kernel"))
    load("_large_kernel", 1)
    load("_small_kernel", 2)
    load("_large_kernel", 3)  # for another type
    assert divided == [1, 3]


def test_other_makers_cards_are_left_alone(divided: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    device.reads_much(SimpleNamespace(__name__="_large_kernel"))
    monkeypatch.setattr(device.torch.version, "hip", "6.0")
    load("_large_kernel", 1)
    assert divided == []

"""Which form a device is given, and how kernels have the memory of a multiprocessor divided."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rekindle.kernels import device
from rekindle.kernels.attention import far
from rekindle.kernels.device import LEAST, ORDINARY, ROOMY
from rekindle.kernels.matmul import fragments, scalar_gemv, tiled


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The functions that asked for a division of their own."""
    found: list[int] = []
    monkeypatch.setattr(device, "_set_carveout", found.append)
    monkeypatch.setattr(device, "_is_here_roomy", lambda: True)
    return found


def load(name: str, function: int) -> None:
    """As Triton tells of a kernel that is on the device."""
    device.knobs.runtime.kernel_load_end_hook(None, function, name, {}, "")


def test_kernels_that_read_much_ask_for_a_division_when_they_are_loaded_and_others_do_not(divided: list[int]) -> None:
    device.shared_memory_carveout(SimpleNamespace(__name__="_large_kernel"))
    load("_large_kernel", 1)
    load("_small_kernel", 2)
    load("_large_kernel", 3)  # for another type
    assert divided == [1, 3]


def test_other_makers_cards_are_left_alone(divided: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    device.shared_memory_carveout(SimpleNamespace(__name__="_large_kernel"))
    monkeypatch.setattr(device.torch.version, "hip", "6.0")
    load("_large_kernel", 1)
    assert divided == []


@pytest.mark.parametrize(
    ("room", "form"), [(232_448, "deep"), (166_912, "plain"), (101_376, "plain"), (65_536, "flat"), (32_768, "flat")]
)
def test_a_device_is_given_the_most_demanding_form_that_it_has_room_for(
    room: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "shared_memory", lambda _: room)
    assert device.fitting(torch.device("cuda:0"), {ROOMY: "deep", ORDINARY: "plain", LEAST: "flat"}) == form


def test_the_interpreter_has_room_for_every_form() -> None:
    assert device.fitting(torch.device("cpu"), {ROOMY: "deep", LEAST: "flat"}) == "deep"


@pytest.mark.parametrize(
    ("hip", "dtype", "precision"),
    [(None, torch.float32, "tf32x3"), (None, torch.bfloat16, "tf32"), ("6.4", torch.float32, "ieee"),
     ("6.4", torch.bfloat16, "ieee")],
)  # fmt: skip
def test_products_are_named_as_the_makers_compiler_knows_them(
    hip: str | None, dtype: torch.dtype, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.torch.version, "hip", hip)
    assert device.dot_precision(torch.device("cuda:0"), dtype) == precision


def test_an_h200_is_filled_by_the_numbers_that_were_measured_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "processors", lambda _: 132)
    parts = (scalar_gemv.WARPS_EACH, tiled.PROGRAMS_EACH, fragments.TILES_EACH, far.PROGRAMS_EACH)
    assert [device.filling(torch.device("cpu"), each) for each in parts] == [2048, 512, 1024, 256]


def test_a_smaller_card_is_filled_by_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "processors", lambda _: 28)
    assert device.filling(torch.device("cpu"), 4) == 64

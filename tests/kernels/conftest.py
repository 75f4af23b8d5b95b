"""Kernels run in Triton's interpreter, on CPU tensors; with --gpu compiled, on tensors of the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from support.environment import ON_GPU

from rekindle.kernels import device
from rekindle.kernels.ragged import Ragged
from rekindle.spec import PAGE


def make_ragged(segments: Sequence[tuple[int, int, int]], tables: Sequence[Sequence[int]] | None = None) -> Ragged:
    """Segments as (slot, position, length); pages 0, 1, … in order unless tables are given."""
    slots, befores, lengths = (tuple(column) for column in zip(*segments, strict=True))
    wide = max((before + length + PAGE - 1) // PAGE for before, length in zip(befores, lengths, strict=True))
    if tables is None:
        tables = [range(i * wide, (i + 1) * wide) for i in range(len(segments))]
    padded = torch.full((len(segments), max(len(table) for table in tables)), 2**30, dtype=torch.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = torch.tensor(list(table))
    sizes = torch.tensor(lengths)
    row_positions = torch.cat([torch.arange(b, b + n) for b, n in zip(befores, lengths, strict=True)]).int()
    return Ragged(
        starts=torch.cat((torch.zeros(1), sizes.cumsum(0))).int(),
        slots=torch.tensor(slots, dtype=torch.int32),
        row_positions=row_positions,
        row_places=row_positions,
        row_segments=torch.arange(len(segments)).repeat_interleave(sizes).int(),
        tables=padded,
        lengths=lengths,
    )


HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All but the kernels in C."""
    for item in items:
        if HERE in item.path.parents and HERE / "native" not in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tensors that name no device are made where the kernels run."""
    on_gpu = ON_GPU and "gpu" in request.keywords
    torch.set_default_device("cuda:0" if on_gpu else None)
    yield
    torch.set_default_device(None)


@pytest.fixture(name="make_ragged")
def _make_ragged() -> Callable[..., Ragged]:
    return make_ragged


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch.empty holds NaN, so that an element nobody wrote is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[101_376, 65_536], ids=["99 KiB", "64 KiB"])
def small_card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take the forms of a card with so much shared memory per program."""
    monkeypatch.setattr(device, "shared_memory", lambda _: request.param)

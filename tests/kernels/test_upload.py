"""Bytes arrive as they were stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rekindle.kernels import upload as module
from rekindle.kernels.upload import CopyThreads, upload


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_many_threads_copy_every_byte_once(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(module, "PIECE", 64)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    target = torch.zeros(size + 8, dtype=torch.uint8)
    threads = CopyThreads(3)
    for work in threads.fill([target[:size]], [source]):
        work.result()
    threads.stop()
    assert torch.equal(target[:size], source)
    assert not target[size:].any()


@pytest.mark.parametrize("size", [1, 255, 256, 257, 1024, 1025, 5000])
def test_bytes_larger_than_the_buffers_go_through_them_in_parts(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The path of weights to a GPU, with a stream that has always passed and buffers that are not pinned."""
    made = list[int]()

    def empty(size: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        made.append(size)
        return torch.full((size,), 255, dtype=dtype)

    monkeypatch.setattr(module, "LOAD_BUFFER", 1024)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(module, "Passed", lambda stream: NothingToAwait())
    source = torch.arange(size).to(torch.uint8)
    out = torch.zeros_like(source)
    module._copy_through_pinned(source, out)
    assert torch.equal(out, source)
    assert len(made) == min(2, -(-size // 1024))
    assert all(size <= buffer <= 1024 or buffer == 1024 for buffer in made), "all of it goes through pinned memory"


class NothingToAwait:
    def wait(self) -> None: ...


def test_a_repeated_byte_is_not_read_from_anywhere() -> None:
    raw = np.broadcast_to(np.uint8(7), (1 << 20, 1 << 20))  # a terabyte, if somebody looked at it all
    assert upload(raw[:3, :5], torch.device("cpu")).tolist() == [[7] * 5] * 3
    assert upload(raw, torch.device("meta")).shape == raw.shape


def test_stored_rows_are_copied_and_not_shared() -> None:
    raw = np.arange(12, dtype=np.uint8).reshape(3, 4)
    out = upload(raw, torch.device("cpu"))
    raw[:] = 0
    assert out.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]

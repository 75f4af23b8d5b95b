"""Bytes arrive as they were stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rekindle.kernels import upload as module
from rekindle.kernels.upload import CopyThreads, Uploads, copy_through, upload, upload_values


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

    monkeypatch.setattr(torch, "empty", empty)
    source = np.arange(size).astype(np.uint8)
    uploads = load_uploads(monkeypatch)
    for raw in (source, Stored(source)):
        out = torch.zeros(size, dtype=torch.uint8)
        copy_through(uploads, raw, out)
        assert np.array_equal(out.numpy(), source)
    assert made == [1024] * min(module.LOAD_BUFFERS, 2 * -(-size // 1024)), "few buffers, which all tensors share"


class Stored:
    """Bytes in a file, which ends early or cannot be read at `broken`."""

    def __init__(self, content: np.ndarray, broken: int | None = None) -> None:
        self.content, self.shape, self.broken = content, (1, content.size), broken

    def read(self) -> np.ndarray:
        return self.content.reshape(self.shape)

    def read_into(self, target: np.ndarray, start: int) -> None:
        if self.broken is not None and start <= self.broken < start + target.size:
            raise OSError("the file was cut short")
        target[:] = self.content[start : start + target.size]


class NothingToAwait:
    def wait(self) -> None: ...


def load_uploads(monkeypatch: pytest.MonkeyPatch) -> Uploads:
    monkeypatch.setattr(module, "LOAD_BUFFER", 1024)
    monkeypatch.setattr(module, "PIECE", 256)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(module, "Passed", lambda stream: NothingToAwait())
    return module._load_uploads.__wrapped__(torch.device("cuda:0"))


@pytest.mark.parametrize("broken", [0, 1023, 1024, 6000, 9999])
def test_a_file_that_cannot_be_read_fails_once_and_keeps_no_buffer(
    monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, dtype, pin_memory: plain(size, dtype=dtype))
    uploads = load_uploads(monkeypatch)
    content = np.random.default_rng(broken).integers(0, 256, 10_000, dtype=np.uint8)
    out = torch.zeros(content.size, dtype=torch.uint8)
    for _ in range(2 * module.LOAD_BUFFERS):
        with pytest.raises(OSError, match="cut short"):
            copy_through(uploads, Stored(content, broken), out)
    copy_through(uploads, Stored(content), out)
    assert np.array_equal(out.numpy(), content)


def test_a_copy_that_fails_keeps_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, dtype, pin_memory: plain(size, dtype=dtype))
    uploads = load_uploads(monkeypatch)
    content = np.arange(10_000).astype(np.uint8)
    out = torch.zeros(content.size, dtype=torch.uint8)
    copy, errors = torch.Tensor.copy_, []

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(torch.Tensor, "copy_", fail)
    for _ in range(2 * module.LOAD_BUFFERS):
        with pytest.raises(RuntimeError, match="lost") as caught:
            copy_through(uploads, Stored(content), out)
        errors.append(caught)  # an error that is kept refers to all that was under way
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    copy_through(uploads, Stored(content), out)
    assert np.array_equal(out.numpy(), content)


def test_a_repeated_byte_is_not_read_from_anywhere() -> None:
    raw = np.broadcast_to(np.uint8(7), (1 << 20, 1 << 20))  # a terabyte, if somebody looked at it all
    assert upload(raw[:3, :5], torch.device("cpu")).tolist() == [[7] * 5] * 3
    assert upload(raw, torch.device("meta")).shape == raw.shape


def test_stored_rows_are_copied_and_not_shared() -> None:
    raw = np.arange(12, dtype=np.uint8).reshape(3, 4)
    out = upload(raw, torch.device("cpu"))
    raw[:] = 0
    assert out.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_rows_that_are_not_read_yet_are_read_once() -> None:
    stored = Stored(np.arange(12, dtype=np.uint8))
    assert upload(stored, torch.device("cpu")).tolist() == [list(range(12))]


def test_values_are_copied_and_not_shared() -> None:
    values = np.ones(3, np.float32)
    out = upload_values(values, torch.device("cpu"))
    values[:] = 0
    assert out.tolist() == [1, 1, 1]

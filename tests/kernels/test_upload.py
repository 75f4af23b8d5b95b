"""Bytes arrive as they were stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rekindle.kernels import upload as module
from rekindle.kernels.upload import CopyThreads, Uploads, copy_through, upload, upload_values
from rekindle.weights.source import SourceFile
from rekindle.weights.stored import Stored as StoredTensor
from rekindle.weights.stored import UnreadRows
from rekindle.weights.types import TensorInfo


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_many_threads_copy_every_byte_once(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(module, "PIECE", 64)
    source = torch.from_numpy(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8))
    target = torch.zeros(size + 8, dtype=torch.uint8, device="cpu")
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

    def empty(size: int, dtype: torch.dtype, device: str, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        made.append(size)
        return torch.full((size,), 255, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", empty)
    source = np.arange(size).astype(np.uint8)
    uploads = load_uploads(monkeypatch)
    for raw in (source, Stored(source)):
        out = torch.zeros(size, dtype=torch.uint8, device="cpu")
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
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device, pin_memory: plain(size, dtype=dtype, device=device))
    uploads = load_uploads(monkeypatch)
    content = np.random.default_rng(broken).integers(0, 256, 10_000, dtype=np.uint8)
    out = torch.zeros(content.size, dtype=torch.uint8, device="cpu")
    for _ in range(2 * module.LOAD_BUFFERS):
        with pytest.raises(OSError, match="cut short"):
            copy_through(uploads, Stored(content, broken), out)
    copy_through(uploads, Stored(content), out)
    assert np.array_equal(out.numpy(), content)


def test_a_copy_that_fails_keeps_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device, pin_memory: plain(size, dtype=dtype, device=device))
    uploads = load_uploads(monkeypatch)
    content = np.arange(10_000).astype(np.uint8)
    out = torch.zeros(content.size, dtype=torch.uint8, device="cpu")
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


def test_a_gpu_gets_every_byte_while_it_is_busy_with_the_tensors_before(gpu: torch.device, tmp_path: Path) -> None:
    """Buffers are filled again while copies out of them wait behind launches: each for what it holds alone."""
    content = np.random.default_rng(3).integers(0, 256, 3 * module.LOAD_BUFFER + 12_345, dtype=np.uint8)
    (tmp_path / "rows").write_bytes(content.tobytes())
    file, large = SourceFile(tmp_path / "rows"), torch.randn(8192, 8192, device=gpu)
    sizes = [content.size, 1, 4097, module.LOAD_BUFFER, content.size // 2, 3 * module.PIECE + 1] * 3
    found = list[tuple[int, torch.Tensor, torch.Tensor]]()
    for start, size in enumerate(sizes):  # each begins elsewhere in the file
        size = min(size, content.size - start)
        rows = UnreadRows.of(StoredTensor(TensorInfo("rows", (1, size), "I8", size), file, start), (1, size))
        large = large @ large * 1e-4  # the stream is kept busy
        found.append((start, upload(rows, gpu), upload_values(np.full(9, start, np.float32), gpu)))
    for start, rows, values in found:
        assert np.array_equal(rows.cpu().numpy()[0], content[start : start + rows.shape[1]])
        assert values.tolist() == [start] * 9

"""Bytes arrive as they were stored."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from rekindle.kernels.matmul.upload import fill, upload

module = importlib.import_module("rekindle.kernels.matmul.upload")  # the package has a function of that name


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_many_threads_copy_every_byte_once(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(module, "PIECE", 64)
    source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    target = np.zeros(size + 8, np.uint8)
    fill(target[:size], source)
    assert np.array_equal(target[:size], source)
    assert not target[size:].any()


def test_a_repeated_byte_is_not_read_from_anywhere() -> None:
    raw = np.broadcast_to(np.uint8(7), (1 << 20, 1 << 20))  # a terabyte, if somebody looked at it all
    assert upload(raw[:3, :5], torch.device("cpu")).tolist() == [[7] * 5] * 3
    assert upload(raw, torch.device("meta")).shape == raw.shape


def test_stored_rows_are_copied_and_not_shared() -> None:
    raw = np.arange(12, dtype=np.uint8).reshape(3, 4)
    out = upload(raw, torch.device("cpu"))
    raw[:] = 0
    assert out.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]

"""What the plan reserves for expanded weights is what the kernels take."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from rekindle.kernels.matmul.scratch import Scratch, expanding_into, scratch

T = TypeVar("T")
LIKE = torch.empty(0)


def on_another_thread(work: Callable[[], T]) -> T:
    found = list[T]()
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_one_buffer_of_the_planned_size_serves_every_product_and_every_thread() -> None:
    stages = Scratch(values=64)

    def products() -> set[int]:
        with expanding_into(stages):
            return {scratch(LIKE, rows, 8).data_ptr() for rows in (2, 8, 4)}

    assert products() == on_another_thread(products)
    assert len(products()) == 1
    assert stages.nbytes == 64 * LIKE.itemsize


def test_stages_do_not_expand_into_one_another() -> None:
    with expanding_into(Scratch()):
        mine = scratch(LIKE, 4, 4).data_ptr()
        with expanding_into(Scratch()):
            assert scratch(LIKE, 4, 4).data_ptr() != mine
        assert scratch(LIKE, 4, 4).data_ptr() == mine


def test_threads_without_a_stage_do_not_expand_into_one_another() -> None:
    mine = scratch(LIKE, 4, 4)
    others = on_another_thread(lambda: scratch(LIKE, 4, 4))
    assert scratch(LIKE, 2, 8).data_ptr() == mine.data_ptr()
    assert others.data_ptr() != mine.data_ptr()


def test_what_a_recorded_step_expands_into_outlives_a_larger_one() -> None:
    uncounted = Scratch()
    small = uncounted.take(LIKE, 4, 4).nbytes
    large = uncounted.take(LIKE, 64, 64).nbytes
    assert uncounted.nbytes == small + large

"""Full collections of garbage come when nobody waits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from rekindle.cli.garbage import LONGEST, NEVER, PAUSE, YOUNG, FullCollections


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


class Knot:
    """Refers to itself."""

    def __init__(self) -> None:
        self.own = self


def old_knot() -> weakref.ref[Knot]:
    """Garbage that only a full collection finds."""
    knot = Knot()
    gc.collect()  # it has survived one
    return weakref.ref(knot)


@pytest.mark.parametrize(
    ("seconds", "idle", "gone"),
    [(PAUSE - 1, True, False), (PAUSE, True, True), (PAUSE, False, False), (LONGEST, False, True)],
)
def test_a_busy_server_is_left_alone_but_not_for_ever(seconds: float, idle: bool, gone: bool) -> None:
    now = [100.0]
    garbage, knot = FullCollections(lambda: now[0]), old_knot()
    now[0] += seconds
    garbage.tick(lambda: idle)
    assert (knot() is None) == gone
    if gone:
        again = old_knot()
        garbage.tick(lambda: True)
        assert again() is not None, "the next one has its own time"


def test_python_makes_no_full_collection_by_itself_and_smaller_ones_more_often() -> None:
    youngest = gc.get_threshold()[0]
    FullCollections()
    assert gc.get_threshold() == (youngest, YOUNG, NEVER)

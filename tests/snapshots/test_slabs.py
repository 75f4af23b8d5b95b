from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import rekindle
from rekindle.snapshots import slabs as slabs_module
from rekindle.snapshots.slabs import EDGE, Cuts, Slab, Slabs, SlabSlice

SIZE = 16 * EDGE


class Pins:
    """A driver made of paper: what is pinned now, how often it was asked, and whether it refuses."""

    def __init__(self, refuses: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self.asked = 0
        self.refuses = refuses

    def __call__(self, address: int, nbytes: int) -> Callable[[], object] | None:
        self.asked += 1
        if self.asked <= self.refuses:
            return None
        self.pinned[address] = nbytes
        return lambda: self.pinned.pop(address)


def lent(slabs: Slabs, count: int) -> list[SlabSlice]:
    pieces = [slabs.take(1) for _ in range(count)]
    for piece in pieces:
        piece.slab.make()
    return pieces


def wait_until(holds: Callable[[], bool]) -> None:
    """The thread has done what it was told."""
    done = threading.Event()
    for _ in range(30_000):
        if holds():
            return
        done.wait(0.001)
    raise AssertionError("the thread did not do it")


def wait_for_stock(slabs: Slabs, count: int) -> None:
    wait_until(lambda: slabs._ready() >= count)


# Memory that is used again


def test_a_slab_comes_back_when_nothing_of_it_is_held() -> None:
    slabs = Slabs(size=SIZE)
    slabs.spare = lambda: SIZE
    piece = slabs.take(SIZE)
    slab = piece.slab
    part = torch.from_numpy(piece.memory)[EDGE:].view(torch.int32)[3:]
    del piece
    gc.collect()
    assert slabs.idle_bytes == 0, "a tensor still lies in it"
    del part
    assert slabs.idle_bytes == SIZE
    assert slabs.take(1).slab is slab
    assert slabs.late == 1


def test_what_is_lent_twice_is_never_lent_at_once() -> None:
    slabs = Slabs(size=SIZE)
    slabs.spare = lambda: 1 << 30
    draw, held = np.random.default_rng(0), dict[int, SlabSlice]()
    for number in range(300):
        if held and draw.random() < 0.5:
            del held[int(draw.choice(list(held)))]
        held[number] = slabs.take(int(draw.integers(1, 3 * SIZE)))
        held[number].memory.view(np.int64)[:] = number
    assert all((piece.memory.view(np.int64) == number).all() for number, piece in held.items())
    assert slabs.late < 300


def test_what_lies_idle_is_bounded_by_what_the_ram_tier_leaves() -> None:
    slabs = Slabs(size=SIZE)
    left = 3 * SIZE
    slabs.spare = lambda: left
    pieces = [slabs.take(n * SIZE) for n in (1, 1, 2, 1, 1)]
    del pieces
    assert slabs.idle_bytes == 3 * SIZE
    left = SIZE
    slabs.review()
    assert slabs.idle_bytes == SIZE
    left = -5
    slabs.review()
    assert slabs.idle_bytes == 0


def test_an_object_larger_than_a_slab_gets_memory_that_serves_the_next_like_it() -> None:
    slabs = Slabs(size=SIZE)
    slabs.spare = lambda: 4 * SIZE
    piece = slabs.take(2 * SIZE + 1)
    assert piece.memory.nbytes == 3 * SIZE
    slab = piece.slab
    del piece
    assert slabs.take(3 * SIZE).slab is slab


# Pinned memory


def test_a_slab_is_pinned_while_it_lives_and_no_longer() -> None:
    pins = Pins()
    slabs = Slabs(size=SIZE, pin=pins)
    slabs.spare = lambda: 2 * SIZE
    pieces = lent(slabs, 3)
    assert [piece.slab.pinned for piece in pieces] == [True] * 3
    assert sorted(pins.pinned) == sorted(piece.memory.ctypes.data for piece in pieces)
    del pieces
    wait_until(lambda: len(pins.pinned) == 2)  # one more than may lie idle
    lent(slabs, 2)
    assert pins.asked == 3, "what comes back is pinned still"
    slabs.stop()
    assert not pins.pinned


def test_what_is_asked_for_is_had_without_a_wait_and_made_later_by_whoever_needs_it() -> None:
    pins = Pins()
    piece = Slabs(size=SIZE, pin=pins).take(1)
    assert (piece.slab.made, pins.asked) == (False, 0)
    threads = [threading.Thread(target=piece.slab.make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (piece.slab.made, pins.asked) == (True, 1)


def test_what_was_never_made_does_not_count_as_ready() -> None:
    slabs = Slabs(size=SIZE, pin=Pins())
    slabs.spare = lambda: SIZE
    slabs.take(1)
    assert slabs.idle_bytes == 0


def test_memory_that_the_system_does_not_pin_still_serves(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        slabs = Slabs(2, SIZE, Pins(refuses=10))
        wait_for_stock(slabs, 2)
        slabs.stop()
    assert slabs.refused == 2
    assert [record.message for record in caplog.records] == [
        "the system pins no more memory: restores from RAM will be slower"
    ]
    piece = slabs.take(1)
    piece.slab.make()
    piece.memory[:] = 7
    assert not piece.slab.pinned


def test_a_refusal_is_counted_whoever_makes_the_slab() -> None:
    slabs = Slabs(size=SIZE, pin=Pins(refuses=2))
    pieces = lent(slabs, 3)
    assert [piece.slab.pinned for piece in pieces] == [False, False, True]
    assert slabs.refused == 2
    slabs.stop()


@pytest.mark.parametrize("stock", [0, 1])
def test_whoever_lets_go_of_a_slab_does_not_call_the_driver(stock: int) -> None:
    where = list[str]()

    def pin(address: int, nbytes: int) -> Callable[[], object]:
        return lambda: where.append(threading.current_thread().name)

    slabs = Slabs(stock, SIZE, pin)
    wait_for_stock(slabs, stock)
    pieces = lent(slabs, stock + 1)
    wait_for_stock(slabs, stock)
    del pieces
    wait_until(lambda: bool(where))
    slabs.stop()
    assert where[0] == "rekindle-slabs"


# The stock


def test_the_stock_is_filled_ahead_of_need_and_again_after_it() -> None:
    pins = Pins()
    slabs = Slabs(3, SIZE, pins, quiet=0)
    wait_for_stock(slabs, 3)
    pieces = [slabs.take(1) for _ in range(3)]
    assert all(piece.slab.pinned for piece in pieces)
    assert slabs.late == 0
    wait_for_stock(slabs, 3)
    slabs.stop()
    assert pins.asked == len(pins.pinned) + 3 == 6
    del pieces


def test_a_ram_tier_over_its_budget_does_not_take_the_stock() -> None:
    pins = Pins()
    slabs = Slabs(2, SIZE, pins)
    slabs.spare = lambda: -5 * SIZE
    wait_for_stock(slabs, 2)
    for _ in range(5):
        slabs.review()
    slabs.stop()
    assert pins.asked == 2


class Short(Slab):
    """Memory that is refused a few times."""

    times = 0

    def make(self) -> None:
        if Short.times:
            Short.times -= 1
            raise OSError("no memory")
        super().make()


def test_the_stock_asks_again_for_memory_it_was_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slabs_module, "Slab", Short)
    Short.times = 3
    with caplog.at_level(logging.WARNING):
        slabs = Slabs(1, SIZE, Pins(), pause=0.001)
        wait_for_stock(slabs, 1)
        slabs.stop()
    assert slabs.refused == 3
    assert [record.message for record in caplog.records] == [
        "no memory for the stock, asking again every 0.001 s: no memory"
    ]


def test_idle_memory_is_given_back_while_the_stock_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pins, left = Pins(), 3 * SIZE
    slabs = Slabs(0, SIZE, pins, pause=3600)
    slabs.spare = lambda: left
    lent(slabs, 3)
    wait_for_stock(slabs, 3)
    monkeypatch.setattr(slabs_module, "Slab", Short)
    monkeypatch.setattr(Short, "times", 1_000_000)
    slabs._stock, left = 4, -4 * SIZE  # more than there are, and the RAM tier wants everything back beside it
    odd = [slabs.take(2 * SIZE) for _ in range(3)]
    for piece in odd:
        Slab.make(piece.slab)
    del odd, piece
    wait_until(lambda: slabs.idle_bytes <= 4 * SIZE and slabs.refused > 0)
    slabs.stop()


@pytest.mark.parametrize("refused", [0, 1_000_000], ids=["waits for news", "waits to ask again"])
def test_a_stock_that_is_stopped_leaves_no_thread_and_no_memory(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    monkeypatch.setattr(slabs_module, "Slab", Short)
    Short.times = refused
    pins = Pins()
    slabs = Slabs(2, SIZE, pins, pause=3600)
    thread = slabs._thread
    held = slabs.take(1)
    slabs.stop()
    assert thread is not None
    assert not thread.is_alive()
    del held
    assert (slabs.idle_bytes, pins.pinned) == (0, {})


# Cuts


DIES = """
import atexit, threading
from concurrent.futures import ThreadPoolExecutor
from rekindle.snapshots.slabs import Slabs

asked = threading.Event()

def pin(address, nbytes):
    asked.set()
    while True:  # until the interpreter ends and refuses it, as it refuses the thread on which the driver is asked
        with ThreadPoolExecutor(1) as own:
            own.submit(int).result()

slabs = Slabs(stock=3, size=4096, pin=pin)
atexit.register(slabs._thread.join)
assert asked.wait(20)
raise SystemExit("dies")
"""


def test_a_process_that_dies_without_stop_ends_the_stocks_thread_quietly() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(rekindle.__file__).parents[1])}
    died = subprocess.run([sys.executable, "-c", DIES], env=environment, capture_output=True, text=True, timeout=60)
    assert (died.returncode, died.stderr) == (1, "dies\n")


def test_what_is_cut_never_overlaps_begins_on_an_edge_and_shares_slabs() -> None:
    cuts = Cuts(Slabs(size=8 * EDGE))
    sizes = [5, 0, EDGE, 3 * EDGE + 1, 2 * EDGE, 20 * EDGE, 1]
    pieces = [cuts.cut(size) for size in sizes]
    for number, piece in enumerate(pieces):
        piece.memory[:] = number
    assert [piece.memory.nbytes for piece in pieces] == sizes
    assert all((piece.memory == number).all() for number, piece in enumerate(pieces))
    assert all(piece.memory.ctypes.data % EDGE == 0 for piece in pieces)
    # The first five fill a slab to the last edge; what is larger than a slab lies alone.
    assert [[a.slab is b.slab for a in pieces].index(True) for b in pieces] == [0, 0, 0, 0, 0, 5, 6]


def test_cuts_hold_nothing_themselves() -> None:
    pins = Pins()
    slabs = Slabs(size=SIZE, pin=pins)
    slabs.spare = lambda: SIZE
    cuts = Cuts(slabs)
    first, second = cuts.cut(10), cuts.cut(10)
    first.slab.make()
    assert first.slab is second.slab
    del first, second
    assert slabs.idle_bytes == SIZE
    slabs.stop()
    assert not pins.pinned
    assert cuts.cut(10).memory.nbytes == 10


@pytest.mark.parametrize("nbytes", [1, EDGE, 5 * EDGE, 40 * EDGE])
def test_as_many_as_are_said_to_fit_do_fit(nbytes: int) -> None:
    cuts = Cuts(Slabs(size=SIZE))
    held = [cuts.cut(3 * EDGE)]
    for _ in range(4):
        held.append(cuts.cut(cuts.fitting(nbytes) * nbytes))
    assert len({piece.slab for piece in held}) == (4 if nbytes <= 5 * EDGE else 5)


class Resting(Slabs):
    """Says how often its thread has found that it has to wait."""

    rests = 0

    def _rest(self, seconds: float) -> None:
        self.rests += 1
        super()._rest(seconds)


def test_the_stock_is_filled_in_quiet_times_and_at_once_when_little_is_left() -> None:
    """Until then memory is cleared ahead, for which nobody asks the driver."""
    pins = Pins()
    slabs = Resting(8, SIZE, pins, quiet=3600)
    wait_for_stock(slabs, 8)
    pieces = [slabs.take(1) for _ in range(6)]
    wait_until(lambda: slabs._cleared.qsize() == 6)
    assert pins.asked == 8, "two are left, and launches would wait for the driver"
    pieces.append(slabs.take(1))
    wait_until(lambda: slabs._ready() >= 2 and slabs._ready() + slabs._cleared.qsize() == 8)
    assert 8 < pins.asked < 8 + 7, "as many as make it enough for now"
    slabs._taken_at -= 3600
    busy, before = True, slabs.rests
    slabs.busy = lambda: busy
    slabs.review()
    wait_until(lambda: slabs.rests > before)
    assert pins.asked < 8 + 7, "a step runs"
    busy = False
    slabs.review()
    wait_for_stock(slabs, 8)
    slabs.stop()
    assert slabs.late == 0 and pins.asked == 8 + 7
    assert slabs.idle_bytes == 0
    del pieces


@pytest.mark.parametrize("steps_run", [False, True])
def test_a_stock_that_is_low_is_filled_slab_by_slab_amid_requests(steps_run: bool) -> None:
    pins = Pins()
    slabs = Resting(16, SIZE, pins, calm=0 if steps_run else 3600, apart=3600)
    wait_for_stock(slabs, 16)
    slabs.busy = lambda: steps_run
    large = slabs.take(100 * SIZE)
    large.slab.make()
    pieces = [slabs.take(1) for _ in range(14)]
    wait_until(lambda: pins.asked == 17 + 1)
    before = slabs.rests
    slabs.review()
    wait_until(lambda: slabs.rests > before)
    assert pins.asked == 17 + 1, "the next one comes later"
    del large
    wait_until(lambda: slabs.idle_bytes <= 16 * SIZE)  # and what is too much is given back meanwhile
    slabs._made_at -= 3600
    slabs.review()
    wait_until(lambda: pins.asked == 17 + 2)
    pieces += [slabs.take(1) for _ in range(3)]  # one is left, and nobody shall have to make his own
    wait_until(lambda: slabs._ready() >= 4)
    slabs.stop()
    assert slabs.late == 1, "the large one"
    del pieces


def test_while_slabs_are_being_taken_nothing_is_cleared_ahead() -> None:
    pins = Pins()
    slabs = Resting(8, SIZE, pins, quiet=3600, calm=3600)
    wait_for_stock(slabs, 8)
    pieces = [slabs.take(1) for _ in range(6)]
    wait_until(lambda: slabs.rests >= 6)  # each of them was news
    assert slabs._cleared.qsize() == 0 and pins.asked == 8
    slabs._calm = 0
    slabs.review()
    wait_until(lambda: slabs._cleared.qsize() == 6)
    assert pins.asked == 8
    slabs.stop()
    del pieces


def test_while_a_load_is_under_way_nothing_is_cleared_or_pinned_unless_little_is_left() -> None:
    pins = Pins()
    slabs = Resting(8, SIZE, pins, quiet=0.001, calm=0.001)
    wait_for_stock(slabs, 8)
    with slabs.reading(), slabs.reading():
        pieces = [slabs.take(1) for _ in range(6)]
        rests = slabs.rests
        wait_until(lambda: slabs.rests > rests + 20)  # many times as long as it waits without a load
        assert slabs._cleared.qsize() == 0 and pins.asked == 8
        pieces.append(slabs.take(1))
        wait_until(lambda: slabs._ready() > 1)
        assert pins.asked < 8 + 7, "as many as make it enough for now"
    wait_for_stock(slabs, 8)
    slabs.stop()
    assert slabs.late == 0 and pins.asked == 8 + 7
    del pieces


def test_what_is_cleared_is_taken_before_anything_new_and_goes_first_where_memory_is_wanted() -> None:
    pins, left = Pins(), 4 * SIZE
    slabs = Slabs(4, SIZE, pins, quiet=3600)
    slabs.spare = lambda: left
    slabs.review()
    wait_for_stock(slabs, 5)  # with a part of what the RAM tier leaves
    pieces = [slabs.take(1) for _ in range(3)]
    wait_until(lambda: slabs._cleared.qsize() == 3)
    left = 0
    slabs.review()
    wait_until(lambda: slabs._cleared.qsize() == 2)
    assert slabs._ready() == 2 and pins.asked == 5
    slabs.stop()
    slabs._keep(pieces.pop().slab)
    slabs._clear()
    pieces += [slabs.take(1) for _ in range(2)]
    assert slabs.late == 1 and slabs.idle_bytes == 0, "one that was ready, and one that is to be pinned"


def test_in_quiet_times_a_part_of_what_the_ram_tier_leaves_is_made_ahead() -> None:
    left, slabs = 8 * SIZE, Slabs(2, SIZE, Pins(), quiet=0)
    slabs.spare = lambda: left
    slabs.review()
    wait_for_stock(slabs, 4)
    left = 0
    slabs.review()
    wait_until(lambda: slabs.idle_bytes == 2 * SIZE)
    slabs.stop()

"""A pool whose device reads host memory itself, as a GPU does: here a CPU that finds every page by its address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from support.feeding import logits_after

from rekindle.batch import Batch, Segment, Wanted
from rekindle.kernels.paging import fetch_pages
from rekindle.pool import page_memory
from rekindle.pool.page_addresses import PageAddresses
from rekindle.snapshots.types import Page
from rekindle.spec import PAGE
from rekindle.stages import LocalStage

TOKENS = np.random.default_rng(7).integers(0, 320, 2048).tolist()


class Reruns:
    def __init__(self) -> None:
        self.replayed = 0

    def __call__(self, step: Any, warm: Any = None) -> Any:
        step()

        def replay() -> None:
            self.replayed += 1
            step()

        return replay


@pytest.fixture
def far(make_tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a stage that calls all host memory pinned and reads it by address, and what counts its recorded steps."""
    monkeypatch.setattr(Page, "pinned", True)

    def make(**options: Any) -> tuple[LocalStage, Reruns]:
        record = Reruns()
        stage: LocalStage = make_tiny("dense").stage(**{"slots": 2, "record": record, **options})
        for pool in (group.pool for group in stage._paged.groups):  # in sparse mode one per layer
            pool.addresses = PageAddresses(pool.kv, pool.total)
        return stage, record

    return make


def feed(stage: LocalStage, slot: int, start: int, stop: int, step: int) -> list[torch.Tensor]:
    return logits_after(stage, TOKENS, slot, start, stop, step)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kv_type", ["f32", "q8"])
def test_exact_decode_over_pages_that_are_away_is_recorded_and_has_the_bits_of_full_kv(
    far: Any, make_tiny: Any, kv_type: str
) -> None:
    stage, record = far(pages=7, host_pages=60, kv_type=kv_type)
    full = make_tiny("dense").stage(slots=2, pages=64, kv_type=kv_type)
    assert same(feed(stage, 1, 0, 1000, 200), feed(full, 1, 0, 1000, 200))
    count = PAGE + 20  # over a page's edge: a page leaves, and the tables change under the recorded step
    assert same(feed(stage, 1, 1000, 1000 + count, 1), feed(full, 1, 1000, 1000 + count, 1))
    assert record.replayed == count
    assert stage.paging().away_attended > 0
    stage.close(1)
    stage.check()


def test_a_block_over_pages_that_are_away_is_recorded_and_gone_back_into(far: Any, make_tiny: Any) -> None:
    stage, record = far(pages=7, host_pages=60)
    full = make_tiny("dense").stage(slots=2, pages=64)
    for s in (stage, full):
        feed(s, 0, 0, 1000, 200)
    block = Batch((Segment(0, 1000, tuple(TOKENS[1000:1016]), Wanted.ALL),), rewindable=True)
    a, b = (s.forward(block, None).logits for s in (stage, full))
    assert a is not None
    assert b is not None
    assert torch.equal(a, b)
    for s in (stage, full):
        s.rewind(0, 1005)
    assert same(feed(stage, 0, 1005, 1030, 1), feed(full, 0, 1005, 1030, 1))
    assert record.replayed >= 26
    stage.close(0)
    stage.check()


def test_sparse_pages_go_and_come_back_by_address_and_a_hit_chooses_as_the_straight_run(far: Any) -> None:
    options = {"pages": 8, "host_pages": 200, "kv_mode": "sparse"}
    (straight, record), (other, _) = far(**options), far(**options)
    feed(straight, 0, 0, 1300, 128)
    before = straight.paging()
    feed(straight, 0, 1300, 1330, 1)
    other.restore(1, 1330, straight.capture(0))
    assert same(feed(straight, 0, 1330, 1480, 1), feed(other, 1, 1330, 1480, 1))
    assert straight._tables[0].chosen == other._tables[1].chosen
    assert record.replayed == 180
    assert straight.paging().page_ins > before.page_ins
    assert straight.paging().away_attended == before.away_attended, "in decode all that is chosen fits"


def test_two_that_choose_more_than_the_pool_holds_read_the_rest_where_it_lies(far: Any, make_tiny: Any) -> None:
    stage, record = far(pages=8, host_pages=200, kv_mode="sparse")
    alone = make_tiny("dense").stage(slots=2, pages=8, host_pages=200, kv_mode="sparse")
    feed(stage, 1, 0, 900, 128)
    assert same(feed(stage, 0, 0, 900, 128), feed(alone, 0, 0, 900, 128))
    feed(stage, 1, 900, 910, 1)
    before = record.replayed
    assert same(feed(stage, 0, 900, 910, 1), feed(alone, 0, 900, 910, 1))
    assert record.replayed == before + 10
    feed(stage, 1, 910, 911, 1)
    together = [Segment(slot, at, (TOKENS[at],), Wanted.LAST) for slot, at in ((0, 910), (1, 911))]
    stage.forward(Batch(tuple(together)), None)
    assert record.replayed == before + 12
    assert stage.paging().away_attended > 0
    for slot in (0, 1):
        stage.close(slot)
    stage.check()


class LatePageIns:
    """Pages that come back arrive as late as they may: when their layer waits for them, or somebody for all."""

    def __init__(self, layers: int, by_layer: bool = True) -> None:
        self._copies: list[list[Callable[[], None]]] = [[] for _ in range(layers)]
        self.by_layer = by_layer
        self._fresh: list[Callable[[], None]] = []
        self._open = self.under_way = False

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        self._open = self.under_way = True
        yield
        self._open = False
        if not self.by_layer:
            self.join()

    def fetch(self, targets: torch.Tensor, sources: torch.Tensor, nbytes: int, quietly: bool = False) -> None:
        if self._open:
            self._fresh.append(lambda: fetch_pages(targets, sources, nbytes))
        else:
            fetch_pages(targets, sources, nbytes)

    def all_handed_over(self, layer: int) -> None:
        self._copies[layer] += self._fresh
        self._fresh = []

    def wait_for(self, layer: int) -> None:
        assert self.by_layer, "there is nothing that a layer could wait for"
        self._finish(layer + 1)

    def join(self) -> None:
        self._finish(len(self._copies))
        self.under_way = False

    def _finish(self, layers: int) -> None:
        for copies in self._copies[:layers]:
            while copies:
                copies.pop(0)()


def test_every_layer_waits_for_its_own_pages_on_their_way_back(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"pages": 8, "host_pages": 200, "kv_mode": "sparse"}
    (stage, record), (plain, _) = far(**options), far(**options)
    late = LatePageIns(len(stage.pool.kv))
    stage.pool.page_ins = late
    plain_logits = feed(plain, 0, 0, 1300, 128) + feed(plain, 0, 1300, 1480, 1)
    monkeypatch.setattr(page_memory, "fetch_pages", late.fetch)
    assert same(feed(stage, 0, 0, 1300, 128) + feed(stage, 0, 1300, 1480, 1), plain_logits)
    assert record.replayed == 180
    assert stage.paging() == plain.paging()
    stage.restore(1, 1480, stage.capture(0))
    assert not stage.pool.under_way, "a restored sequence is there"
    stage.close(0)
    stage.close(1)
    stage.check()


def test_where_layers_cannot_wait_for_their_pages_no_step_does(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, record = far(pages=8, host_pages=200, kv_mode="sparse")
    stage.pool.page_ins = late = LatePageIns(len(stage.pool.kv), by_layer=False)
    monkeypatch.setattr(page_memory, "fetch_pages", late.fetch)
    feed(stage, 0, 0, 1300, 128)
    feed(stage, 0, 1300, 1380, 1)
    assert record.replayed == 80
    assert stage.paging().page_ins


def test_a_sequence_closed_while_its_pages_are_under_way_waits_for_them(
    far: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, _ = far(pages=8, host_pages=200)
    stage.pool.page_ins = late = LatePageIns(len(stage.pool.kv))
    monkeypatch.setattr(page_memory, "fetch_pages", late.fetch)
    feed(stage, 0, 0, 384, 128)
    feed(stage, 1, 0, 384, 128)
    stage.close(1)
    stage.pool.page_in(stage._tables[0])
    assert late.under_way, "what a forward that fails here would leave"
    stage.close(0)
    assert not late.under_way

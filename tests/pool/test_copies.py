from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pytest
import torch

from rekindle.placement import reserve
from rekindle.pool import copies as copying
from rekindle.pool.copies import (
    EDGE,
    RING,
    Cuts,
    HostCopies,
    Slabs,
    Uploads,
    copy_all,
    cut,
    in_groups,
    in_one_piece,
    size_of,
)
from rekindle.pool.pages import AT_ONCE, PagePool
from rekindle.snapshots.types import Page
from rekindle.spec import PAGE


def test_tensors_that_lie_behind_each_other_are_one_without_a_copy() -> None:
    memory = torch.arange(4 + 3 * 6, dtype=torch.int32)
    tensors = [memory[4 + i * 6 : 10 + i * 6].view(2, 3) for i in range(3)]
    one = in_one_piece(tensors)
    assert torch.equal(one, torch.stack(tensors))
    assert one.data_ptr() == tensors[0].data_ptr()


def test_tensors_that_lie_anywhere_are_one_too() -> None:
    memory = torch.arange(24, dtype=torch.int32)
    swapped = [memory[6:12].view(2, 3), memory[0:6].view(2, 3)]
    with_a_gap = [memory[0:6].view(2, 3), memory[12:18].view(2, 3)]
    apart = [torch.ones(2, 3), torch.zeros(2, 3)]
    for tensors in (swapped, with_a_gap, apart):
        assert torch.equal(in_one_piece(tensors), torch.stack(tensors))


def test_on_a_cpu_nothing_is_waited_for() -> None:
    copies = HostCopies(torch.device("cpu"), 0)
    (rows,) = copies.take_rows([torch.ones(3, 2)])
    assert [row.tolist() for row in rows] == [[1, 1]] * 3
    assert copies.ready() is None


def test_what_is_cut_from_slabs_never_overlaps_and_begins_on_an_edge() -> None:
    slabs = Slabs(2, 4 * EDGE, lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))  # pinned or not is all the same
    cuts = Cuts(slabs)
    shapes = [(3,), (2, 40), (0, 7), (300,), (EDGE,), (1,), (64, 3), (5 * EDGE,)]
    cut = [cuts.like(torch.empty(shape, dtype=torch.float32)) for shape in shapes]
    slabs.stop()
    for number, tensor in enumerate(cut):
        tensor.fill_(number)
    assert [tuple(tensor.shape) for tensor in cut] == shapes
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(cut))
    assert all(tensor.storage_offset() * 4 % EDGE == 0 for tensor in cut)
    assert cut[0].untyped_storage().data_ptr() == cut[1].untyped_storage().data_ptr()  # small ones share a slab


def mixed() -> list[torch.Tensor]:
    """Types, sizes and strides as a stage has them: states, windows, the rows of an open page, none at all."""
    draw = torch.Generator().manual_seed(0)
    pages = torch.randn(3, 2, 64, 2, 8, generator=draw).to(torch.bfloat16)
    states = [torch.randn(2, 9, 7, generator=draw) for _ in range(5)]
    return [*states[:3], pages[1, :, :5], pages[2, :, :0], torch.randn(3, 17, generator=draw), *states[3:]]


def test_what_was_set_apart_in_one_buffer_is_bit_for_bit_what_it_was() -> None:
    tensors = mixed()
    for most in (1, 5 * EDGE, 1 << 20):
        groups = list(in_groups(tensors, most))
        assert [id(tensor) for group in groups for tensor in group] == [id(tensor) for tensor in tensors]
        assert all(size_of(group) <= most or len(group) == 1 for group in groups)
        for group in groups:
            buffer = torch.full((size_of(group),), 255, dtype=torch.uint8)
            copy_all(cut(buffer, group), group)
            for place, tensor in zip(cut(buffer.clone(), group), group, strict=True):
                assert place.dtype == tensor.dtype and torch.equal(place, tensor)


def test_a_capture_does_not_feel_what_is_written_after_it() -> None:
    tensors = mixed()
    truth = [tensor.clone() for tensor in tensors]
    taken = HostCopies(torch.device("cpu"), 0).take_live(tensors)
    for tensor in tensors:
        tensor.zero_()
    assert all(torch.equal(a, b) for a, b in zip(taken, truth, strict=True))


class PaperStream:
    """A device that reads its source late: when somebody waits for it, or at the end."""

    def __init__(self) -> None:
        self.asked: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self.arrived: list[torch.Tensor] = []

    def copy(self, tensor: torch.Tensor) -> None:
        self.asked.append((tensor, self.arrived))

    def wait(self) -> None:
        for tensor, to in self.asked:
            to.append(tensor.clone())
        self.asked.clear()

    @property
    def done(self) -> bool:
        return not self.asked


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Those that will have been made."""
    monkeypatch.setattr(copying, "SLAB", 4 * EDGE)
    return []


def uploads(stream: PaperStream, made: list[torch.Tensor]) -> Uploads:
    def slab() -> torch.Tensor:
        made.append(torch.zeros(copying.SLAB, dtype=torch.uint8))
        return made[-1]

    return Uploads(slab, lambda: stream)


def test_a_slab_is_filled_again_only_after_its_copies_have_passed(small_slabs: list[torch.Tensor]) -> None:
    stream = PaperStream()
    tensors = [torch.full((n % 5 * 64 + 1,), float(n)) for n in range(60)] + [torch.full((2000,), -1.0)]
    through = uploads(stream, small_slabs)
    for _ in range(2):  # slabs are kept from one restore to the next
        for group in through.through(iter(tensors)):
            for tensor in group:
                stream.copy(tensor)
        stream.wait()
        assert all(torch.equal(a, b) for a, b in zip(stream.arrived, tensors, strict=True))
        stream.arrived.clear()
    assert len(small_slabs) == RING


def test_a_restore_that_fails_halfway_loses_no_slab(small_slabs: list[torch.Tensor]) -> None:
    stream = PaperStream()
    through = uploads(stream, small_slabs)
    tensors = [torch.full((200,), float(n)) for n in range(40)]
    for _ in range(3):
        groups = through.through(tensors)
        next(groups)
        groups.close()  # type: ignore[attr-defined]
    moved = [tensor.clone() for group in through.through(tensors) for tensor in group]
    assert all(torch.equal(a, b) for a, b in zip(moved, tensors, strict=True))


class Given:
    """Slabs that are given out, and how many of them are still held."""

    def __init__(self) -> None:
        self._held: list[weakref.ref[np.ndarray]] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        memory = np.zeros(nbytes, dtype=np.uint8)
        self._held.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    def __len__(self) -> int:
        return sum(memory() is not None for memory in self._held)


class PaperGpu(HostCopies):
    """Says of a CPU that it is a GPU, as far as slabs are concerned."""

    def __init__(self, made: list[torch.Tensor], given: Given | None = None) -> None:
        super().__init__(torch.device("cpu"), 0)
        self._use(Slabs(1, copying.SLAB, (Given() if given is None else given).allocate), PaperStream)
        self._uploads = uploads(PaperStream(), made)

    @property
    def pinned(self) -> bool:
        return True

    def _copy(self, runs: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor]) -> None:
        for its_runs, tensor in zip(runs, tensors, strict=True):
            for run, rows in zip(its_runs, tensor.split([len(run) for run in its_runs]), strict=True):
                run.copy_(rows)


@pytest.mark.parametrize("together", [True, False], ids=["as read from disk", "as come over a link"])
def test_pages_that_are_not_pinned_come_up_bit_for_bit(small_slabs: list[torch.Tensor], together: bool) -> None:
    count, layers, row = 11, 2, 2
    pool = PagePool(count, layers, 1, row, torch.bfloat16, torch.device("cpu"), host_pages=count)
    pool.copies = PaperGpu(small_slabs)
    table = pool.new_table()
    data = torch.randn(count, layers, 2, PAGE, 1, row).to(torch.bfloat16)
    for page in data:
        table.pages.append(pool.adopt(tuple(Page(layer if together else layer.clone()) for layer in page)))
    table.position = count * PAGE
    pool.tick([table])
    pool.bring_back(table)
    for page, truth in zip(table.pages, data, strict=True):
        assert page.place is not None
        assert torch.equal(torch.stack(pool.all_data(page)), truth)
    assert len(small_slabs) == RING


def test_states_that_are_not_pinned_come_up_bit_for_bit(small_slabs: list[torch.Tensor]) -> None:
    truth = [torch.randn(n * 37 % 300, 2) for n in range(1, 40)]
    to = [torch.zeros_like(tensor) for tensor in truth]
    PaperGpu(small_slabs).send(list(zip(to, truth, strict=True)))
    assert all(torch.equal(a, b) for a, b in zip(to, truth, strict=True))
    assert len(small_slabs) == RING


def test_what_the_plan_reserves_is_what_the_pool_takes() -> None:
    assert (reserve.SLAB, reserve.CAPTURED_PAGES) == (copying.SLAB, AT_ONCE)
    assert reserve.STAGING_SLABS == RING + 3  # the two that are cut, and the one that waits for room in the stock


# Slabs


@pytest.mark.parametrize("pages", [1, 33, 63, 64, 65])
def test_pages_of_many_layers_fill_every_slab(pages: int) -> None:
    given, layers = Given(), 6
    slabs = Slabs(1, 64 * EDGE, given.allocate)
    slabs.stop()  # without a stock, what is held is what was cut
    cuts = Cuts(slabs)
    runs = [cuts.rows(torch.empty(pages, EDGE, dtype=torch.uint8)) for _ in range(layers)]
    assert [sum(map(len, its_runs)) for its_runs in runs] == [pages] * layers
    assert len(given) == -(-layers * pages // 64)


def test_a_row_larger_than_a_slab_lies_alone() -> None:
    slabs = Slabs(1, 4 * EDGE, Given().allocate)
    slabs.stop()
    runs = Cuts(slabs).rows(torch.empty(3, 5 * EDGE, dtype=torch.uint8))
    assert [tuple(run.shape) for run in runs] == [(1, 5 * EDGE)] * 3


def test_own_parts_give_their_slabs_back_while_the_pages_beside_them_live(small_slabs: list[torch.Tensor]) -> None:
    given = Given()
    copies = PaperGpu(small_slabs, given)
    copies.stop()
    states, pages = torch.randn(2, 3 * EDGE // 4), torch.randn(3, EDGE // 4)  # a slab holds one state, or four pages
    held = []
    for _ in range(5):
        own = copies.take_live(list(states))
        held += copies.take_rows([pages])
        assert torch.equal(torch.stack(own), states)
        del own
    assert all(torch.equal(torch.stack(rows), pages) for rows in held)
    assert len(given) == 4 + 1  # fifteen pages, and the slab that is cut for states


class Short:
    """Memory that is refused a few times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.given = threading.Event()

    def allocate(self, nbytes: int) -> torch.Tensor:
        if self.times:
            self.times -= 1
            raise torch.OutOfMemoryError("no more pinned memory")
        self.given.set()
        return torch.zeros(nbytes, dtype=torch.uint8)


def test_the_stock_asks_again_for_memory_it_was_refused(caplog: pytest.LogCaptureFixture) -> None:
    short = Short(3)
    with caplog.at_level(logging.WARNING):
        slabs = Slabs(1, EDGE, short.allocate, pause=0.001)
        assert short.given.wait(30)
        slabs.stop()
    assert slabs.refused == 3
    assert [record.message for record in caplog.records] == [
        "no pinned memory for the stock, asking again every 0.001 s: no more pinned memory"
    ]


@pytest.mark.parametrize("refused", [0, 1_000_000], ids=["waits for room", "waits to ask again"])
def test_a_stock_that_is_stopped_leaves_no_thread_and_no_memory(refused: int) -> None:
    given, short = Given(), Short(refused)

    def allocate(nbytes: int) -> torch.Tensor:
        short.allocate(0)
        return given.allocate(nbytes)

    slabs = Slabs(2, EDGE, allocate, pause=3600)
    slabs.stop()
    assert not slabs._thread.is_alive()
    assert len(given) == 0


# Uploads that fail


class Broken(PaperGpu):
    """The link breaks behind the first group."""

    def through(self, tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        yield next(iter(super().through(tensors)))
        raise RuntimeError("the link broke")


def test_pages_whose_upload_fails_stay_away(small_slabs: list[torch.Tensor]) -> None:
    count = 11
    pool = PagePool(count, 1, 1, 2, torch.bfloat16, torch.device("cpu"), host_pages=count)
    table = pool.new_table()
    data = torch.randn(count, 2, PAGE, 1, 2).to(torch.bfloat16)
    table.pages += [pool.adopt((Page(page),)) for page in data]
    table.position = count * PAGE
    pool.tick([table])
    pool.copies = Broken(small_slabs)
    with pytest.raises(RuntimeError, match="the link broke"):
        pool.bring_back(table)
    assert [page.place for page in table.pages] == [None] * count
    assert pool.counts.page_ins == 0
    assert (pool.places_of(table) == pool.scratch_page).all()
    pool.check()
    pool.copies = PaperGpu(small_slabs)
    pool.bring_back(table)
    assert all(torch.equal(pool.data(page, 0), truth) for page, truth in zip(table.pages, data, strict=True))
    pool.check()

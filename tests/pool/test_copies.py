from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rekindle.buffers import IN_FLIGHT, UPLOAD_SLABS
from rekindle.errors import CopyFailed
from rekindle.kernels.paging import fetch_pages
from rekindle.kernels.pinning import pin
from rekindle.kernels.upload import CopyThreads, Uploads, cut, in_groups, size_of
from rekindle.pool.copies import HostCopies, LiveCopy, stack_or_view
from rekindle.pool.page_addresses import PageAddresses
from rekindle.pool.page_table import PageTable
from rekindle.pool.pages import PagePool
from rekindle.snapshots.slabs import EDGE, Slab, Slabs
from rekindle.snapshots.types import Page, Ready
from rekindle.spec import PAGE


def test_tensors_that_lie_behind_each_other_are_one_without_a_copy() -> None:
    memory = torch.arange(4 + 3 * 6, dtype=torch.int32)
    tensors = [memory[4 + i * 6 : 10 + i * 6].view(2, 3) for i in range(3)]
    one = stack_or_view(tensors)
    assert torch.equal(one, torch.stack(tensors))
    assert one.data_ptr() == tensors[0].data_ptr()


def test_tensors_that_lie_anywhere_are_one_too() -> None:
    memory = torch.arange(24, dtype=torch.int32)
    swapped = [memory[6:12].view(2, 3), memory[0:6].view(2, 3)]
    with_a_gap = [memory[0:6].view(2, 3), memory[12:18].view(2, 3)]
    apart = [torch.ones(2, 3), torch.zeros(2, 3)]
    for tensors in (swapped, with_a_gap, apart):
        assert torch.equal(stack_or_view(tensors), torch.stack(tensors))


def test_on_a_cpu_nothing_is_waited_for() -> None:
    copies = HostCopies(torch.device("cpu"), 0)
    layers = [torch.randn(4, 2, 3), torch.randn(4, 2, 3)]
    columns = copies.take_pages(layers, [3, 1])
    for column, place in zip(columns, (3, 1), strict=True):
        assert [page.data.tolist() for page in column] == [layer[place].tolist() for layer in layers]
    layers[0].zero_()
    assert all(bool(page.data.any()) for column in columns for page in column), "copies, not views"
    assert copies.ready() is None


def mixed() -> list[torch.Tensor]:
    """Types, sizes and strides as a stage has them: states, windows, the rows of an open page, none at all."""
    draw = torch.Generator().manual_seed(0)
    pages = torch.randn(3, 2, 64, 2, 8, generator=draw).to(torch.bfloat16)
    states = [torch.randn(2, 9, 7, generator=draw) for _ in range(5)]
    return [*states[:3], pages[1, :, :5], pages[2, :, :0], torch.randn(3, 17, generator=draw), *states[3:]]


def test_groups_keep_the_order_and_their_size() -> None:
    tensors = mixed()
    for most in (1, 5 * EDGE, 1 << 20):
        groups = list(in_groups(tensors, most))
        assert [id(tensor) for group in groups for tensor in group] == [id(tensor) for tensor in tensors]
        assert all(size_of(group) <= most or len(group) == 1 for group in groups)
        for group in groups:
            buffer = torch.full((size_of(group),), 255, dtype=torch.uint8)
            for place, tensor in zip(cut(buffer, group), group, strict=True):
                place.copy_(tensor)
            for place, tensor in zip(cut(buffer.clone(), group), group, strict=True):
                assert place.dtype == tensor.dtype and torch.equal(place, tensor)


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


SMALL = 4 * EDGE


@pytest.fixture
def small_slabs() -> list[torch.Tensor]:
    """Those that will have been made."""
    return []


def uploads(stream: PaperStream, made: list[torch.Tensor]) -> Uploads:
    def slab() -> torch.Tensor:
        made.append(torch.zeros(SMALL, dtype=torch.uint8))
        return made[-1]

    return Uploads(slab, lambda: stream, SMALL, UPLOAD_SLABS, CopyThreads(4))


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
    assert len(small_slabs) == UPLOAD_SLABS


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


class PaperDevice:
    """The stream of the copies to the host: they are made when somebody waits."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def wait(self) -> None:
        for do in self.work:
            do()
        self.work.clear()

    @property
    def done(self) -> bool:
        return not self.work


def pinned_on_paper(address: int, nbytes: int) -> Callable[[], object]:
    return lambda: None


class PaperGpu(HostCopies):
    """Says of a CPU that it is a GPU. Copies to the host begin late, as on a stream that has other work."""

    def __init__(self, made: list[torch.Tensor], slabs: Slabs | None = None) -> None:
        super().__init__(torch.device("cpu"), 0)
        self.device = PaperDevice()
        self._use(slabs or Slabs(size=SMALL, pin=pinned_on_paper))
        self._uploads = uploads(PaperStream(), made)

    def _after_current(self) -> Callable[[], object]:
        return lambda: None

    def _on_stream(self, hand_over: Callable[[], None], begin: Callable[[], object]) -> None:
        self.device.work.append(hand_over)

    def _copied(self) -> Ready:
        return self.device

    def _follow_copies(self) -> None:
        self.device.wait()

    def _passed(self) -> Ready:
        return self.device


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
    pool.page_in(table)
    for page, truth in zip(table.pages, data, strict=True):
        assert page.place is not None
        assert torch.equal(torch.stack(pool.all_data(page)), truth)
    assert len(small_slabs) == UPLOAD_SLABS


def test_states_that_are_not_pinned_come_up_bit_for_bit(small_slabs: list[torch.Tensor]) -> None:
    truth = [torch.randn(n * 37 % 300, 2) for n in range(1, 40)]
    to = [torch.zeros_like(tensor) for tensor in truth]
    PaperGpu(small_slabs).send(list(zip(to, truth, strict=True)))
    assert all(torch.equal(a, b) for a, b in zip(to, truth, strict=True))
    assert len(small_slabs) == UPLOAD_SLABS


def test_pinned_states_are_fetched_by_size_and_only_what_lies_apart_is_copied(
    small_slabs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    launches = list[tuple[int, int]]()

    def fetched(targets: torch.Tensor, sources: torch.Tensor, nbytes: int) -> None:
        launches.append((targets.numel(), nbytes))
        fetch_pages(targets, sources, nbytes)

    monkeypatch.setattr("rekindle.pool.copies.fetch_pages", fetched)
    slots = [torch.full((3, *shape), torch.nan) for shape in [(4, 32), (2, 64), (3, 32), (4, 32), (5, 7), (0, 3)]]
    places = torch.full((4, 2, 64, 2, 8), torch.nan)
    to = [*(slot[1] for slot in slots), places[2, :, :5]]
    truth = [torch.randn(tensor.shape) for tensor in to]
    PaperGpu(small_slabs).send(list(zip(to, truth, strict=True)))
    assert all(torch.equal(a, b) for a, b in zip(to, truth, strict=True))
    assert launches == [(3, 512), (1, 384)], "not what has an odd size or lies in two pieces"
    for slot in slots:
        assert bool(slot[[0, 2]].isnan().all()), "its neighbours stay"
    assert int(places.isnan().sum()) == places.numel() - to[-1].numel()


@pytest.mark.parametrize("odd", ["not pinned", "read across", "amid a word", "of another type", "written across"])
def test_what_the_device_cannot_read_in_words_as_it_lies_is_copied(
    small_slabs: list[torch.Tensor], odd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a tensor of the same size that it can."""
    memory = torch.randn(2, 40, 32)
    truth, to = memory[0, :4], torch.full((4, 32), torch.nan)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: odd != "not pinned" or tensor is not truth)
    if odd == "read across":
        truth = torch.randn(32, 4).T
    elif odd == "amid a word":
        truth = torch.randn(200)[2:130].view(4, 32)
    elif odd == "of another type":
        truth = truth.to(torch.int32)
    elif odd == "written across":
        to = torch.full((32, 4), torch.nan).T
    launches = list[int]()
    monkeypatch.setattr("rekindle.pool.copies.fetch_pages", lambda targets, sources, nbytes: launches.append(0))
    PaperGpu(small_slabs).send([(to, truth)])
    assert not launches
    assert torch.equal(to, truth.to(torch.float32))


# Pinning


class PaperDriver:
    """Notes for which device and on whose thread it is called; refuses addresses below a hundred."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int, str, bool]] = []
        self._device = "none"
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", self._on)

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        self._device = str(device)
        yield
        self._device = "none"

    def _note(self, what: str, address: int) -> None:
        here = threading.current_thread() is threading.main_thread()
        self.calls.append((what, address, self._device, here))

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self._note("pin", address)
        return 2 if address < 100 else 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self._note("unpin", address)
        return 0


def test_a_refusal_to_pin_is_left_behind_on_no_thread_that_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = PaperDriver(monkeypatch)
    assert pin(torch.device("cuda:1"), 64, 4096) is None
    assert driver.calls == [("pin", 64, "cuda:1", False)]


def test_memory_is_pinned_and_unpinned_on_the_device_that_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = PaperDriver(monkeypatch)
    unpin = pin(torch.device("cuda:1"), 4096, 4096)
    assert unpin is not None
    unpin()
    assert [call[:3] for call in driver.calls] == [("pin", 4096, "cuda:1"), ("unpin", 4096, "cuda:1")]


# Captures


@pytest.mark.parametrize("gpu", [False, True])
def test_a_capture_does_not_feel_what_is_written_after_it(small_slabs: list[torch.Tensor], gpu: bool) -> None:
    copies = PaperGpu(small_slabs) if gpu else HostCopies(torch.device("cpu"), 0)
    tensors = mixed()
    truth = [tensor.clone() for tensor in tensors]
    taken = copies.copy_live(tensors).to_host()
    for tensor in tensors:
        tensor.zero_()
    copies.join()
    assert [tensor.dtype for tensor in taken] == [tensor.dtype for tensor in truth]
    assert all(torch.equal(a, b) for a, b in zip(taken, truth, strict=True))
    assert all(tensor.is_contiguous() for tensor in taken)


def filled_pool(pages: int, layers: int = 3) -> tuple[PagePool, torch.Tensor]:
    """A pool whose places hold other numbers each: [layers, places + 1, 2, PAGE, 1, 2]."""
    pool = PagePool(pages, layers, 1, 2, torch.bfloat16, torch.device("cpu"), host_pages=pages)
    data = torch.randn(layers, pages + 1, 2, PAGE, 1, 2).to(torch.bfloat16)
    for layer, values in zip(pool.kv, data, strict=True):
        layer.copy_(values)
    return pool, data


def all_equal(columns: Iterable[tuple[Page, ...]], data: torch.Tensor, places: Iterable[int]) -> bool:
    pairs = zip(columns, places, strict=True)
    return all(torch.equal(torch.stack([page.data for page in column]), data[:, place]) for column, place in pairs)


@pytest.mark.parametrize("pages", [1, 63, 64, 65, 200])
def test_pages_arrive_bit_for_bit_with_their_layers_behind_each_other(
    small_slabs: list[torch.Tensor], pages: int
) -> None:
    ten = Slabs(size=10 * 3 * 2 * PAGE * 4, pin=pinned_on_paper)  # each holds ten pages of three layers
    pool, data = filled_pool(pages)
    copies = PaperGpu(small_slabs, ten)
    places = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).tolist()
    columns = copies.take_pages(pool.kv, places)
    ready = copies.ready()
    assert ready is not None
    assert not ready.done
    ready.wait()
    assert all_equal(columns, data, places)
    assert len({page.slab for column in columns for page in column}) == -(-pages // 10)
    assert all(
        stack_or_view([page.data for page in column]).data_ptr() == column[0].data.data_ptr() for column in columns
    )


def test_captured_pages_come_back_by_their_addresses(small_slabs: list[torch.Tensor]) -> None:
    pool, data = filled_pool(12)
    pool.copies = copies = PaperGpu(small_slabs)
    pool.addresses = PageAddresses(pool.kv, pool.total)
    places = [7, 2, 11, 3]
    columns = copies.take_pages(pool.kv, places)
    copies.join()
    for layer in pool.kv:
        layer.zero_()
    table = pool.new_table()
    table.pages += [pool.adopt(column) for column in columns]
    table.position = 4 * PAGE
    assert all(page.host_page_id is not None for page in table.pages)
    pool.tick([table])
    pool.page_in(table)
    for page, place in zip(table.pages, places, strict=True):
        assert torch.equal(torch.stack(pool.all_data(page)), data[:, place])


def test_how_pages_come_back_is_recorded_once_and_every_replay_brings_those_of_its_time(
    small_slabs: list[torch.Tensor],
) -> None:
    pool, data = filled_pool(12)
    recorded = list[Callable[[], None]]()
    pool._record = lambda step: recorded.append(step) or step
    pool.copies = copies = PaperGpu(small_slabs)
    pool.addresses = PageAddresses(pool.kv, pool.total)
    columns = copies.take_pages(pool.kv, range(12))
    copies.join()
    for layer in pool.kv:
        layer.zero_()
    for some in (range(4), range(4, 11)):
        table = pool.new_table()
        table.pages += [pool.adopt(columns[place]) for place in some]
        table.position = len(some) * PAGE
        pool.tick([table])
        pool.page_in(table)
        for page, place in zip(table.pages, some, strict=True):
            assert torch.equal(torch.stack(pool.all_data(page)), data[:, place])
    assert len(recorded) == 1


def test_a_place_is_written_again_only_after_it_was_copied(small_slabs: list[torch.Tensor]) -> None:
    pool, data = filled_pool(5)
    pool.copies = PaperGpu(small_slabs)
    table = pool.new_table()
    pool.extend(table, 5 * PAGE)
    table.position = 5 * PAGE
    places = [page.place for page in table.pages if page.place is not None]
    columns = pool.export(table.pages[:4])
    pool.truncate(table, 3 * PAGE + 7)  # opens the last page that is copied: its rows are written next
    for layer in pool.kv:
        layer.zero_()
    assert all_equal(columns, data, places[:4])
    columns = pool.export(table.pages[:3])
    assert all_equal(columns, data, places[:3])  # they were made above


def test_a_closed_table_gives_its_places_away_only_after_they_were_copied(small_slabs: list[torch.Tensor]) -> None:
    pool, data = filled_pool(4)
    pool.copies = PaperGpu(small_slabs)
    table = pool.new_table()
    pool.extend(table, 4 * PAGE)
    places = [page.place for page in table.pages if page.place is not None]
    columns = pool.export(table.pages)
    pool.clear(table)
    for layer in pool.kv:
        layer.zero_()
    assert all_equal(columns, data, places)


class Slow(Slab):
    """Memory that the system gives when it is told to."""

    given = threading.Event()

    def make(self) -> None:
        assert Slow.given.wait(30)
        super().make()


def test_a_capture_does_not_wait_for_memory(small_slabs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.snapshots.slabs.Slab", Slow)
    Slow.given.clear()
    pool, data = filled_pool(70)
    copies = PaperGpu(small_slabs)
    states = [torch.randn(7, 9), torch.randn(50)]
    truth = [state.clone() for state in states]
    columns, own = copies.take_pages(pool.kv, range(70)), copies.copy_live(states).to_host()
    for state in states:
        state.zero_()
    ready = copies.ready()
    assert ready is not None
    assert not ready.done
    assert not any(page.pinned for column in columns for page in column), "no GPU can read what is not made"
    Slow.given.set()
    ready.wait()
    copies.device.wait()
    assert all_equal(columns, data, range(70))
    assert all(torch.equal(a, b) for a, b in zip(own, truth, strict=True))
    assert all(page.pinned for column in columns for page in column)
    copies.stop()


def test_the_device_sets_no_more_captures_apart_than_the_plan_counts(
    small_slabs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.snapshots.slabs.Slab", Slow)
    Slow.given.clear()
    copies, stack = PaperGpu(small_slabs), torch.stack
    copy_stacks, apart, most = copies._copy_stacks, 0, 0

    def counted(tensors: list[torch.Tensor]) -> torch.Tensor:
        nonlocal apart, most
        apart += 1
        most = max(most, apart)
        if apart == IN_FLIGHT:
            Slow.given.set()  # who asks for more waits until there is memory for these, and they are copied
        return stack(tensors)

    def copied(*parts: Any) -> None:
        nonlocal apart
        copy_stacks(*parts)
        apart -= 1

    monkeypatch.setattr(torch, "stack", counted)
    monkeypatch.setattr(copies, "_copy_stacks", copied)
    taken = [copies.copy_live([torch.full((200,), float(n))]).to_host() for n in range(3 * IN_FLIGHT)]
    copies.join()
    assert most == IN_FLIGHT
    assert [int(own[0][0]) for own in taken] == [*range(3 * IN_FLIGHT)]
    copies.stop()


def test_copies_keep_their_order_though_the_first_wait_for_memory(
    small_slabs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.snapshots.slabs.Slab", Slow)
    Slow.given.set()
    copies = PaperGpu(small_slabs)
    copies.copy_live([torch.zeros(8)]).to_host()
    first = copies.ready()
    assert first is not None
    first.wait()
    handed_over: list[str] = []
    Slow.given.clear()
    late, ready = copies.slabs.take(EDGE), copies._own.cut(EDGE)  # type: ignore[union-attr]
    copies._copy([late], lambda: handed_over.append("late"))
    copies._copy([ready], lambda: handed_over.append("ready"))
    Slow.given.set()
    copies.join()
    assert handed_over == ["late", "ready"]
    copies.stop()


class Busy(PaperGpu):
    """Knows of what it was told to copy no more than addresses."""

    def _on_stream(self, hand_over: Callable[[], None], begin: Callable[[], object]) -> None:
        hand_over()
        super()._on_stream(lambda: None, begin)


def test_memory_is_not_used_again_while_the_device_may_read_or_write_it(small_slabs: list[torch.Tensor]) -> None:
    copies = Busy(small_slabs)
    assert copies.slabs is not None
    copies.slabs.spare = lambda: 1 << 30
    taken = copies.copy_live([torch.ones(30)]).to_host()
    ready = copies.ready()
    del taken  # nobody wants the capture any more
    assert copies.slabs.idle_bytes == 0
    assert ready is not None
    ready.wait()
    copies._thread.submit(int).result()  # it has let go of the work before
    copies.let_go()
    assert copies.slabs.idle_bytes == 4 * EDGE

    source = torch.from_numpy(copies.slabs.take(1).memory)
    assert copies.slabs.idle_bytes == 0
    copies.device.work.append(lambda: None)
    copies.hold(source)
    copies.let_go()
    del source
    assert copies.slabs.idle_bytes == 0
    copies.device.wait()
    copies.let_go()
    assert copies.slabs.idle_bytes == 4 * EDGE


def test_own_parts_give_their_slabs_back_while_the_pages_beside_them_live(small_slabs: list[torch.Tensor]) -> None:
    pool, data = filled_pool(15, 1)
    copies = PaperGpu(small_slabs)
    assert copies.slabs is not None
    copies.slabs.spare = lambda: 1 << 30
    states = torch.randn(2, 3 * EDGE // 4)  # a slab holds one state, or two pages
    held = []
    for start in range(0, 15, 3):
        own = copies.copy_live(list(states)).to_host()
        held += copies.take_pages(pool.kv, range(start, start + 3))
        copies.join()
        copies._thread.submit(int).result()  # it has let go of the work before
        copies.let_go()
        assert torch.equal(torch.stack(own), states)
        del own
    assert all_equal(held, data, range(15))
    assert copies.slabs.idle_bytes == 2 * 4 * EDGE  # of the two states, used again and again


def test_what_waits_for_memory_when_the_copies_are_stopped_still_comes(
    small_slabs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.snapshots.slabs.Slab", Slow)
    Slow.given.clear()
    copies = PaperGpu(small_slabs)
    (one,), (two,) = (copies.copy_live([torch.full((50,), value)]).to_host() for value in (7.0, 8.0))
    ready = copies.ready()
    stopping = threading.Thread(target=copies.stop)
    stopping.start()
    Slow.given.set()
    stopping.join()
    assert ready is not None
    ready.wait()
    assert torch.equal(one, torch.full((50,), 7.0))
    assert torch.equal(two, torch.full((50,), 8.0))


# Copies that fail


class Failing(PaperGpu):
    """The device refuses some work: behind the first copies of it, which are under way."""

    refuses = 0

    def _on_stream(self, hand_over: Callable[[], None], begin: Callable[[], object]) -> None:
        if self.refuses:
            self.refuses -= 1
            self.device.work.append(lambda: None)
            raise RuntimeError("no launch")
        super()._on_stream(hand_over, begin)


def failed_export(made: list[torch.Tensor], pages: int = 3) -> tuple[PagePool, PageTable, torch.Tensor, Failing]:
    """A table whose pages were handed to the thread, which could not copy them."""
    pool, data = filled_pool(pages)
    pool.copies = copies = Failing(made)
    table = pool.new_table()
    pool.extend(table, pages * PAGE)
    table.position = pages * PAGE
    copies.refuses = 1
    pool.export(table.pages)
    copies._thread.submit(int).result()  # it has tried
    return pool, table, data, copies


def test_copies_that_failed_are_done_and_say_so_to_whoever_waits(small_slabs: list[torch.Tensor]) -> None:
    pool, table, _, copies = failed_export(small_slabs)
    ready = pool.ready(table.pages)
    assert ready is not None
    for _ in range(2):
        assert ready.done
        with pytest.raises(CopyFailed, match="no launch"):
            ready.wait()
        copies.let_go()
        copies.join()
    copies.device.wait()
    copies.let_go()
    assert not copies._held
    copies.stop()


def test_pages_whose_copies_failed_are_copied_again(small_slabs: list[torch.Tensor]) -> None:
    pool, table, data, copies = failed_export(small_slabs)
    places = [page.place for page in table.pages if page.place is not None]
    columns = pool.export(table.pages)
    ready = pool.ready(table.pages)
    assert ready is not None
    ready.wait()
    assert all_equal(columns, data, places)
    pool.check()
    copies.stop()


def test_a_capture_that_shares_pages_with_one_that_fails_later_fails_too(
    small_slabs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.snapshots.slabs.Slab", Slow)
    Slow.given.clear()
    pool, _ = filled_pool(2)
    pool.copies = copies = Failing(small_slabs)
    table = pool.new_table()
    pool.extend(table, 2 * PAGE)
    table.position = 2 * PAGE
    copies.refuses = 1
    pool.export(table.pages)  # the first capture's, which wait for memory …
    assert pool.export(table.pages) == [page.copies for page in table.pages]  # … and the second's
    copies.copy_live([torch.ones(5)]).to_host()
    ready = pool.ready(table.pages)
    Slow.given.set()
    assert ready is not None
    with pytest.raises(CopyFailed, match="no launch"):
        ready.wait()
    copies.stop()


def test_a_page_is_not_sent_away_without_copies(small_slabs: list[torch.Tensor]) -> None:
    pool, data = filled_pool(2)
    pool.copies = copies = Failing(small_slabs)
    table = pool.new_table()
    pool.extend(table, 2 * PAGE)
    table.position = 2 * PAGE
    copies.refuses = 1
    with pytest.raises(CopyFailed, match="cannot leave the device"):
        pool.extend(table, 3 * PAGE)
    pool.check()
    assert all(page.place is not None for page in table.pages)
    pool.tick([table])
    pool.extend(table, 3 * PAGE)
    (away,) = (page for page in table.pages if page.place is None)
    assert torch.equal(torch.stack(pool.all_data(away)), data[:, table.pages.index(away)])
    copies.stop()


def test_memory_is_held_though_the_copies_to_it_could_not_all_be_handed_over(small_slabs: list[torch.Tensor]) -> None:
    copies = Failing(small_slabs)
    assert copies.slabs is not None
    copies.slabs.spare = lambda: 1 << 30
    copies.copy_live([torch.ones(30)]).to_host()  # by the thread, which makes a slab
    copies.join()
    copies._thread.submit(int).result()
    copies.let_go()
    assert copies.slabs.idle_bytes == SMALL
    copies.refuses = 1
    with pytest.raises(RuntimeError, match="no launch"):
        copies.copy_live([torch.ones(30)]).to_host()
    copies.let_go()
    assert copies.slabs.idle_bytes == 0, "the device may still write it"
    copies.device.wait()
    copies.let_go()
    assert copies.slabs.idle_bytes == SMALL

    held = copies.slabs.take(1)  # so that the next has to be made, by the thread
    copies.refuses = 1
    copies.copy_live([torch.ones(30)]).to_host()
    copies._thread.submit(int).result()
    copies.let_go()
    copies._last = None  # it knows of the failure, and of what was to be copied
    copies._in_flight.clear()
    gc.collect()
    assert copies.slabs.idle_bytes == 0, "the device may still write it"
    copies.device.wait()
    copies.let_go()
    assert copies.slabs.idle_bytes == SMALL
    del held
    copies.stop()


class Unwilling(torch.Tensor):
    """Cannot be written."""

    def copy_(self, *args: Any, **kwargs: Any) -> Unwilling:
        raise RuntimeError("no launch")


def test_what_goes_up_is_held_before_the_device_reads_it() -> None:
    copies = PaperGpu([])
    source = torch.empty(0)
    with pytest.raises(RuntimeError, match="no launch"):
        copies.send([(torch.empty(0).as_subclass(Unwilling), source)])
    assert copies._in_use == [source]
    copies.stop()


# Uploads that fail


def test_memory_that_was_refused_once_is_asked_for_again() -> None:
    refusals = 1

    def slab() -> torch.Tensor:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise OSError("no memory")
        return torch.zeros(SMALL, dtype=torch.uint8)

    stream = PaperStream()
    through = Uploads(slab, lambda: stream, SMALL, UPLOAD_SLABS, CopyThreads(4))
    tensors = [torch.full((200,), float(n)) for n in range(3 * UPLOAD_SLABS)]
    with pytest.raises(OSError, match="no memory"):
        list(through.through(tensors))
    moved = [tensor.clone() for group in through.through(tensors) for tensor in group]
    assert all(torch.equal(a, b) for a, b in zip(moved, tensors, strict=True))
    through.stop()


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
        pool.page_in(table)
    assert [page.place for page in table.pages] == [None] * count
    assert pool.counts.page_ins == 0
    assert (pool.list_pages(table).places == pool.scratch_page).all()
    pool.check()
    pool.copies = PaperGpu(small_slabs)
    pool.page_in(table)
    assert all(torch.equal(pool.data(page, 0), truth) for page, truth in zip(table.pages, data, strict=True))
    pool.check()


def test_copies_that_wait_for_their_caller_begin_when_the_device_has_no_room_for_more(
    small_slabs: list[torch.Tensor],
) -> None:
    copies = PaperGpu(small_slabs)
    begun = [copies.copy_live([torch.full((30,), float(n))]) for n in range(IN_FLIGHT)]
    assert not copies.has_room() and copies.ready() is None, "nothing is on its way to the host"
    begun.append(copies.copy_live([torch.full((30,), float(IN_FLIGHT))]))
    assert copies.ready() is not None, "the first of them made room"
    taken = [copied.to_host()[0] for copied in begun]
    copies.join()
    assert [int(own[0]) for own in taken] == [*range(IN_FLIGHT + 1)]
    copies.stop()


def test_copies_that_could_not_begin_say_so_to_their_own_caller_alone(small_slabs: list[torch.Tensor]) -> None:
    copies = Failing(small_slabs)
    copies.copy_live([torch.zeros(30)]).to_host()
    copies.join()  # its slab is made: the next copies begin on the caller's thread
    lost = copies.copy_live([torch.ones(30)])
    copies.refuses = 1
    others = [copies.copy_live([torch.full((30,), float(n))]) for n in range(IN_FLIGHT)]  # the last waits for `lost`
    assert not copies.refuses
    taken = [copied.to_host()[0] for copied in others]
    copies.join()
    assert [int(own[0]) for own in taken] == [*range(IN_FLIGHT)]
    with pytest.raises(RuntimeError, match="no launch"):
        lost.to_host()
    copies.stop()


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "ordinary"])
def test_tensors_side_by_side_go_over_together_and_each_arrives_whole(
    small_slabs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    """As captures leave them: states and windows of all layers in turns, each kind in one piece of memory or two."""
    monkeypatch.setattr("rekindle.pool.copies.SLAB_BYTES", 3 * 40)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: pinned)
    copies, together = PaperGpu(small_slabs), list[int]()
    send_run = copies._send_run
    monkeypatch.setattr(copies, "_send_run", lambda to, first: together.append(len(to)) or send_run(to, first))
    states, windows = torch.randn(5, 2, 5), torch.randn(4, 3)
    in_turns = [tensor for both in zip(states, windows, strict=False) for tensor in both]
    sources = [*in_turns, states[4], torch.randn(2, 5), torch.randn(3, 3).T[0], torch.empty(0)]
    targets = [torch.full_like(tensor, torch.nan) for tensor in sources]
    copies.send(list(zip(targets, sources, strict=True)))
    assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=True))
    if pinned:
        assert sorted(together) == [1, 1, 1, 2, 3, 4], "three states are a slab; a row that is not contiguous is alone"
    copies.stop()


def test_copies_that_failed_while_they_made_way_are_never_handed_out(
    small_slabs: list[torch.Tensor],
) -> None:
    """On the copy thread, which has to make the memory first."""
    copies = Failing(small_slabs)
    lost = copies.copy_live([torch.ones(30)])
    copies.refuses = 1
    others = [copies.copy_live([torch.full((30,), float(n))]) for n in range(IN_FLIGHT)]
    taken = [copied.to_host()[0] for copied in others]
    copies.join()
    assert [int(own[0]) for own in taken] == [*range(IN_FLIGHT)]
    with pytest.raises(CopyFailed):
        wait_for_copies(lost)
    copies.stop()


def wait_for_copies(copied: LiveCopy) -> None:
    copied.to_host()
    assert copied.ready is not None
    copied.ready.wait()

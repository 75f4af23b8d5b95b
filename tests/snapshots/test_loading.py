"""How snapshots are read from disk: in batches, by several readers, and no further than the first fault."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from support.paper_snapshots import FINGERPRINT, PaperModel, same
from support.snapshot_lab import wait_until

from rekindle.errors import BadSnapshotFile
from rekindle.snapshots import loading
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.files import FileRead, PlainFiles, digest
from rekindle.snapshots.loading import READERS, LoadsUnderWay, Reads
from rekindle.snapshots.manifest import PAGE_HEADER, Manifest
from rekindle.snapshots.record import Record
from rekindle.snapshots.slabs import Slabs
from rekindle.snapshots.types import TAIL, Page, Part, Snapshot, Stretch
from rekindle.spec import PAGE

BUDGET = 1 << 30
PAGES = 12 * READERS


class PaperFiles(PlainFiles):
    """Notes what it is asked for; before a read it does what it was told."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.asked = list[list[FileRead]]()
        self._before = before

    def read(self, reads: Sequence[FileRead]) -> list[int]:
        self.asked.append(list(reads))
        self._before()
        return super().read(reads)


class Once:
    """Done by the first of several threads, before any of them goes on."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._acts, self._lock = [act], threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            while self._acts:
                self._acts.pop()()


def saved(folder: Path, snapshot: Snapshot) -> Record:
    store = DiskStore(folder, FINGERPRINT, BUDGET)
    record = store.save(snapshot)
    store.close()
    return record


def of_pages(count: int) -> Snapshot:
    return PaperModel(state=32).snapshot(list(range(count * PAGE + 5)))


def path_of(folder: Path, name: str) -> Path:
    (path,) = folder.rglob(f"objects/{name}")
    return path


def test_pages_are_read_several_at_a_time_and_every_reader_has_some(tmp_path: Path) -> None:
    record, files = saved(tmp_path, of_pages(PAGES)), PaperFiles()
    store = DiskStore(tmp_path, FINGERPRINT, BUDGET, files=files)
    assert same(store.load(record.id), of_pages(PAGES))
    store.close()
    of_own = [reads for reads in files.asked if reads[0][0].endswith(record.own)]
    of_page_objects = [reads for reads in files.asked if not reads[0][0].endswith(record.own)]
    assert len(of_own) == 1
    assert sorted(os.path.basename(path) for reads in of_page_objects for path, _, _ in reads) == sorted(record.pages)
    assert len(of_page_objects) >= READERS
    assert max(map(len, of_page_objects)) > 1


def test_the_own_object_is_read_in_runs_that_cover_it_once(tmp_path: Path) -> None:
    record, files = saved(tmp_path, of_pages(2)), PaperFiles()
    store = DiskStore(tmp_path, FINGERPRINT, BUDGET, slabs=Slabs(size=1 << 13), files=files)
    assert same(store.load(record.id), of_pages(2))
    store.close()
    runs = sorted(
        (start, sum(memory.nbytes for memory in memories))
        for reads in files.asked
        for path, start, memories in reads
        if path.endswith(record.own)
    )
    assert len(runs) > 1
    assert [start for start, _ in runs] == [0, *np.cumsum([nbytes for _, nbytes in runs])[:-1]]
    assert sum(nbytes for _, nbytes in runs) == record.own_bytes


def test_behind_a_fault_no_more_is_read() -> None:
    def fails() -> None:
        raise BadSnapshotFile("altered")

    done = list[str]()
    with ThreadPoolExecutor(1) as reader, Reads(reader) as reads:
        reads.begin([lambda: done.append("first"), fails, lambda: done.append("second")])
        reader.shutdown()
        with pytest.raises(BadSnapshotFile, match="altered"):
            reads.finish()
    assert done == ["first"]


def test_what_a_load_that_ended_has_left_is_not_read() -> None:
    done, begun, ended = list[str](), threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        ended.wait()
        done.append("first")

    with ThreadPoolExecutor(1) as reader:
        with Reads(reader) as reads:
            reads.begin([first, lambda: done.append("second")])
            begun.wait()
        ended.set()
    assert done == ["first"]


@pytest.mark.parametrize("which", ["page", "own"])
@pytest.mark.parametrize("slab", [1 << 13, 1 << 24])
def test_a_file_that_is_cut_while_it_is_loaded_is_refused_by_its_length(tmp_path: Path, which: str, slab: int) -> None:
    record = saved(tmp_path, of_pages(3))
    name, nbytes = (record.pages[1], record.page_bytes) if which == "page" else (record.own, record.own_bytes)
    path = path_of(tmp_path, name)
    store = DiskStore(
        tmp_path, FINGERPRINT, BUDGET, slabs=Slabs(size=slab), files=PaperFiles(lambda: os.truncate(path, 300))
    )
    with pytest.raises(BadSnapshotFile) as refused:
        store.load(record.id)
    store.close()
    told = re.fullmatch(
        rf"{name}: ends (\d+) bytes( or more)? before the {nbytes} that the manifest says", str(refused.value)
    )
    assert told is not None
    left = nbytes - 300
    assert int(told[1]) == left or (told[2] and int(told[1]) < left), "of a run behind the cut, not more is known"


def test_an_object_that_is_altered_while_it_is_loaded_is_dropped_and_refused(tmp_path: Path) -> None:
    record = saved(tmp_path, of_pages(3))
    for name in (record.own, record.pages[2]):
        path = path_of(tmp_path, name)
        content = path.read_bytes()

        def alter(path: Path = path, first: bytes = bytes([content[0] ^ 1])) -> None:
            with path.open("r+b") as file:
                file.write(first)

        store = DiskStore(tmp_path, FINGERPRINT, BUDGET, files=PaperFiles(Once(alter)))
        with pytest.raises(BadSnapshotFile, match=f"object {name} has been altered"):
            store.load(record.id)
        assert not path.exists()
        path.write_bytes(content)
        store.close()


def test_the_stock_knows_that_a_load_is_under_way(tmp_path: Path) -> None:
    record, slabs, seen = saved(tmp_path, of_pages(3)), Slabs(), list[int]()
    good = DiskStore(tmp_path, FINGERPRINT, BUDGET, slabs=slabs, files=PaperFiles(lambda: seen.append(slabs._readings)))
    assert same(good.load(record.id), of_pages(3))
    assert seen and set(seen) == {1}
    path_of(tmp_path, record.own).unlink()
    with pytest.raises(BadSnapshotFile):
        good.load(record.id)
    assert slabs._readings == 0
    good.close()


def test_loads_at_once_share_the_readers_and_none_waits_for_another(tmp_path: Path) -> None:
    """The reads of both loads are under way together: each waits until the other has begun."""
    snapshots = [PaperModel().snapshot(list(range(start, start + 20))) for start in (0, 100)]
    records = [saved(tmp_path, snapshot) for snapshot in snapshots]
    if READERS == 1:
        pytest.skip("one reader reads one load after the other")
    together = threading.Barrier(2, timeout=30)

    def meet() -> None:
        together.wait()

    store = DiskStore(tmp_path, FINGERPRINT, BUDGET, files=PaperFiles(meet))
    loaded = dict[str, Snapshot]()
    threads = [threading.Thread(target=lambda id=r.id: loaded.update({id: store.load(id)})) for r in records]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert all(same(loaded[record.id], snapshot) for record, snapshot in zip(records, snapshots, strict=True))


def test_beside_another_load_readers_read_several_runs_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if READERS == 1:
        pytest.skip("one reader reads one load after the other")
    monkeypatch.setattr(loading, "READERS", 2)  # half of them is one
    snapshots = [PaperModel(state=32).snapshot(list(range(start, start + 20))) for start in (0, 100)]
    records = [saved(tmp_path, snapshot) for snapshot in snapshots]
    gate, shared, shares = threading.Event(), list[int](), loading.Loader._shares
    files = PaperFiles(lambda: gate.wait(60))
    store = DiskStore(tmp_path, FINGERPRINT, BUDGET, slabs=Slabs(size=1 << 13), files=files)

    def noted(loader: loading.Loader, runs: int) -> list[range]:
        found = shares(loader, runs)
        shared.append(runs)
        return found

    monkeypatch.setattr(loading.Loader, "_shares", noted)
    with ThreadPoolExecutor(2) as both:
        first = both.submit(store.load, records[0].id)
        wait_until(lambda: bool(files.asked))
        second = both.submit(store.load, records[1].id)
        wait_until(lambda: len(shared) == 2)
        gate.set()
        assert same(first.result(), snapshots[0])
        assert same(second.result(), snapshots[1])
    store.close()
    counts = {
        record.id: [len(reads) for reads in files.asked if reads[0][0].endswith(record.own)] for record in records
    }
    runs = len(counts[records[0].id])
    assert runs > 2 and counts == {records[0].id: [1] * runs, records[1].id: [runs]}


def test_a_large_object_is_hashed_on_all_cores_unless_another_load_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if READERS == 1:
        pytest.skip("one reader reads one load after the other")
    snapshots = [PaperModel().snapshot(list(range(start, start + 20))) for start in (0, 100)]
    records = [saved(tmp_path, snapshot) for snapshot in snapshots]
    together, threads, meets = threading.Barrier(2, timeout=30), list[int](), list[bool]()

    def meet() -> None:
        if meets:
            together.wait()

    def noted(pieces: Iterable[np.ndarray], count: int = 1) -> str:
        meet()  # so that neither load ends before the other has chosen
        threads.append(count)
        return digest(pieces)

    monkeypatch.setattr(loading, "MANY_THREADS", 1)
    monkeypatch.setattr(loading, "digest", noted)
    store = DiskStore(tmp_path, FINGERPRINT, BUDGET, files=PaperFiles(meet))
    for record in records:
        store.load(record.id)
    assert threads == [blake3.AUTO, blake3.AUTO]
    meets.append(True)
    with ThreadPoolExecutor(2) as both:
        loaded = list(both.map(lambda record: store.load(record.id), records))
    store.close()
    assert threads[2:] == [1, 1]
    assert all(same(found, snapshot) for found, snapshot in zip(loaded, snapshots, strict=True))


def test_loads_at_once_make_room_for_all_that_they_bring(tmp_path: Path) -> None:
    if READERS == 1:
        pytest.skip("one reader reads one load after the other")
    snapshots = [PaperModel().snapshot(list(range(start, start + 20))) for start in (0, 100)]
    records = [saved(tmp_path, snapshot) for snapshot in snapshots]
    together, rooms, meets = threading.Barrier(2, timeout=30), list[int](), list[bool]()
    store = DiskStore(tmp_path, FINGERPRINT, BUDGET, files=PaperFiles(lambda: meets and together.wait()))
    store.make_room_in_ram = rooms.append
    for record in records:
        store.load(record.id)
    alone = rooms[:]
    assert len(alone) == 2 and all(alone)
    meets.append(True)
    with ThreadPoolExecutor(2) as both:
        list(both.map(lambda record: store.load(record.id), records))
    store.close()
    assert max(rooms[2:]) == sum(alone)


def test_loads_that_memory_cannot_hold_together_wait_for_each_other(tmp_path: Path) -> None:
    snapshots = [PaperModel().snapshot(list(range(start, start + 20))) for start in (0, 100, 200)]
    records = [saved(tmp_path, snapshot) for snapshot in snapshots]
    store = DiskStore(tmp_path, FINGERPRINT, BUDGET)
    rooms = list[int]()
    store.make_room_in_ram = rooms.append
    for record in records:
        store.load(record.id)
    for count in (1, 2):
        store.most_in_ram, alone = count * rooms[0] + 1, rooms[:]
        rooms.clear()
        with ThreadPoolExecutor(3) as threads:
            loaded = list(threads.map(lambda record: store.load(record.id), records * 4))
        assert all(same(found, truth) for found, truth in zip(loaded, snapshots * 4, strict=True))
        assert max(rooms) <= store.most_in_ram
        rooms[:] = alone
    store.most_in_ram = 1
    assert same(store.load(records[0].id), snapshots[0]), "one that is larger by itself is loaded all the same"
    store.close()


def test_a_load_that_waits_for_room_is_overtaken_by_none() -> None:
    """However many smaller ones come after it."""
    under_way, entered = LoadsUnderWay(), list[str]()
    gates = {name: threading.Event() for name in ("first", "large", "small")}

    def load(name: str, nbytes: int) -> None:
        with under_way.entered(lambda: (nbytes, None), most=100):
            entered.append(name)
            gates[name].wait()

    with ThreadPoolExecutor(4) as threads:
        threads.submit(load, "first", 40)
        wait_until(lambda: entered == ["first"])
        threads.submit(load, "large", 90)
        wait_until(lambda: len(under_way._line) == 1)
        for _ in range(2):
            threads.submit(load, "small", 10)
        wait_until(lambda: len(under_way._line) == 3)
        assert entered == ["first"]
        gates["first"].set()
        wait_until(lambda: entered == ["first", "large", "small"])
        assert under_way.coming == 100
        gates["small"].set()
        gates["large"].set()
    assert entered == ["first", "large", "small", "small"]
    assert (under_way.count, under_way.coming, len(under_way._line)) == (0, 0, 0)


def test_a_load_that_cannot_say_what_it_needs_keeps_nobody_waiting() -> None:
    under_way = LoadsUnderWay()

    def fails() -> tuple[int, None]:
        raise BadSnapshotFile("gone")

    with pytest.raises(BadSnapshotFile), under_way.entered(fails, most=1):
        raise AssertionError("it must not begin")
    with under_way.entered(lambda: (5, None), most=1):
        assert under_way.count == 1


def test_a_load_that_has_waited_takes_memory_only_then_and_reads_no_page_that_another_has_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two snapshots that share forty pages, and room for one and a half of them."""
    shared = list(range(40 * PAGE))
    snapshots = [PaperModel(state=32).snapshot([*shared, *own]) for own in ((1, 2), (3, 4, 5))]
    records = [saved(tmp_path, snapshot) for snapshot in snapshots]
    gate, hashing = threading.Event(), list[int]()

    def noted(pieces: Iterable[np.ndarray], count: int = 1) -> str:
        hashing.append(count)
        return digest(pieces)

    monkeypatch.setattr(loading, "MANY_THREADS", 1)
    monkeypatch.setattr(loading, "digest", noted)
    files = PaperFiles(gate.wait)
    store = DiskStore(tmp_path, FINGERPRINT, BUDGET, files=files)
    take, taken = store._loader._own_memory, list[Manifest]()
    monkeypatch.setattr(store._loader, "_own_memory", lambda listed: taken.append(listed) or take(listed))
    store.most_in_ram = 3 * (records[0].own_bytes + 40 * records[0].page_bytes) // 2
    with ThreadPoolExecutor(2) as both:
        loads = [both.submit(store.load, record.id) for record in records]
        under_way = store._loader._under_way
        wait_until(lambda: under_way.count == 1 and len(under_way._line) == 1 and bool(files.asked))
        assert len(taken) == 1, "whoever waits holds no memory"
        gate.set()
        loaded = [load.result() for load in loads]
    store.close()
    assert all(same(found, truth) for found, truth in zip(loaded, snapshots, strict=True))
    read = [os.path.basename(path) for reads in files.asked for path, _, _ in reads]
    assert sorted(name for name in read if name in records[0].pages) == sorted(records[0].pages), "each page once"
    assert hashing.count(blake3.AUTO) == 2, "each by all cores: the other one waited, or was over"


FIRST_MANIFESTS = """
import os, sys, threading
from pathlib import Path
from rekindle.snapshots import manifest

path = Path(sys.argv[1])
content = path.read_bytes()
sys.setswitchinterval(1e-5)

def decode(together):
    together.wait()
    manifest.decode(content, None, path.stem)

for _ in range(20):
    child = os.fork()
    if not child:
        together = threading.Barrier(8)
        threads = [threading.Thread(target=decode, args=(together,)) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "a process died"
"""


def test_the_first_manifests_of_a_process_may_be_read_by_several_threads_at_once(tmp_path: Path) -> None:
    """msgspec kills a process whose threads decode a struct for the first time together."""
    record = saved(tmp_path, of_pages(2))
    (path,) = tmp_path.rglob(f"{record.id}*")
    ran = subprocess.run([sys.executable, "-c", FIRST_MANIFESTS, path], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_layers_whose_pages_differ_are_loaded_as_they_were(tmp_path: Path) -> None:
    shapes = {
        0: ((1, 4), torch.float32),
        1: ((2, 8), torch.bfloat16),
        2: ((2, 8), torch.bfloat16),
        5: ((1, 3), torch.uint8),
    }
    draw = torch.Generator().manual_seed(0)

    def rows(layer: int, count: int) -> torch.Tensor:
        shape, dtype = shapes[layer]
        return torch.randint(0, 200, (2, count, *shape), generator=draw).to(dtype)

    count = 7
    tokens = np.arange(count * PAGE + 3, dtype=np.int32)
    parts = tuple(
        Part(layer, {TAIL: rows(layer, 3)}, tuple(Page(rows(layer, PAGE)) for _ in range(count))) for layer in shapes
    )
    snapshot = Snapshot(tokens, parts, None, 512, (Stretch(len(tokens), "prefill"),))
    record = saved(tmp_path, snapshot)
    store = DiskStore(
        tmp_path, FINGERPRINT, BUDGET, slabs=Slabs(size=3 * -(-(record.page_bytes - PAGE_HEADER) // 256) * 256)
    )
    assert same(store.load(record.id), snapshot)
    store.close()

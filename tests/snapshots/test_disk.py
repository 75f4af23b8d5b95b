from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.crash_driver import chain
from support.paper_snapshots import FINGERPRINT, PaperModel, same

from rekindle.errors import BadSnapshotFile, DoesNotFit
from rekindle.prompt import BoundaryKind
from rekindle.snapshots import files, loading
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.folder import KEPT_ASIDE
from rekindle.snapshots.slabs import EDGE, Slabs
from rekindle.spec import PAGE

BUDGET = 1 << 30


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    opened = DiskStore(tmp_path, FINGERPRINT, BUDGET)
    yield opened
    opened.close()


def reopen(store: DiskStore) -> DiskStore:
    store.close()
    return DiskStore(store.folder.parent, FINGERPRINT, store.budget)


def counting(n: int, start: int = 0) -> list[int]:
    return list(range(start, start + n))


# Memory


def test_pages_that_fill_a_slab_fill_it_when_they_are_loaded_too(store: DiskStore) -> None:
    model = PaperModel()
    saved = store.save(model.snapshot(counting(12 * PAGE)))
    body = saved.page_bytes - PAGE * 4
    store.close()
    again = DiskStore(store.folder.parent, FINGERPRINT, BUDGET, slabs=Slabs(size=4 * body))
    loaded = again.load(saved.id)
    assert same(loaded, model.snapshot(counting(12 * PAGE)))
    pages = [page for part in loaded.parts for page in part.pages]
    assert len({page.slab for page in pages}) == 3
    assert all(page.address % EDGE == 0 for page in pages)
    again.close()


def test_state_larger_than_a_slab_is_loaded_into_those_of_the_usual_size(store: DiskStore) -> None:
    """Which lie ready, where a larger one would have to be made while the client waits."""
    model = PaperModel(state=32)
    snapshot = model.snapshot(counting(PAGE + 5))
    id = store.save(snapshot).id
    store.close()
    largest = max(tensor.nbytes for part in snapshot.parts for tensor in part.tensors.values())
    for size in (largest, largest + 64, 2 * largest):
        slabs = Slabs(size=size)
        again = DiskStore(store.folder.parent, FINGERPRINT, BUDGET, slabs=slabs)
        loaded = again.load(id)
        assert same(loaded, snapshot)
        del loaded
        assert set(slabs._idle) == {size}
        again.close()


def test_a_tensor_larger_than_a_slab_has_memory_of_its_own(store: DiskStore) -> None:
    snapshot = PaperModel(state=32).snapshot(counting(PAGE + 5))
    id = store.save(snapshot).id
    store.close()
    again = DiskStore(store.folder.parent, FINGERPRINT, BUDGET, slabs=Slabs(size=4096))
    assert same(again.load(id), snapshot)
    again.close()


def test_an_error_while_an_object_is_read_is_never_taken_for_the_end(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = store.save(PaperModel(share=False).snapshot(counting(70)))

    def fails(*anything: object) -> None:
        raise IndexError("somewhere below")

    monkeypatch.setattr(loading, "read_whole", fails)
    with pytest.raises(IndexError, match="somewhere below"):
        reopen(store).load(saved.id)


# Exactness


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
    lengths=st.lists(st.integers(1, 3 * PAGE + 1), min_size=1, max_size=4),
    attention=st.sampled_from([(), (1,), (1, 3)]),
    delta=st.sampled_from([(), (0, 2)]),
    logits=st.booleans(),
    share=st.booleans(),
    branch=st.integers(0, 150),
)
def test_what_is_loaded_is_what_was_saved_bit_for_bit(
    dtype: torch.dtype,
    lengths: list[int],
    attention: tuple[int, ...],
    delta: tuple[int, ...],
    logits: bool,
    share: bool,
    branch: int,
) -> None:
    if not attention and not delta:
        delta = (0,)
    model = PaperModel(dtype=dtype, attention=attention, delta=delta, share=share)
    snapshots = []
    for i, n in enumerate(lengths):
        tokens = counting(n) if i % 2 == 0 else counting(min(n, branch)) + counting(max(0, n - branch), 1000)
        snapshots.append(model.snapshot(tokens, logits))
    with tempfile.TemporaryDirectory() as folder:
        first = DiskStore(folder, FINGERPRINT, BUDGET)
        ids = [first.save(snapshot).id for snapshot in snapshots]
        assert all(same(first.load(id), snapshot) for id, snapshot in zip(ids, snapshots, strict=True))
        after_restart = reopen(first)
        assert all(same(after_restart.load(id), snapshot) for id, snapshot in zip(ids, snapshots, strict=True))
        assert after_restart.bytes == _bytes_in(after_restart.folder), "the account and the disk agree"
        after_restart.close()


def test_kind_conversation_and_tokens_survive_a_restart(store: DiskStore) -> None:
    store.save(PaperModel().snapshot(counting(200)), BoundaryKind.SYSTEM, "c1")
    [(record, tokens)] = list(reopen(store).keyed_records())
    assert (record.kind, record.conversation, record.position) == (BoundaryKind.SYSTEM, "c1", 200)
    assert tokens.tolist() == counting(200)


def test_a_snapshot_loaded_beside_a_living_one_shares_its_pages(store: DiskStore) -> None:
    model = PaperModel()
    short, long = store.save(model.snapshot(counting(130))).id, store.save(model.snapshot(counting(200))).id
    fresh = reopen(store)
    a, b = fresh.load(short), fresh.load(long)
    first, second = a.parts[1], b.parts[1]
    assert first.pages == second.pages[: len(first.pages)]


def test_a_loaded_snapshot_outlives_its_eviction(store: DiskStore) -> None:
    snapshot = PaperModel().snapshot(counting(200))
    id = store.save(snapshot).id
    fresh = reopen(store)
    loaded = fresh.load(id)
    fresh.remove(id)
    assert same(loaded, snapshot)
    assert fresh.bytes == 0 == _bytes_in(fresh.folder)


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_a_loaded_snapshot_does_not_feel_what_happens_to_its_files(store: DiskStore, damage: str) -> None:
    snapshot = PaperModel().snapshot(counting(200))
    fresh = reopen(store) if store.save(snapshot) else store
    loaded = fresh.load(fresh.records()[0].id)
    for path in (fresh.folder / "objects").iterdir():
        _truncate(path) if damage == "truncate" else _flip(path)
    assert same(loaded, snapshot)


def test_pages_share_no_slab_with_the_state_they_were_loaded_with(store: DiskStore) -> None:
    """They outlive it."""
    id = store.save(PaperModel().snapshot(counting(3 * PAGE + 5))).id
    loaded = reopen(store).load(id)
    delta, kv = loaded.parts[:2]
    (slab,) = {page.slab for page in kv.pages}
    assert slab is not None
    start = slab.lend().ctypes.data
    tensors = (delta.tensors["state"], kv.tensors["tail"], kv.pages[0].data, kv.pages[-1].data)
    assert [start <= t.data_ptr() < start + slab.nbytes for t in tensors] == [False, False, True, True]


# Sharing


def test_a_chain_stores_each_page_once_and_little_besides_its_states(store: DiskStore) -> None:
    model = PaperModel(row=256, state=32)
    turns = [model.snapshot(counting(50 * (i + 1))) for i in range(40)]
    for snapshot in turns:
        store.save(snapshot)
    pages = 50 * 40 // PAGE
    files_there = list((store.folder / "objects").iterdir())
    assert len(files_there) == pages + len(turns)
    page_bytes = pages * 2 * 2 * PAGE * 256 * 4
    states = sum(snapshot.own_bytes - snapshot.tokens.nbytes for snapshot in turns)
    assert _bytes_in(store.folder) <= 1.15 * (page_bytes + states)


def test_equal_pages_from_two_captures_are_one_object(store: DiskStore) -> None:
    for _ in range(2):
        store.save(PaperModel(share=False).snapshot(counting(PAGE)))
    assert len(list((store.folder / "objects").iterdir())) == 2  # one page, one own


def test_a_known_page_is_not_hashed_again(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    model = PaperModel()
    store.save(model.snapshot(counting(10 * PAGE)))
    digested: list[int] = []
    real = files.digest
    monkeypatch.setattr("rekindle.snapshots.saving.digest", lambda pieces: digested.append(1) or real(pieces))
    store.save(model.snapshot(counting(11 * PAGE)))
    assert len(digested) == 2  # the new page and the own object


def test_evicting_one_of_a_chain_keeps_what_the_others_need(store: DiskStore) -> None:
    model = PaperModel()
    short, long = model.snapshot(counting(100)), model.snapshot(counting(200))
    first, second = store.save(short).id, store.save(long).id
    store.remove(first)
    assert same(reopen(store).load(second), long)


# Crashes


def test_a_kill_at_any_file_operation_leaves_only_whole_snapshots_and_all_finished_ones(tmp_path: Path) -> None:
    operations = [0, 1, 2, 3, 5, 8, 13, 17, 21, 26, 31, 38, 44, 52, 60, 75, 90, 105, 108]
    subprocess.run([sys.executable, "-m", "support.crash_driver", str(tmp_path), *map(str, operations)], check=True)
    model = PaperModel()
    expected = {len(tokens): model.snapshot(tokens) for tokens in chain()}
    acked_counts = set()
    for operation in operations:
        folder = tmp_path / str(operation)
        acked = (folder / "acked").read_text().split()
        store = DiskStore(folder / "store", FINGERPRINT, BUDGET)
        there = {record.id: store.load(record.id) for record in store.records()}
        assert store.bad_files == 0, "a kill leaves no file that has to be set aside"
        evicted = {id.removeprefix("-") for id in acked if id.startswith("-")}
        finished = {id for id in acked if not id.startswith("-")} - evicted
        assert finished <= there.keys(), f"a finished save is gone after a kill at operation {operation}"
        assert all(same(snapshot, expected[snapshot.position]) for snapshot in there.values())
        assert not list((store.folder / "temporary").iterdir())
        assert store.bytes == _bytes_in(store.folder), "leftovers have been collected"
        store.close()
        acked_counts.add(len(acked))
    assert len(acked_counts) > 3, "the kills hit saves at different depths"


# Files that went bad


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0x10
    path.write_bytes(data)


def _delete(path: Path) -> None:
    path.unlink()


def _rename(path: Path) -> None:
    path.rename(path.with_name("f" * 32 + path.suffix))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _object_with_tokens(store: DiskStore) -> Path:
    return store.folder / "objects" / store.records()[0].pages[0]


def _own_object(store: DiskStore) -> Path:
    return store.folder / "objects" / store.records()[0].own


def _manifest(store: DiskStore) -> Path:
    return next((store.folder / "manifests").iterdir())


@pytest.mark.parametrize("damage", [_truncate, _flip, _delete, _rename, _empty])
@pytest.mark.parametrize("which", [_object_with_tokens, _own_object, _manifest])
@pytest.mark.parametrize("restart", [True, False])
def test_a_damaged_file_is_refused_and_the_store_works_on(store, damage, which, restart, caplog) -> None:  # type: ignore[no-untyped-def]
    # Nobody holds the snapshot while the file is damaged: pages alive in RAM would be used instead of the file's.
    id = store.save(PaperModel().snapshot(counting(100))).id
    damage(which(store))
    with caplog.at_level(logging.WARNING):
        opened = reopen(store) if restart else store
        if id in opened:
            with pytest.raises(BadSnapshotFile):
                opened.load(id)
            opened.quarantine(id, "test")
    assert id not in opened
    assert len(caplog.records) <= 1
    snapshot = PaperModel().snapshot(counting(100))
    assert opened.save(snapshot).id == id, "the same snapshot can be saved again"
    assert same(reopen(opened).load(id), snapshot)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"version": 2}, "format"), ({"fingerprint": "f" * 32}, "written for model"), ({"position": 7}, "checksum")],
)
def test_a_foreign_manifest_is_set_aside_with_its_reason(store: DiskStore, change, words, caplog) -> None:  # type: ignore[no-untyped-def]
    id = store.save(PaperModel().snapshot(counting(100))).id
    path = _manifest(store)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with caplog.at_level(logging.WARNING):
        opened = reopen(store)
    assert len(opened) == 0
    assert len(caplog.records) == 1
    assert words in (opened.folder / "aside" / f"{id}.json.reason").read_text()


def test_models_do_not_share_a_folder(store: DiskStore) -> None:
    id = store.save(PaperModel().snapshot(counting(100))).id
    other = DiskStore(store.folder.parent, "f" * 32, BUDGET)
    assert len(other) == 0
    other.close()
    assert id in reopen(store)


def test_names_in_a_manifest_never_become_paths(store: DiskStore) -> None:
    from rekindle.snapshots import manifest

    store.save(PaperModel().snapshot(counting(100)))
    path = _manifest(store)
    listed = manifest.read(path, FINGERPRINT)
    import msgspec

    path.write_bytes(manifest.encode(msgspec.structs.replace(listed, own="../../../../etc/passwd")))
    assert len(reopen(store)) == 0


def test_only_so_many_manifests_are_kept_aside(store: DiskStore) -> None:
    for i in range(KEPT_ASIDE + 5):
        store.quarantine(store.save(PaperModel().snapshot(counting(10 + i))).id, "test")
    assert len(list((store.folder / "aside").glob("*.json"))) == KEPT_ASIDE
    assert len(list((store.folder / "aside").glob("*.reason"))) == KEPT_ASIDE


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = DiskStore(tmp_path / "new", FINGERPRINT, BUDGET)
        store.save(PaperModel().snapshot(counting(100)))
    finally:
        os.umask(old)
    for path in (tmp_path / "new").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    store.close()


# One writer


def test_a_second_process_reads_and_does_not_write(store: DiskStore) -> None:
    model = PaperModel()
    kept, evicted = store.save(model.snapshot(counting(100))).id, store.save(model.snapshot(counting(150, 7))).id
    script = (
        "import sys, logging; logging.basicConfig(stream=sys.stderr)\n"
        "from rekindle.snapshots.disk import DiskStore; from rekindle.errors import BadSnapshotFile\n"
        "store = DiskStore(sys.argv[1], sys.argv[2], 1 << 30)\n"
        "print(store.read_only, len(store), flush=True); input()\n"
        "print(store.load(sys.argv[3]).position)\n"
        "try: store.load(sys.argv[4])\n"
        "except BadSnapshotFile: store.quarantine(sys.argv[4], 'vanished'); print('miss', len(store))\n"
    )
    command = [sys.executable, "-c", script, str(store.folder.parent), FINGERPRINT, kept, evicted]
    second = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert second.stdout is not None
    assert second.stdout.readline().split() == ["True", "2"]
    store.remove(evicted)
    out, err = second.communicate("\n", timeout=60)
    assert out.split() == ["100", "miss", "1"]
    assert err.count("read-only") == 1
    assert kept in store
    assert (store.folder / "manifests" / f"{kept}.json").exists()


def test_a_directory_that_cannot_be_made_is_an_empty_read_only_store(tmp_path: Path, caplog) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        store = DiskStore(tmp_path / "file", FINGERPRINT, BUDGET)
    assert store.read_only
    assert len(store) == 0
    assert len(caplog.records) == 1


# Budget and a full disk


def test_a_snapshot_larger_than_the_budget_is_refused_before_anything_is_evicted(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FINGERPRINT, 1000)
    asked: list[int] = []
    store.make_room = asked.append
    with pytest.raises(DoesNotFit):
        store.save(PaperModel().snapshot(counting(100)))
    assert not asked
    assert _bytes_in(store.folder) == 0
    store.close()


@pytest.mark.parametrize("free", [0, 1, 3, 6])
def test_a_full_disk_leaves_the_store_as_it_was(store: DiskStore, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = PaperModel()
    before = store.save(model.snapshot(counting(100))).id
    held = store.bytes
    left = free
    real = os.write

    def full(descriptor: int, data: memoryview) -> int:
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        left -= 1
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr("rekindle.snapshots.files.os.write", full)
        with pytest.raises(OSError, match="No space"):
            store.save(model.snapshot(counting(300)))
    assert store.bytes == held == _bytes_in(store.folder)
    assert not list((store.folder / "temporary").iterdir())
    after = store.save(model.snapshot(counting(300))).id
    fresh = reopen(store)
    assert same(fresh.load(before), model.snapshot(counting(100)))
    assert same(fresh.load(after), model.snapshot(counting(300)))


def test_eviction_during_a_save_cannot_take_its_pages(tmp_path: Path) -> None:
    model = PaperModel()
    first, second = model.snapshot(counting(128)), model.snapshot(counting(192))
    probe = DiskStore(tmp_path / "probe", FINGERPRINT, BUDGET)
    size = probe.save(second).nbytes
    probe.close()
    store = DiskStore(tmp_path / "real", FINGERPRINT, size + 100)
    old = store.save(first).id
    store.make_room = lambda wanted: store.remove(old)
    id = store.save(second).id
    assert same(reopen(store).load(id), second)
    shutil.rmtree(tmp_path)


def _bytes_in(folder: Path) -> int:
    counted = [folder / "objects", folder / "manifests", folder / "temporary"]
    return sum(path.stat().st_size for part in counted for path in part.iterdir())

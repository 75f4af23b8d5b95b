from __future__ import annotations

import io
import json
import os
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from support.paper_snapshots import FINGERPRINT, PaperModel, same

from rekindle.cli.cache import list_command, prune_command
from rekindle.config import show_bytes
from rekindle.errors import BadConfig, BadSnapshotFile
from rekindle.prompt import BoundaryKind
from rekindle.snapshots import about, tools
from rekindle.snapshots.about import About, describe, read_about, strangers
from rekindle.snapshots.disk import DiskStore

LENGTHS = (40, 100, 200)


def tokens(n: int) -> list[int]:
    return list(range(n))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A chain of three, and a branch that leaves it."""
    folder = tmp_path / "cache"
    store, model = DiskStore(folder, FINGERPRINT, 1 << 30), PaperModel()
    for n in LENGTHS:
        store.save(model.snapshot(tokens(n)), BoundaryKind.MESSAGE, "c1")
    store.save(model.snapshot([*tokens(90), *range(900, 960)]))
    store.close()
    return folder


def longest(directory: Path) -> str:
    return max(tools.list_snapshots(directory), key=lambda info: info.position).id


def test_list_and_show_name_every_snapshot(directory: Path) -> None:
    infos = tools.list_snapshots(directory)
    assert sorted(info.position for info in infos) == [40, 100, 150, 200]
    shown = tools.show_snapshot(directory, longest(directory)[:12])
    assert (shown["position"], shown["conversation"]) == (200, "c1")
    with pytest.raises(BadConfig):
        tools.show_snapshot(directory, "")


def test_a_list_ends_with_what_lies_on_disk_where_shared_pages_lie_once(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = sum(info.total_bytes for info in tools.list_snapshots(directory))
    stored = sum(path.stat().st_size for path in directory.glob("*/objects/*"))
    stored += sum(path.stat().st_size for path in directory.glob("*/manifests/*"))
    assert stored < shared
    list_command(directory)
    assert f"4 snapshots, {show_bytes(stored)} on disk" in capsys.readouterr().out


def test_list_works_while_a_server_holds_the_lock(directory: Path) -> None:
    server = DiskStore(directory, FINGERPRINT, 1 << 30)
    assert len(tools.list_snapshots(directory)) == 4
    with pytest.raises(BadConfig):
        tools.prune_snapshots(directory, 0)
    assert len(server) == 4
    server.close()


def test_verify_names_the_snapshots_that_a_flipped_bit_hurts(directory: Path) -> None:
    assert all(finding.fault is None for finding in tools.verify_snapshots(directory))
    listed = tools.show_snapshot(directory, longest(directory))
    [*_, last] = listed["pages"]  # type: ignore[misc]
    path = directory / FINGERPRINT[:16] / "objects" / str(last)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    faults = {finding.id for finding in tools.verify_snapshots(directory) if finding.fault}
    assert faults == {longest(directory)}


def test_prune_leaves_no_more_than_asked(directory: Path) -> None:
    total = tools.prune_snapshots(directory, 1 << 30).left
    pruned = tools.prune_snapshots(directory, total // 2)
    assert pruned.left <= total // 2
    assert pruned.freed == total - pruned.left
    assert all(finding.fault is None for finding in tools.verify_snapshots(directory))
    assert tools.prune_snapshots(directory, 0).left == 0


def test_prune_with_nothing_to_do_needs_no_folder_that_it_may_change(
    directory: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    server = DiskStore(directory, FINGERPRINT, 1 << 30)
    prune_command("1GiB", directory)
    assert "0 snapshots removed, 0 B freed" in capsys.readouterr().out
    assert not caplog.records, "what it says of servers is not for who prunes"
    server.close()


def test_prune_that_leaves_more_than_was_asked_fails(directory: Path) -> None:
    server = DiskStore(directory, "e" * 64, 1 << 30)
    server.save(PaperModel().snapshot(tokens(70)))
    with pytest.raises(typer.Exit) as ended:
        prune_command("1KiB", directory)
    assert ended.value.exit_code == 1
    server.close()


def test_prune_makes_room_beside_a_server_that_uses_another_folder(directory: Path) -> None:
    server, model = DiskStore(directory, "e" * 64, 1 << 30), PaperModel()
    server.save(model.snapshot(tokens(70)))
    pruned = tools.prune_snapshots(directory, 0)
    assert (len(pruned.removed), pruned.in_use, pruned.left > 0) == (4, (server.folder,), True)
    assert len(server) == 1 and [info.position for info in tools.list_snapshots(directory)] == [70]
    server.close()


def test_an_exported_chain_imports_elsewhere_bit_for_bit(directory: Path, tmp_path: Path) -> None:
    exported = tools.export_chain(directory, longest(directory), tmp_path / "chain.tar")
    assert len(exported) == 3, "the chain without the branch"
    assert tools.import_chain(tmp_path / "other", tmp_path / "chain.tar") == exported
    store = DiskStore(tmp_path / "other", FINGERPRINT, 1 << 30)
    model = PaperModel()
    for id, n in zip(exported, LENGTHS, strict=True):
        assert same(store.load(id), model.snapshot(tokens(n)))
    store.close()


def test_what_snapshots_were_made_for_travels_with_them_and_replaces_nothing(directory: Path, tmp_path: Path) -> None:
    store = DiskStore(directory, FINGERPRINT, 1 << 30)
    about.describe(store, {"model": "paper"})
    folder = store.folder.name
    store.close()
    tools.export_chain(directory, longest(directory), tmp_path / "chain.tar")
    for there in ("new", "known"):
        if there == "known":
            store = DiskStore(tmp_path / there, FINGERPRINT, 1 << 30)
            about.describe(store, {"model": "as it is called here"})
            store.close()
        tools.import_chain(tmp_path / there, tmp_path / "chain.tar")
    assert about.read_about(tmp_path / "new" / folder) == {"model": "paper"}
    assert about.read_about(tmp_path / "known" / folder) == {"model": "as it is called here"}


@pytest.mark.parametrize("damage", ["flip", "missing", "stranger", "garbage"])
def test_a_bad_file_imports_nothing_at_all(directory: Path, tmp_path: Path, damage: str) -> None:
    good, bad = tmp_path / "chain.tar", tmp_path / "bad.tar"
    tools.export_chain(directory, longest(directory), good)
    with tarfile.open(good) as source, tarfile.open(bad, "w") as target:
        members = source.getmembers()
        for member in members:
            file = source.extractfile(member)
            assert file is not None
            data = bytearray(file.read())
            if member is members[-1] and damage == "missing":
                continue
            if member is members[-1] and damage == "flip":
                data[-1] ^= 1
            target.addfile(member, io.BytesIO(data))
        if damage == "stranger":
            stranger = tarfile.TarInfo("../escape")
            target.addfile(stranger, io.BytesIO(b""))
    if damage == "garbage":
        bad.write_bytes(b"no tar at all" * 100)
    with pytest.raises(BadSnapshotFile):
        tools.import_chain(tmp_path / "other", bad)
    assert not (tmp_path / "other").exists()
    assert not (tmp_path / "escape").exists()


def test_a_folder_without_snapshots_is_told_apart_from_the_right_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    list_command(tmp_path)
    assert "no snapshots" in (said := capsys.readouterr().out) and "--cache-dir" in said
    with pytest.raises(BadConfig, match="--cache-dir"):
        list_command(tmp_path / "missing")


def fill(directory: Path, fingerprint: str, about: About, count: int, used: float = 0.0) -> DiskStore:
    store, model = DiskStore(directory, fingerprint, 1 << 30), PaperModel()
    describe(store, about)
    for n in range(count):
        id = store.save(model.snapshot(tokens(70 + n)), BoundaryKind.MESSAGE, "c" * 32).id
        os.utime(store.folder / "manifests" / f"{id}.json", (used, used))
    store.close()
    return store


def test_what_lies_beside_a_store_is_told_by_what_differs(tmp_path: Path) -> None:
    here = {"model": "a", "KV": "f32", "KV mode": "exact"}
    fill(tmp_path, "1" * 64, {**here, "KV": "q8"}, 1)
    fill(tmp_path, "2" * 64, {"model": "b", "KV": "f32", "KV mode": "exact"}, 3)
    store = fill(tmp_path, "3" * 64, here, 5)
    assert [(each.count, each.differs) for each in strangers(tmp_path, store, here)] == [
        (3, "model b (here a)"),
        (1, "KV q8 (here f32)"),
    ]
    (tmp_path / ("1" * 16) / "about.json").write_text(json.dumps({**here, "lead": "8"}))
    assert strangers(tmp_path, store, here)[1].differs == "lead 8 (here none)"
    (tmp_path / ("1" * 16) / "about.json").write_text(json.dumps(here))
    assert strangers(tmp_path, store, here)[1].differs == "made by another version of Rekindle"
    (tmp_path / ("2" * 16) / "about.json").write_text("no json")
    assert "nothing in their folder says which" in strangers(tmp_path, store, here)[0].differs
    assert len(tools.list_snapshots(tmp_path)) == 9, "all of them are listed"


def test_a_list_reads_the_word_left_in_a_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for fingerprint in ("1" * 64, "2" * 64):
        fill(tmp_path, fingerprint, {"model": fingerprint[0]}, 3)
    read: list[Path] = []
    monkeypatch.setattr(about, "read_about", lambda folder: read.append(folder) or read_about(folder))
    assert sorted(info.about["model"] for info in tools.list_snapshots(tmp_path)) == ["1"] * 3 + ["2"] * 3
    assert len(read) == 2


def test_a_list_names_the_settings_and_fits_a_line_of_80(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the widest numbers there are."""
    monkeypatch.setenv("COLUMNS", "80")
    fill(tmp_path, "1" * 64, {"model": "a-model-with-a-long-name-Q4_K_M", "KV": "q8"}, 2, time.time() - 3599)
    listed = tools.list_snapshots(tmp_path)
    wide = [replace(info, position=1 << 20, own_bytes=(1 << 30) - 1, total_bytes=(1 << 30) - 1) for info in listed]
    monkeypatch.setattr("rekindle.cli.cache.list_snapshots", lambda directory: wide)
    list_command(tmp_path)
    said = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in said.splitlines()) <= 80
    assert "model a-model-with-a-long-name-Q4_K_M, KV q8:" in said
    for cell in ("1,048,576", "message", "59 min ago", "1024.0 MiB", *(info.id[:10] for info in listed)):
        assert cell in said
    assert "…" not in said

"""A cache directory that somebody else has been at: what stands there is a miss and goes aside."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from support.paper_snapshots import FINGERPRINT, PaperModel, same

from rekindle.errors import BadConfig, BadSnapshotFile
from rekindle.kernels.native.files import native_files
from rekindle.snapshots import manifest, tools
from rekindle.snapshots.about import read_about
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.files import PlainFiles, ReadFiles
from rekindle.snapshots.manifest import Manifest, PageRow, PartRow, StretchRow, key_of
from rekindle.spec import PAGE

BUDGET = 1 << 30
NOBODY = 65534
LENGTH = 2 * PAGE + 9
TOKENS = list(range(LENGTH))
NOTHING = np.empty(0, dtype=np.int32)


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    """With one snapshot, and closed."""
    opened = DiskStore(tmp_path / "cache", FINGERPRINT, BUDGET)
    opened.save(PaperModel().snapshot(TOKENS))
    opened.close()
    return opened


def start(store: DiskStore, **knows: int) -> DiskStore:
    """What a server does with the directory: open it, read every key, load whatever can be found."""
    opened = DiskStore(store.folder.parent, FINGERPRINT, BUDGET, **knows)  # type: ignore[arg-type]
    for record, _ in list(opened.keyed_records()):
        try:
            assert same(opened.load(record.id), PaperModel().snapshot(TOKENS))
        except BadSnapshotFile as error:
            opened.quarantine(record.id, str(error))
    return opened


def the_manifest(store: DiskStore) -> Path:
    (path,) = (store.folder / "manifests").glob("*.json")
    return path


def a_page(store: DiskStore) -> Path:
    return store.folder / "objects" / manifest.read(the_manifest(store), FINGERPRINT).pages[1]


def the_own(store: DiskStore) -> Path:
    return store.folder / "objects" / manifest.read(the_manifest(store), FINGERPRINT).own


# What is no regular file


def to_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(path.parent)  # the path is longer than a socket's may be
        try:
            listener.bind(path.name)
        finally:
            os.chdir(here)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("somebody's")


def to_link(path: Path) -> None:
    """To the very bytes: only the link is wrong."""
    moved = path.parent.parent / f"elsewhere-{path.name}"
    path.rename(moved)
    path.symlink_to(moved)


def to_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def to_device(path: Path) -> None:
    path.unlink()
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero: it never ends
    except PermissionError:
        pytest.skip("only root makes devices")


def to_locked_folder(path: Path) -> None:
    path.unlink()
    path.mkdir(mode=0)


STRANGERS = [to_fifo, to_socket, to_folder, to_link, to_dangling_link, to_device, to_locked_folder]


@pytest.mark.parametrize("which", [the_manifest, a_page, the_own])
@pytest.mark.parametrize("change", STRANGERS)
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("files", [PlainFiles, native_files])
def test_what_is_no_regular_file_is_never_opened_and_makes_way(
    store: DiskStore,
    which: Callable[[DiskStore], Path],
    change: Callable[[Path], None],
    running: bool,
    files: Callable[[], ReadFiles | None],
) -> None:
    opened = DiskStore(store.folder.parent, FINGERPRINT, BUDGET, files=files())
    change(path := which(store))
    kept = next((entry for entry in (store.folder).glob("elsewhere-*")), None)
    if running:
        (record,) = opened.records()
        with pytest.raises(BadSnapshotFile, match="cannot be read"):
            opened.load(record.id)
        opened.quarantine(record.id, "test")
    opened.close()
    opened = start(store)
    assert len(opened) == 0
    assert opened.bytes == sum(p.stat().st_size for p in (opened.folder / "objects").iterdir())
    snapshot = PaperModel().snapshot(TOKENS)
    id = opened.save(snapshot).id
    assert path.is_file() and not path.is_symlink(), "the same snapshot can be saved again, in its place"
    opened.close()
    again = start(store)
    assert same(again.load(id), snapshot)
    again.close()
    assert kept is None or kept.stat().st_size, "what a link leads to is untouched"


@pytest.mark.parametrize("change", [to_fifo, to_socket, to_link, to_dangling_link])
def test_a_lock_that_is_no_regular_file_makes_the_store_read_only(
    store: DiskStore, change: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    change(store.folder / "lock")
    with caplog.at_level(logging.WARNING):
        opened = start(store)
    assert opened.read_only and len(opened) == 1
    assert len(caplog.records) == 1 and "lock" in caplog.text
    assert not (store.folder / "nowhere").exists(), "nothing is made behind a link"
    opened.close()


@pytest.mark.parametrize("name", ["objects", "manifests", "temporary", "aside", ""])
def test_nothing_is_deleted_or_moved_behind_a_folder_that_is_a_link(store: DiskStore, name: str) -> None:
    precious = store.folder.parent.parent / "precious"
    precious.mkdir()
    for file in ("f" * 32, f"{'f' * 32}.json", "letter.txt"):
        (precious / file).write_text("dear")
    path = store.folder / name if name else store.folder
    path.rename(store.folder.parent / "was")
    path.symlink_to(precious)
    opened = start(store)
    assert opened.read_only
    opened.close()
    assert sorted(p.name for p in precious.iterdir()) == sorted(["f" * 32, f"{'f' * 32}.json", "letter.txt"])


@pytest.mark.parametrize("mode", [0, 0o100, 0o400, 0o500])
@pytest.mark.parametrize("name", ["objects", "manifests", "temporary", "aside", "."])
def test_a_folder_that_may_not_be_read_or_searched_is_no_error(store: DiskStore, name: str, mode: int) -> None:
    """Tried by a process that modes hold back: root becomes somebody else."""
    for path in (store.folder.parent, *store.folder.parent.rglob("*")):
        os.chown(path, NOBODY if os.geteuid() == 0 else os.geteuid(), -1)
    for path in (store.folder.parent.parent, *store.folder.parent.parent.parents):
        if str(path).startswith(tempfile.gettempdir() + "/"):
            path.chmod(0o755)
    (store.folder / name).chmod(mode)
    child = os.fork()
    if child == 0:
        if os.geteuid() == 0:
            os.setuid(NOBODY)
        try:
            start(store).close()
            tools.list_snapshots(store.folder.parent)
            tools.verify_snapshots(store.folder.parent)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    (store.folder / name).chmod(0o700)
    assert status == 0


def test_a_file_with_a_foreign_name_among_the_objects_stays(store: DiskStore) -> None:
    (store.folder / "objects" / "letter.txt").write_text("dear")
    opened = start(store)
    assert len(opened) == 1
    assert (store.folder / "objects" / "letter.txt").read_text() == "dear"
    opened.close()


def test_a_name_that_is_no_utf8_is_set_aside_with_a_readable_reason(
    store: DiskStore, caplog: pytest.LogCaptureFixture
) -> None:
    for folder, name in (("manifests", b"\xff\xfe.json"), ("manifests", b"\x1b[31mred.json"), ("objects", b"\xff")):
        (Path(os.fsdecode(os.fsencode(store.folder / folder) + b"/" + name))).write_text("{}")
    with caplog.at_level(logging.WARNING):
        opened = start(store)
    assert len(opened) == 1 and opened.bad_files == 2
    caplog.text.encode()  # a log that is a file takes it
    assert "\x1b" not in caplog.text
    reasons = [path.read_text() for path in (opened.folder / "aside").glob("*.reason")]
    assert len(reasons) == 2 and all(reason.strip().isprintable() for reason in reasons)
    opened.close()


def test_a_reason_is_not_written_into_a_fifo_or_behind_a_link(store: DiskStore, tmp_path: Path) -> None:
    path = the_manifest(store)
    path.write_text("no manifest")
    (store.folder / "aside" / path.name).mkdir()
    os.mkfifo(store.folder / "aside" / f"1-{path.name}.reason")
    opened = start(store)
    assert opened.bad_files == 1 and not path.exists()
    assert "not a readable manifest" in (store.folder / "aside" / f"1-{path.name}.reason").read_text()
    opened.close()


# Sizes


@pytest.mark.parametrize("which", [the_manifest, a_page, the_own])
def test_a_file_that_grew_to_100_gb_is_not_read(store: DiskStore, which: Callable[[DiskStore], Path]) -> None:
    running = DiskStore(store.folder.parent, FINGERPRINT, BUDGET)
    (record,) = running.records()
    path = which(store)
    os.truncate(path, 100 << 30)
    with pytest.raises(BadSnapshotFile, match="bytes"):
        running.load(record.id)
    running.close()
    assert tools.verify_snapshots(store.folder.parent)[0].fault is not None
    opened = start(store)
    assert len(opened) == 0
    opened.close()


def test_an_object_that_no_model_of_this_size_has_takes_no_memory(store: DiskStore) -> None:
    """The manifest is consistent and the object is there, 100 GB of zeros."""
    path, huge = the_manifest(store), 100 << 30
    listed = manifest.read(path, FINGERPRINT)
    parts = (*listed.parts, PartRow("drafter", None, "uint8", (huge,), -(-listed.own_bytes // 64) * 64, huge))
    end = parts[-1].offset + huge
    path.write_bytes(manifest.encode(msgspec.structs.replace(listed, parts=parts, own_bytes=end)))
    os.truncate(store.folder / "objects" / listed.own, end)
    opened = start(store, largest=1 << 20)
    assert len(opened) == 0
    (reason,) = (opened.folder / "aside").glob("*.reason")
    assert "this model's have" in reason.read_text()
    opened.close()


# Manifests that lie though their checksum is right


def forge(store: DiskStore, **changes: object) -> None:
    path = the_manifest(store)
    listed = manifest.read(path, FINGERPRINT)
    forged = msgspec.structs.replace(listed, **changes)
    try:
        path.write_bytes(manifest.encode(forged))
    except OverflowError:  # a number that our own writer cannot write
        raw = json.loads(manifest.encode(listed)) | {k: msgspec.to_builtins(v) for k, v in changes.items()}
        path.write_text(json.dumps(raw))


def listed_in(store: DiskStore) -> Manifest:
    return manifest.read(the_manifest(store), FINGERPRINT)


def change_part(store: DiskStore, which: str, **changes: object) -> dict[str, object]:
    parts = list(listed_in(store).parts)
    at = next(i for i, part in enumerate(parts) if part.name == which)
    parts[at] = msgspec.structs.replace(parts[at], **changes)
    return {"parts": tuple(parts)}


LIES: dict[str, Callable[[DiskStore], dict[str, object]]] = {
    "no position": lambda s: {"position": 0, "pages": (), "tail_tokens": (), "id": key_of(FINGERPRINT, NOTHING)},
    "a negative position": lambda s: {"position": -LENGTH},
    "a position beyond the tokens": lambda s: {"position": LENGTH + 1},
    "a huge position": lambda s: {"position": 1 << 70},
    "stretches beyond the position": lambda s: {"stretches": (StretchRow(LENGTH + 5, "prefill"),)},
    "stretches out of order": lambda s: {"stretches": (StretchRow(50, "prefill"), StretchRow(20, "decode"))},
    "a negative cut": lambda s: {"stretches": (StretchRow(LENGTH, "prefill", (-1,)),)},
    "saved in no year": lambda s: {"saved": 1 << 62},
    "a negative grid": lambda s: {"grid": -512},
    "an unknown kind": lambda s: {"kind": "\x1b[31mred"},
    "a long tail": lambda s: {"tail_tokens": tuple(range(PAGE + 9)), "pages": listed_in(s).pages[:1]},
    "a token of 33 bits": lambda s: {"tail_tokens": (1 << 32, *range(8))},
    "a token of 31 bits and a sign": lambda s: {"tail_tokens": (1 << 31, *range(8))},
    "a negative token": lambda s: {"tail_tokens": (-1, *range(8))},
    "own bytes more than its parts": lambda s: {"own_bytes": listed_in(s).own_bytes + 64},
    "own bytes less than its parts": lambda s: {"own_bytes": listed_in(s).own_bytes - 4},
    "own bytes without end": lambda s: {"own_bytes": 1 << 60},
    "an own object that is a path": lambda s: {"own": "../../../../etc/passwd"},
    "a page that is a path": lambda s: {"pages": ("../" * 10 + "etc/passwd", listed_in(s).pages[1])},
    "a page that is no name": lambda s: {"pages": ("\x00" * 32, listed_in(s).pages[1])},
    "a page too many": lambda s: {"pages": (*listed_in(s).pages, listed_in(s).pages[0])},
    "pages that changed places": lambda s: {"pages": listed_in(s).pages[::-1]},
    "a part twice": lambda s: {"parts": (*listed_in(s).parts, listed_in(s).parts[0])},
    "no parts": lambda s: {"parts": ()},
    "a layer without its window": lambda s: {"parts": tuple(p for p in listed_in(s).parts if p.name != "window")},
    "a part of no name": lambda s: change_part(s, "logits", name="[bold]"),
    "a part of a negative layer": lambda s: change_part(s, "state", layer=-1),
    "a part of a huge layer": lambda s: change_part(s, "state", layer=1 << 40),
    "logits of a layer": lambda s: change_part(s, "logits", layer=1),
    "logits of two dimensions": lambda s: change_part(s, "logits", shape=(4, 4)),
    "logits as bytes": lambda s: change_part(s, "logits", dtype="uint8", shape=(64,)),
    "a tensor whose name is no identifier": lambda s: change_part(s, "state", name="../state"),
    "a tail of more rows": lambda s: change_part(s, "tail", shape=(2, 3, 3, 4)),
    "a tail of another type": lambda s: change_part(s, "tail", dtype="int32"),
    "a part at a negative offset": lambda s: change_part(s, "window", offset=-64),
    "a part beyond its object": lambda s: change_part(s, "window", offset=1 << 40),
    "a part over another": lambda s: change_part(s, "window", offset=0),
    "a part that lies askew": lambda s: change_part(s, "window", offset=7),
    "a part of negative size": lambda s: change_part(s, "window", bytes=-60),
    "a shape without end": lambda s: change_part(s, "logits", shape=(0, *[1 << 47] * 7)),
    "a shape of many dimensions": lambda s: change_part(s, "logits", shape=(1,) * 1000),
    "a negative shape": lambda s: change_part(s, "logits", shape=(-16,)),
    "an unknown type": lambda s: change_part(s, "logits", dtype="complex128"),
    "a layer with pages twice": lambda s: {"page_rows": listed_in(s).page_rows[:1] * 2},
    "layers out of order": lambda s: {"page_rows": listed_in(s).page_rows[::-1]},
    "no layers with pages": lambda s: {"page_rows": ()},
    "pages of no end": lambda s: {"page_rows": (PageRow(1, "float32", (2, PAGE, 1 << 40, 1 << 40)),)},
    "pages of three dimensions": lambda s: {"page_rows": (PageRow(1, "float32", (2, PAGE, 4)),)},
    "a fingerprint that is a path": lambda s: {"fingerprint": "../../../../../../tmp/x"},
    "another model's": lambda s: {"fingerprint": "f" * 32},
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("running", [False, True])
def test_a_manifest_that_lies_is_a_miss_and_set_aside(store: DiskStore, lie: str, running: bool) -> None:
    opened = DiskStore(store.folder.parent, FINGERPRINT, BUDGET)
    (record,) = opened.records()
    changes = LIES[lie](store)
    forge(store, **changes)
    if "id" in changes:
        the_manifest(store).rename(store.folder / "manifests" / f"{changes['id']}.json")
    elif running:
        with pytest.raises(BadSnapshotFile):
            opened.load(record.id)
    opened.close()
    opened = start(store)
    assert len(opened) == 0
    assert opened.bad_files == 1
    opened.close()
    assert all(finding.fault for finding in tools.verify_snapshots(store.folder.parent))


def test_a_token_beyond_the_vocabulary_and_logits_of_another_are_refused(store: DiskStore) -> None:
    opened = start(store, vocabulary=16)  # the logits' own length, but the tokens go up to 136
    assert len(opened) == 0
    opened.save(PaperModel().snapshot(TOKENS))
    opened.close()
    opened = start(store, vocabulary=15)  # fewer than the logits, one of which would have no token
    assert len(opened) == 0
    opened.close()


def test_a_page_with_a_negative_token_is_refused(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FINGERPRINT, BUDGET)
    id = store.save(PaperModel().snapshot([-5, *range(PAGE)])).id
    with pytest.raises(BadSnapshotFile, match="token -5"):
        store.load(id)
    store.close()


# Modes


def test_a_reason_is_for_its_owner_only(store: DiskStore) -> None:
    before = os.umask(0)
    try:
        the_manifest(store).write_text("no manifest")
        start(store).close()
    finally:
        os.umask(before)
    (reason,) = (store.folder / "aside").glob("*.reason")
    assert stat.S_IMODE(reason.stat().st_mode) == 0o600


def test_a_folder_that_others_could_enter_is_closed_and_that_is_said_once(
    store: DiskStore, caplog: pytest.LogCaptureFixture
) -> None:
    folders = [store.folder, *(path for path in store.folder.iterdir() if path.is_dir())]
    for folder in folders:
        folder.chmod(0o755)
    store.folder.parent.chmod(0o755)
    with caplog.at_level(logging.WARNING):
        start(store).close()
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    assert stat.S_IMODE(store.folder.parent.stat().st_mode) == 0o755, "the user's own folder is left alone"
    assert len(caplog.records) == 1 and "mode 0755" in caplog.text
    caplog.clear()
    start(store).close()
    assert not caplog.records


def test_folders_above_the_store_are_made_for_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        DiskStore(tmp_path / "a" / "b", FINGERPRINT, BUDGET).close()
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700] * 2


# `rekindle cache` on such a directory


COMMANDS = """
import contextlib, io, json, sys
from rekindle.cli import main
for arguments in json.load(sys.stdin):
    sys.argv, out, status = ["rekindle", "cache", *arguments], io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main()
        except SystemExit as left:
            status = left.code
    print(json.dumps([status or 0, out.getvalue()]))
"""


def rekindle(*commands: tuple[str | Path, ...]) -> list[tuple[int, str]]:
    """The exit status of each and what it said; all in one process, which takes seconds to start."""
    given = json.dumps([[str(argument) for argument in command] for command in commands])
    ran = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input=given,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert ran.returncode == 0, ran.stderr
    assert "\x1b" not in ran.stderr, "the log is a terminal's too"
    return [tuple(json.loads(line)) for line in ran.stdout.splitlines()]


def test_no_command_hangs_crashes_or_lets_a_file_speak_to_the_terminal(store: DiskStore, tmp_path: Path) -> None:
    evil = "\x1b[31m[red]evil\r\n"
    directory, path = store.folder.parent, the_manifest(store)
    listed = listed_in(store)
    forge(store, conversation=evil)
    (store.folder / "about.json").write_text(json.dumps({"model": evil}))
    (store.folder / "manifests" / f"{evil.strip()}.json").write_text("{}")
    os.mkfifo(store.folder / "manifests" / f"{'a' * 32}.json")
    (directory / ("a" * 16)).symlink_to("/")
    (directory / ("b" * 16)).write_text("a file")
    Path(os.fsdecode(os.fsencode(directory) + b"/\xff")).mkdir()
    os.mkfifo(directory / ("c" * 16))
    out = tmp_path / "out.tar"
    said = rekindle(
        ("list", "--cache-dir", directory),
        ("list", "--cache-dir", directory, "--json"),
        ("show", listed.id, "--cache-dir", directory),
        ("verify", "--cache-dir", directory),
        ("export", listed.id, out, "--cache-dir", directory),
        ("import", out, "--cache-dir", tmp_path / "new"),
        ("import", store.folder / "objects" / listed.own, "--cache-dir", tmp_path / "new"),
        ("prune", "--cache-dir", directory, "--size", "0"),
    )
    assert [status for status, _ in said] == [0, 0, 0, 1, 0, 0, 1, 0]
    assert not any("\x1b" in text for _, text in said)
    assert "\\x1b[31m[" in said[0][1] and "1 snapshots" in said[0][1]
    assert "\\x1b[31m[red]evil\\r\\n" in said[2][1]
    assert "3 snapshots, 2 faulty" in said[3][1]
    assert said[6][1].startswith("rekindle: ") and "not a readable tar file" in said[6][1]
    assert not path.exists()


def test_a_word_that_is_not_printable_is_no_word_about_a_store(store: DiskStore) -> None:
    about = store.folder / "about.json"
    for text in (json.dumps({"model": "\x1b[2J"}), '{"model": "\\ud800"}', "\xff", "x" * (1 << 17)):
        about.write_text(text, errors="surrogateescape")
        assert read_about(store.folder) == {}
    about.unlink()
    os.mkfifo(about)
    assert read_about(store.folder) == {}


def test_a_manifest_in_another_models_folder_is_not_taken_for_one_of_it(store: DiskStore) -> None:
    directory = store.folder.parent
    store.folder.rename(directory / ("f" * 16))
    assert tools.list_snapshots(directory) == []
    (finding,) = tools.verify_snapshots(directory)
    assert finding.fault is not None and "folder of ffffffffffffffff" in finding.fault
    assert tools.prune_snapshots(directory, 0).removed == ()


def test_an_export_follows_no_link_that_somebody_laid_in_its_way(store: DiskStore, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("dear")
    (tmp_path / "out.tar.partial").symlink_to(tmp_path / "victim")
    tools.export_chain(store.folder.parent, "", tmp_path / "out.tar")
    assert (tmp_path / "victim").read_text() == "dear"
    assert stat.S_IMODE((tmp_path / "out.tar").stat().st_mode) == 0o600


# Files to be imported


def member(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def honest(store: DiskStore, folder: Path) -> list[tuple[tarfile.TarInfo, bytes]]:
    tools.export_chain(store.folder.parent, "", folder / "honest.tar")
    with tarfile.open(folder / "honest.tar") as tar:
        return [(info, tar.extractfile(info).read()) for info in tar.getmembers()]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "extra",
    [
        member("../escape", b"x"),
        member("/tmp/escape", b"x"),
        member("objects/../../escape", b"x"),
        member(f"objects/{'a' * 32}", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        member(f"objects/{'a' * 32}", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        member(f"objects/{'a' * 32}", type=tarfile.CHRTYPE),
        member(f"objects/{'a' * 32}", type=tarfile.FIFOTYPE),
        member("objects", type=tarfile.DIRTYPE),
        member(f"objects/{'a' * 32}", b"nobody's"),
        member("\x1b[31mred", b"x"),
        member(f"manifests/{'a' * 32}.json", b"{}"),
        member(f"manifests/{'a' * 32}.json", b"[" * 100_000),
        member("about.json", b'{"x": "' + b"y" * 100_000 + b'"}'),
        member("about.json/../x", b"{}"),
        member(f"objects/{'a' * 32}", pax_headers={"comment": "x" * 100_000}),
        member(f"objects/{'a' * 32}", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
        member(f"objects/{'a' * 32}", pax_headers={"size": "-1"}),
        member(f"objects/{'a' * 32}", pax_headers={"size": str(1 << 60)}),
    ],
    ids=lambda given: ascii(given[0].name)[:20] + given[0].type.decode(),
)
def test_a_hostile_member_imports_nothing_at_all(
    store: DiskStore, tmp_path: Path, extra: tuple[tarfile.TarInfo, bytes]
) -> None:
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        for info, data in (extra, *honest(store, tmp_path)):
            tar.addfile(info, io.BytesIO(data))
    with pytest.raises(BadSnapshotFile) as refused:
        tools.import_chain(tmp_path / "new", tmp_path / "bad.tar")
    assert str(refused.value).isprintable()
    assert not (tmp_path / "new").exists()


def test_a_member_that_comes_twice_is_refused(store: DiskStore, tmp_path: Path) -> None:
    members = honest(store, tmp_path)
    for again in (members[0], members[-1]):
        with tarfile.open(tmp_path / "bad.tar", "w") as tar:
            for info, data in (*members, again):
                tar.addfile(info, io.BytesIO(data))
        with pytest.raises(BadSnapshotFile, match="comes twice"):
            tools.import_chain(tmp_path / "new", tmp_path / "bad.tar")


def test_a_tar_of_millions_of_members_is_refused_after_the_first_hundred_thousand(tmp_path: Path) -> None:
    header = member(f"objects/{'a' * 32}")[0].tobuf()
    with (tmp_path / "many.tar").open("wb") as file:
        file.writelines(_renamed(header, b"objects/%032x" % number) for number in range(tools.MOST_MEMBERS + 5))
    with pytest.raises(BadSnapshotFile, match="more than 100000 members"):
        tools.import_chain(tmp_path / "new", tmp_path / "many.tar")


def _renamed(header: bytes, name: bytes) -> bytes:
    """A tar header under another name, with its checksum."""
    raw = bytearray(name.ljust(100, b"\0") + header[100:])
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


def test_a_sparse_tar_of_100_gb_is_refused_by_what_its_headers_say(store: DiskStore, tmp_path: Path) -> None:
    """Each claims a body that reaches to the end: a manifest, an object of the wrong size, a header's own text."""
    huge = 100 << 30
    wrong = honest(store, tmp_path)[-1][0].name
    for name, kind in ((f"manifests/{'a' * 32}.json", b"0"), (wrong, b"0"), ("x", b"x"), ("x", b"L"), ("x", b"g")):
        info = tarfile.TarInfo(name)
        info.size, info.type = huge, kind
        with (tmp_path / "huge.tar").open("wb") as file:
            file.write(info.tobuf(tarfile.GNU_FORMAT))
            file.truncate(512 + huge + 1024)
        with pytest.raises(BadSnapshotFile):
            tools.import_chain(tmp_path / "new", tmp_path / "huge.tar")
    assert not (tmp_path / "new").exists()


def test_an_import_that_the_disk_has_no_room_for_writes_nothing(
    store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest(store, tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(BadConfig, match="100 B free"):
        tools.import_chain(tmp_path / "new", tmp_path / "honest.tar")
    assert not (tmp_path / "new").exists()

"""Damage cache directories in every way we know, and use them.

    python scripts/fuzz_stores.py [--directories 500] [--seed 1]

Each directory is a copy of a small store with one to four damages. A process of its own starts on it, looks up what was
saved, loads it, lists, verifies, saves, exports, imports and prunes. It must not fail, hang or take a gigabyte;
whatever it finds must be bit for bit what was saved, and nothing outside the directory may change. Run by root, that
process becomes another user, so that modes mean something. The last line is JSON; the exit status is 1 if a law was
broken.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from soak_store import FINGERPRINT, snapshot_of, tensors, tokens_of

from rekindle.errors import RekindleError
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.snapshots import manifest, tools
from rekindle.snapshots.about import describe, read_about, strangers
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.manifest import Manifest

LENGTHS = {0: (70, 200, 333), 1: (64, 150)}  # of the snapshots, by conversation
BUDGET = 1 << 30
SECONDS = 60  # after which a process counts as hung
MEMORY = 1 << 30  # bytes
NOBODY = 65534
EVIL = "\x1b[31m[red]\u202e"


@dataclass(frozen=True)
class Ground:
    """One directory, and somebody's folder beside it."""

    directory: Path
    outside: Path
    dice: random.Random

    @property
    def folder(self) -> Path:
        return self.directory / FINGERPRINT[:16]

    def any_of(self, *kinds: str) -> Path:
        """A file of the store, if one is left."""
        found = [path for kind in kinds for path in sorted((self.folder / kind).glob("*")) if path.is_file()]
        return self.dice.choice(found) if found else self.folder / "lock"

    def file(self) -> Path:
        return self.dice.choice([self.any_of("manifests"), self.any_of("objects"), self.folder / "about.json"])

    def manifest(self) -> tuple[Path, Manifest] | None:
        path = self.any_of("manifests")
        try:
            return path, manifest.read(path, FINGERPRINT)
        except RekindleError:
            return None


# Damages to one file


def flip_a_bit(ground: Ground) -> None:
    path = ground.file()
    data = bytearray(path.read_bytes())
    if data:
        data[ground.dice.randrange(len(data))] ^= 1 << ground.dice.randrange(8)
    path.write_bytes(data)


def scatter_noise(ground: Ground) -> None:
    path = ground.file()
    data = bytearray(path.read_bytes())
    for _ in range(ground.dice.randrange(1, 40)):
        if data:
            data[ground.dice.randrange(len(data))] = ground.dice.randrange(256)
    path.write_bytes(data)


def cut_short(ground: Ground) -> None:
    path = ground.file()
    os.truncate(path, ground.dice.randrange(path.stat().st_size + 1))


def empty(ground: Ground) -> None:
    os.truncate(ground.file(), 0)


def append_noise(ground: Ground) -> None:
    with ground.file().open("ab") as file:
        file.write(ground.dice.randbytes(ground.dice.randrange(1, 5000)))


def grow_huge(ground: Ground) -> None:
    os.truncate(ground.file(), 100 << 30)


def zero_a_stretch(ground: Ground) -> None:
    path = ground.file()
    data = bytearray(path.read_bytes())
    at = ground.dice.randrange(len(data) + 1)
    data[at : at + 64] = bytes(len(data[at : at + 64]))
    path.write_bytes(data)


def delete(ground: Ground) -> None:
    ground.file().unlink()


def rename(ground: Ground) -> None:
    path = ground.file()
    path.rename(path.with_name(f"{ground.dice.getrandbits(128):032x}{path.suffix}"))


def swap(ground: Ground) -> None:
    a, b = (ground.any_of(kind) for kind in ground.dice.choices(["manifests", "objects"], k=2))
    held = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(held)


def copy_over(ground: Ground) -> None:
    a, b = ground.file(), ground.file()
    b.write_bytes(a.read_bytes())


def random_content(ground: Ground) -> None:
    path = ground.file()
    path.write_bytes(ground.dice.randbytes(path.stat().st_size))


def take_rights(ground: Ground) -> None:
    ground.file().chmod(0)


def give_rights(ground: Ground) -> None:
    ground.file().chmod(0o6777)


def odd_times(ground: Ground) -> None:
    os.utime(ground.file(), (0, ground.dice.choice([0, -(1 << 30), 1 << 33])))


# Something else in the place of a file


def to_folder(ground: Ground) -> None:
    path = ground.file()
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("somebody's")


def to_empty_folder(ground: Ground) -> None:
    path = ground.file()
    path.unlink()
    path.mkdir(mode=ground.dice.choice([0o700, 0]))


def to_fifo(ground: Ground) -> None:
    path = ground.file()
    path.unlink()
    os.mkfifo(path)


def to_socket(ground: Ground) -> None:
    path = ground.file()
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # the whole path is longer than a socket's may be
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def to_device(ground: Ground) -> None:
    if os.geteuid() != 0:
        return to_fifo(ground)
    path = ground.file()
    path.unlink()
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, ground.dice.choice([3, 5, 8])))  # null, zero, random
    return None


def to_link(target: str) -> Callable[[Ground], None]:
    def damage(ground: Ground) -> None:
        path = ground.file()
        held = path.read_bytes()
        path.unlink()
        if target == "itself":
            path.symlink_to(path.name)
        elif target == "its bytes":
            (ground.outside / path.name).write_bytes(held)
            path.symlink_to(ground.outside / path.name)
        else:
            path.symlink_to(target)

    damage.__name__ = f"to_a_link_to_{target}"
    return damage


def to_hard_link(ground: Ground) -> None:
    path = ground.file()
    path.unlink()
    os.link(ground.outside / "letter", path)


# Folders


def folder_of(ground: Ground) -> Path:
    return ground.folder / ground.dice.choice(["objects", "manifests", "temporary", "aside", "."])


def folder_to_link(ground: Ground) -> None:
    path = folder_of(ground).resolve()
    path.rename(ground.directory / "moved")
    path.symlink_to(ground.dice.choice([ground.outside, ground.directory / "moved", Path("nowhere")]))


def folder_to_file(ground: Ground) -> None:
    path = folder_of(ground).resolve()
    path.rename(ground.directory / "moved")
    path.write_text("in the way")


def folder_gone(ground: Ground) -> None:
    shutil.rmtree(folder_of(ground).resolve())


def folder_without_rights(ground: Ground) -> None:
    folder_of(ground).chmod(ground.dice.choice([0, 0o100, 0o400, 0o500]))


def folder_for_all(ground: Ground) -> None:
    folder_of(ground).chmod(0o777)


def folder_twice(ground: Ground) -> None:
    shutil.copytree(ground.folder, ground.directory / ("f" * 16), symlinks=True)


def strangers_beside(ground: Ground) -> None:
    (ground.directory / ("a" * 16)).symlink_to("/")
    (ground.directory / ("b" * 16)).write_text("a file")
    os.mkfifo(ground.directory / ("c" * 16))
    (ground.directory / ("d" * 16)).mkdir()
    (ground.directory / ("d" * 16) / "manifests").symlink_to(ground.outside)


# Names


def stray(kind: str, name: bytes) -> Callable[[Ground], None]:
    def damage(ground: Ground) -> None:
        folder = os.fsencode(ground.folder / kind)
        with open(folder + b"/" + name, "wb") as file:
            file.write(ground.dice.randbytes(300))

    damage.__name__ = f"stray_{name[:6]!r}_in_{kind}"
    return damage


def many_strays(ground: Ground) -> None:
    kind = ground.dice.choice(["manifests", "objects", "temporary", "aside"])
    for number in range(400):
        (ground.folder / kind / f"{number:032x}.json").write_text("{}")


def deep_folders(ground: Ground) -> None:
    here = os.getcwd()
    os.chdir(ground.folder / ground.dice.choice(["manifests", "objects", "temporary", "aside"]))
    try:
        for _ in range(100):
            os.mkdir("d" * 32)
            os.chdir("d" * 32)
    finally:
        os.chdir(here)


def in_the_way_of_a_reason(ground: Ground) -> None:
    path = ground.any_of("manifests")
    (ground.folder / "aside" / path.name).mkdir()
    os.mkfifo(ground.folder / "aside" / f"1-{path.name}.reason")
    path.write_text("no manifest")


# Lock and word


def lock_to_link(ground: Ground) -> None:
    (ground.folder / "lock").unlink()
    (ground.folder / "lock").symlink_to(ground.dice.choice([ground.outside / "made", ground.outside / "letter"]))


def lock_to_fifo(ground: Ground) -> None:
    (ground.folder / "lock").unlink()
    os.mkfifo(ground.folder / "lock")


def lock_to_folder(ground: Ground) -> None:
    (ground.folder / "lock").unlink()
    (ground.folder / "lock").mkdir()


def evil_word(ground: Ground) -> None:
    words = [{"model": EVIL}, {EVIL: "x"}, ["x"], {"model": 5}, {"model": "x" * 100_000}]
    (ground.folder / "about.json").write_text(json.dumps(ground.dice.choice(words)))


# Manifests


def text_of_a_manifest(text: bytes) -> Callable[[Ground], None]:
    def damage(ground: Ground) -> None:
        ground.any_of("manifests").write_bytes(text)

    damage.__name__ = f"a_manifest_of_{text[:8]!r}"
    return damage


ABSURD = [-1, 0, 1, 63, 64, 1 << 31, 1 << 32, 1 << 48, (1 << 63) - 1, 1 << 64, 1.5, None, "8", "", EVIL, "../x", [], {}]


def change_json(ground: Ground) -> None:
    """One value anywhere in the text, whatever it does to the checksum."""
    path = ground.any_of("manifests")
    try:
        whole = json.loads(path.read_bytes())
        place = whole
        while True:
            key = ground.dice.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not place[key] or not isinstance(place[key], dict | list) or ground.dice.random() < 0.3:
                break
            place = place[key]
    except (ValueError, TypeError, IndexError):
        return
    place[key] = ground.dice.choice(ABSURD)
    path.write_text(json.dumps(whole))


def lie(ground: Ground) -> None:
    """One value anywhere, and the checksum of the text that says so, where such a text can be written."""
    found = ground.manifest()
    if found is None:
        return
    path, listed = found
    name = ground.dice.choice([field for field in Manifest.__struct_fields__ if field != "checksum"])
    value = getattr(listed, name)
    if isinstance(value, tuple) and value:
        at = ground.dice.randrange(len(value))
        item = ground.dice.choice([*value, *[v for v in ABSURD if type(v) is type(value[at])]])
        if isinstance(value[at], msgspec.Struct):
            inner = ground.dice.choice(value[at].__struct_fields__)
            item = msgspec.structs.replace(value[at], **{inner: ground.dice.choice(ABSURD)})
        value = ground.dice.choice([(*value[:at], item, *value[at + 1 :]), value[:at], (*value, item), value[::-1]])
    else:
        value = ground.dice.choice(ABSURD)
    try:
        path.write_bytes(manifest.encode(msgspec.structs.replace(listed, **{name: value})))
    except (TypeError, OverflowError, ValueError, AttributeError):
        change_json(ground)


def claim_much(ground: Ground) -> None:
    """A manifest in good order for an object of 200 MB of zeros, which is there."""
    found = ground.manifest()
    if found is None:
        return
    path, listed = found
    huge = 200 << 20
    start = -(-listed.own_bytes // 64) * 64
    part = manifest.PartRow("drafter", None, "uint8", (huge,), start, huge)
    grown = msgspec.structs.replace(listed, parts=(*listed.parts, part), own_bytes=start + huge)
    path.write_bytes(manifest.encode(grown))
    if (ground.folder / "objects" / listed.own).is_file():
        os.truncate(ground.folder / "objects" / listed.own, start + huge)


DAMAGES: list[Callable[[Ground], None]] = [
    *(flip_a_bit, scatter_noise, cut_short, empty, append_noise, grow_huge, zero_a_stretch, delete, rename, swap),
    *(copy_over, random_content, take_rights, give_rights, odd_times),
    *(to_folder, to_empty_folder, to_fifo, to_socket, to_device, to_hard_link),
    *map(to_link, ("its bytes", "itself", "nowhere", "/dev/zero", "/", "../lock", "/proc/self/mem")),
    *(folder_to_link, folder_to_file, folder_gone, folder_without_rights, folder_for_all, folder_twice),
    *(strangers_beside, many_strays, deep_folders, in_the_way_of_a_reason),
    *(stray(kind, b"\xff\xfe.json") for kind in ("manifests", "objects", "temporary", "aside")),
    *(stray(kind, b"\x1b[31m.json\n") for kind in ("manifests", "aside")),
    *(stray("manifests", b"x" * 255), stray("objects", b"e" * 32), stray("aside", b"x" * 245)),
    *(lock_to_link, lock_to_fifo, lock_to_folder, evil_word, change_json, lie, claim_much),
    *map(text_of_a_manifest, (b"", b"[" * 200_000, b"{}" * 9_000_000, b"\xff" * 99, b"null", b'{"version": NaN}')),
]


# Using a directory


def truth() -> list[np.ndarray]:
    return [tokens_of(talk, length) for talk, lengths in LENGTHS.items() for length in lengths]


def fill(directory: Path) -> None:
    store = DiskStore(directory, FINGERPRINT, BUDGET)
    for tokens in truth():
        store.save(snapshot_of(tokens))
    describe(store, {"model": "fuzz"})
    store.close()


def open_store(directory: Path) -> DiskStore:
    return DiskStore(directory, FINGERPRINT, BUDGET, largest=64 << 20)


def look_up_all(cache: PrefixCache) -> int:
    """Every hit is compared with what it must be."""
    hits = 0
    for tokens in truth():
        found = cache.lookup(np.append(tokens, np.int32(1)))
        if found.hit is None:
            continue
        hits += 1
        wanted = snapshot_of(tokens[: found.hit.position])
        pairs = zip(tensors(found.hit.snapshot), tensors(wanted), strict=True)
        assert np.array_equal(found.hit.snapshot.tokens, wanted.tokens), "a hit has other tokens"
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs), "a hit has other bytes"
        found.hit.release()
    return hits


def use(directory: Path, spare: Path) -> int:
    """All that a server and a person do with it; returns the hits."""
    store = open_store(directory)
    cache = PrefixCache(local_tiers(BUDGET, store))
    hits = look_up_all(cache)
    strangers(directory, store, read_about(store.folder))
    for info in tools.list_snapshots(directory):
        tools.show_snapshot(directory, info.id)
    findings = tools.verify_snapshots(directory)
    assert all(finding.fault is None or finding.fault.isprintable() for finding in findings), "a fault speaks"
    saved = not store.read_only and save_all(store)
    cache.close()
    cache = PrefixCache(local_tiers(BUDGET, open_store(directory)))
    found = look_up_all(cache)
    assert not saved or found == len(truth()), f"{found} of {len(truth())} are found after they were saved again"
    cache.close()
    refusals = [str(error) for step in (carry, prune) if (error := refusal(step, directory, spare))]
    assert all(map(str.isprintable, refusals)), "an error speaks to the terminal"
    return hits


def save_all(store: DiskStore) -> bool:
    """False if a folder may not be written: the writer of a server says so and waits."""
    try:
        for tokens in truth():
            store.save(snapshot_of(tokens))
    except PermissionError:
        return False
    return True


def refusal(step: Callable[[Path, Path], None], directory: Path, spare: Path) -> RekindleError | None:
    try:
        step(directory, spare)
    except RekindleError as error:
        return error
    return None


def carry(directory: Path, spare: Path) -> None:
    infos = tools.list_snapshots(directory)
    if infos:
        tools.export_chain(directory, infos[0].id, spare / "out.tar")
        tools.import_chain(spare / "imported", spare / "out.tar")


def prune(directory: Path, spare: Path) -> None:
    tools.prune_snapshots(directory, 0)


def in_a_child(work: Callable[[], int]) -> tuple[str | None, int, int]:
    """What went wrong, what `work` returned, the most bytes that it had."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(SECONDS)  # kills it
        fault, count = None, 0
        try:
            count = work()
        except BaseException:
            fault = traceback.format_exc(limit=-4)
        os.write(writer, json.dumps([fault, count]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as said:
        data = said.read()
    _, status, used = os.wait4(child, 0)
    fault, count = json.loads(data) if data else (f"ended with status {os.waitstatus_to_exitcode(status)}", 0)
    return fault, count, used.ru_maxrss * 1024


def as_nobody(work: Callable[[], int]) -> Callable[[], int]:
    def other() -> int:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        return work()

    return other


def give_away(root: Path) -> None:
    if os.geteuid() == 0:
        for folder, folders, files in os.walk(root):
            for name in (".", *folders, *files):
                os.lchown(os.path.join(folder, name), NOBODY, NOBODY)


def digest_of(folder: Path) -> str:
    found = sorted((path.name, path.read_bytes()) for path in folder.iterdir())
    return hashlib.sha256(repr(found).encode()).hexdigest()


@dataclass
class Tally:
    hits: int = 0
    misses: int = 0
    peak: int = 0
    faults: int = 0


def fuzz(root: Path, directories: int, seed: int) -> tuple[Tally, Counter[str]]:
    template, tally, kinds = root / "template", Tally(), Counter[str]()
    snapshot_of(truth()[0])  # so that all modules are there before anybody becomes another user
    fault, _, _ = in_a_child(lambda: fill(template) or 0)
    assert fault is None, fault
    for number in range(directories):
        dice = random.Random(seed * 1_000_003 + number)
        home = root / str(number)
        ground = Ground(home / "cache", home / "outside", dice)
        (home / "spare").mkdir(parents=True)
        ground.outside.mkdir()
        (ground.outside / "letter").write_text("dear")
        (ground.outside / f"{'e' * 32}").write_text("dear too")
        shutil.copytree(template, ground.directory)
        first = DAMAGES[number % len(DAMAGES)]  # each has its turn
        damages = [first, *dice.sample(DAMAGES, dice.choice([0, 0, 1, 3]))]
        done = [damage.__name__ for damage in damages if apply(damage, ground)]
        kinds.update(done)
        give_away(home)
        before = digest_of(ground.outside)
        fault, hits, peak = in_a_child(as_nobody(partial(use, ground.directory, home / "spare")))
        if fault is None and digest_of(ground.outside) != before:
            fault = "something outside the directory has changed"
        if fault is None and peak > MEMORY:
            fault = f"{peak >> 20} MiB"
        if fault is not None:
            tally.faults += 1
            print(f"directory {number} ({', '.join(done)}): {fault}")
        tally.hits, tally.misses = tally.hits + hits, tally.misses + len(truth()) - hits
        tally.peak = max(tally.peak, peak)
        wipe(home)
    return tally, kinds


def apply(damage: Callable[[Ground], None], ground: Ground) -> bool:
    """False where an earlier damage has left nothing to be damaged so."""
    try:
        damage(ground)
    except OSError:
        return False
    return True


def wipe(home: Path) -> None:
    for folder, _, _ in os.walk(home):
        os.chmod(folder, 0o700)
    shutil.rmtree(home)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directories", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    wishes = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # the store would tell of each file
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        tally, kinds = fuzz(Path(root), wishes.directories, wishes.seed)
    result = {
        "directories": wishes.directories,
        "seed": wishes.seed,
        "kinds": len(kinds),
        "damages": kinds.total(),
        "hits": tally.hits,
        "misses": tally.misses,
        "peak_mib": tally.peak >> 20,
        "faults": tally.faults,
        "seconds": round(time.perf_counter() - begin, 1),
    }
    print(
        "{directories} directories, {kinds} kinds of damage, {faults} faults, at most {peak_mib} MiB".format(**result)
    )
    print(json.dumps(result))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())

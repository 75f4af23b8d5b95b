from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.paper_snapshots import FINGERPRINT, PaperModel, same
from support.snapshot_lab import wait_until

from rekindle.errors import BadRequest
from rekindle.prefix import Miss, PrefixCache, local_tiers
from rekindle.prompt import BoundaryKind
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.memory import MemoryStore
from rekindle.snapshots.slabs import EDGE, Slabs
from rekindle.snapshots.types import Snapshot

PLENTY = 1 << 30
MESSAGE, SYSTEM, END = BoundaryKind.MESSAGE, BoundaryKind.SYSTEM, BoundaryKind.END


def run(n: int, start: int = 0) -> list[int]:
    return list(range(start, start + n))


@pytest.fixture
def model() -> PaperModel:
    return PaperModel()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskStore]:
    opened = DiskStore(tmp_path, FINGERPRINT, PLENTY)
    yield opened
    opened.close()


def again(disk: DiskStore, ram: int = PLENTY) -> PrefixCache:
    """A restart."""
    return PrefixCache(local_tiers(ram, DiskStore(disk.folder.parent, FINGERPRINT, disk.budget)))


# Hits


def test_the_longest_published_prefix_is_found_and_never_one_longer_than_the_prompt(model: PaperModel) -> None:
    cache = PrefixCache(local_tiers(PLENTY))
    for n in (50, 100, 200):
        cache.publish(model.snapshot(run(n)), MESSAGE)
    for length, expected in ((49, None), (50, 50), (99, 50), (100, 100), (199, 100), (200, 200), (999, 200)):
        hit = cache.lookup(run(length)).hit
        assert (hit.position if hit else None) == expected
        if hit:
            assert np.array_equal(hit.snapshot.tokens, run(expected or 0))
            hit.release()


def test_what_followed_a_prefix_is_known_after_a_restart_too(model: PaperModel, disk: DiskStore) -> None:
    cache = PrefixCache(local_tiers(PLENTY, disk))
    assert cache.continuations([], 10) == cache.continuations(run(5), 10) == []
    cache.publish(model.snapshot(run(100)), END)
    cache.publish(model.snapshot([*run(50), 7, 8]), END)
    for _ in range(2):
        assert cache.continuations(run(95), 99)[0] == [95, 96, 97, 98, 99]
        assert {tuple(found) for found in cache.continuations(run(50), 3)} == {(7, 8), (50, 51, 52)}
        assert cache.continuations([*run(50), 7, 8], 3) == []
        assert cache.continuations([*run(50), 9], 3) == []
        cache.close()
        cache = again(disk)
    cache.close()


def test_a_prompt_may_be_a_tuple(model: PaperModel) -> None:
    cache = PrefixCache(local_tiers(PLENTY))
    cache.publish(model.snapshot(run(50)), MESSAGE)
    assert cache.known_length(tuple(run(60))) == 50


def test_the_divergence_and_its_tokens_are_reported(model: PaperModel) -> None:
    cache = PrefixCache(local_tiers(PLENTY))
    assert cache.lookup(run(10)).miss is Miss.EMPTY
    cache.publish(model.snapshot(run(100)), MESSAGE)
    cache.publish(model.snapshot(run(200)), END)
    left = cache.lookup([*run(150), 7777])
    assert (left.divergence, left.ours, left.seen, left.miss) == (150, 7777, 150, Miss.NO_BOUNDARY)
    beyond = cache.lookup(run(300))
    assert (beyond.divergence, beyond.ours, beyond.seen, beyond.miss) == (200, 200, None, Miss.UNSEEN)
    inside = cache.lookup(run(150))
    assert (inside.divergence, inside.ours, inside.seen) == (150, None, 150)
    full = cache.lookup(run(200))
    assert (full.miss, full.reason) == (None, None)
    other = cache.lookup([5, 6])
    assert (other.divergence, other.ours, other.seen, other.miss) == (0, 5, 0, Miss.UNSEEN)
    assert other.reason


def test_a_hit_as_long_as_the_prompt_needs_logits(model: PaperModel) -> None:
    cache = PrefixCache(local_tiers(PLENTY))
    cache.publish(model.snapshot(run(50)), MESSAGE)
    cache.publish(model.snapshot(run(100), logits=False), MESSAGE)
    found = cache.lookup(run(100))
    assert found.hit is not None
    assert (found.hit.position, found.miss) == (50, Miss.NO_LOGITS)
    longer = cache.lookup(run(101)).hit
    assert longer is not None
    assert longer.position == 100
    found.hit.release()
    longer.release()
    assert cache.wants(run(100), END)
    cache.publish(model.snapshot(run(100)), END)
    assert not cache.wants(run(100), END)
    assert cache.lookup(run(100)).miss is None


def test_what_was_looked_up_counts_when_it_is_taken(model: PaperModel) -> None:
    cache = PrefixCache(local_tiers(PLENTY))
    cache.publish(model.snapshot(run(50)), MESSAGE)
    hit, miss = cache.lookup(run(60)), cache.lookup([7, 8])
    assert hit.hit is not None
    hit.hit.release()
    stats = cache.stats()
    assert (stats.lookups, stats.hits, stats.restored, stats.misses, stats.short_hits) == (2, {}, {}, {}, {})
    hit.taken()
    miss.taken()
    stats = cache.stats()
    assert (stats.hits, stats.restored) == ({"ram": 1}, {"ram": 50})
    assert stats.misses == stats.short_hits == {"unseen": 1}


def test_publish_refuses_a_key_that_is_not_as_long_as_its_state(model: PaperModel) -> None:
    snapshot = model.snapshot(run(100))
    with pytest.raises(Exception, match="100"):
        PrefixCache(local_tiers(PLENTY)).publish(replace(snapshot, tokens=snapshot.tokens[:99]), MESSAGE)


# Both tiers


def test_a_restart_forgets_nothing(model: PaperModel, disk: DiskStore) -> None:
    cache = PrefixCache(local_tiers(PLENTY, disk))
    for n in (50, 100, 200):
        cache.publish(model.snapshot(run(n)), MESSAGE)
    cache.close()
    fresh = again(disk)
    for n in (200, 100, 50):
        found = fresh.lookup(run(n))
        hit = found.hit
        assert hit is not None
        assert (hit.position, hit.tier) == (n, "disk")
        assert same(hit.snapshot, model.snapshot(run(n)))
        found.taken()
        hit.release()
    second = fresh.lookup(run(200))
    assert second.hit is not None
    assert second.hit.tier == "ram"
    second.taken()
    stats = fresh.stats()
    assert stats.hits == {"disk": 3, "ram": 1}
    assert stats.restored == {"disk": 350, "ram": 200}
    fresh.close()


def test_ram_comes_before_disk_and_a_longer_disk_hit_before_ram(model: PaperModel, disk: DiskStore) -> None:
    cache = PrefixCache(local_tiers(PLENTY, disk))
    cache.publish(model.snapshot(run(50)), MESSAGE)
    cache.publish(model.snapshot(run(100)), MESSAGE)
    cache.close()
    fresh = again(disk)
    fresh.publish(model.snapshot(run(50)), MESSAGE)
    tiers = [(hit.position, hit.tier) for hit in (fresh.lookup(run(n)).hit for n in (60, 120)) if hit]
    assert tiers == [(50, "ram"), (100, "disk")]
    fresh.close()


@pytest.mark.parametrize("which", ["own", "page", "manifest"])
def test_a_bad_file_is_a_miss_and_the_next_longest_is_tried(
    model: PaperModel, disk: DiskStore, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = PrefixCache(local_tiers(PLENTY, disk))
    for n in (50, 100, 200):
        cache.publish(model.snapshot(run(n)), MESSAGE)
    cache.close()
    fresh = again(disk, ram=0)
    record = max(disk.records(), key=lambda record: record.position)
    names = {"own": f"objects/{record.own}", "page": f"objects/{record.pages[-1]}"}
    path = disk.folder / names.get(which, f"manifests/{record.id}.json")
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    caplog.clear()
    found = fresh.lookup(run(250))
    assert found.hit is not None
    assert (found.hit.position, found.miss) == (100, Miss.BAD_FILE)
    assert same(found.hit.snapshot, model.snapshot(run(100)))
    found.hit.release()
    assert len(caplog.records) == 1
    assert fresh.lookup(run(250)).miss is not Miss.BAD_FILE, "it is not tried again"
    assert fresh.stats().bad_files == 1
    fresh.publish(model.snapshot(run(200)), MESSAGE)
    fresh.close()
    last = again(disk)
    assert last.known_length(run(250)) == 200
    last.close()


def test_a_ram_victim_drops_to_disk_and_is_still_found(model: PaperModel, disk: DiskStore) -> None:
    one = model.snapshot(run(50)).own_bytes
    cache = PrefixCache(local_tiers(2 * one, disk, queue=16))
    for i in range(6):
        cache.publish(model.snapshot(run(50, 100 * i)), MESSAGE)
        cache.flush()
    assert cache.stats().bytes["ram"] <= 2 * one
    for i in range(6):
        hit = cache.lookup(run(50, 100 * i)).hit
        assert hit is not None
        assert same(hit.snapshot, model.snapshot(run(50, 100 * i)))
        hit.release()
    assert set(cache.stats().evictions) == {"ram:to_disk"}
    cache.close()


def test_what_leaves_ram_is_the_memory_for_what_is_loaded(model: PaperModel, disk: DiskStore) -> None:
    for i in range(6):
        disk.save(model.snapshot(run(70, 100 * i)))
    one = model.snapshot(run(70))
    ram = MemoryStore(PLENTY)
    ram.add(one)
    disk.close()
    slabs = Slabs(size=EDGE)
    cache = PrefixCache(
        local_tiers(ram.bytes + ram.bytes // 2, DiskStore(disk.folder.parent, FINGERPRINT, PLENTY, slabs=slabs))
    )
    made = list[int]()
    for i in range(6):
        hit = cache.lookup(run(70, 100 * i)).hit
        assert hit is not None
        assert same(hit.snapshot, model.snapshot(run(70, 100 * i)))
        hit.release()
        del hit
        made.append(slabs.late)
        stats = cache.stats()
        assert stats.entries["ram"] == 1
        assert stats.bytes["ram"] + slabs.idle_bytes <= stats.budgets["ram"]
    # The second is half read before the first leaves; from then on there is enough.
    assert made[1:] == made[1:2] * 5
    for entry in cache.entries():
        cache.quarantine(entry, "a test")
    assert slabs.idle_bytes > ram.bytes // 2
    cache.publish(one, MESSAGE)  # in memory from elsewhere: less may lie idle now
    assert slabs.idle_bytes <= ram.bytes // 2
    cache.close()


def test_memory_of_what_leaves_ram_lies_idle_as_far_as_the_budget_goes_without_a_disk_too(model: PaperModel) -> None:
    one = model.snapshot(run(70))
    ram = MemoryStore(PLENTY)
    ram.add(one)
    lent = [Slabs(size=EDGE), Slabs(size=EDGE)]
    cache = PrefixCache(local_tiers(ram.bytes, slabs=lent))
    for slabs in lent:
        slabs.take(3 * ram.bytes // 8)
    assert sum(slabs.idle_bytes for slabs in lent) > ram.bytes // 2
    cache.publish(one, MESSAGE)
    assert sum(slabs.idle_bytes for slabs in lent) == 0
    cache.close()


def test_a_bad_file_sends_nothing_out_of_ram(model: PaperModel, disk: DiskStore) -> None:
    altered = disk.folder / "objects" / disk.save(model.snapshot(run(640, 5000))).own
    altered.write_bytes(altered.read_bytes()[:-1] + b"!")
    kept, ram = [model.snapshot(run(70, 100 * i)) for i in range(6)], MemoryStore(PLENTY)
    for snapshot in kept:
        ram.add(snapshot)
    reader = DiskStore(disk.folder.parent, FINGERPRINT, PLENTY)  # another one writes: what leaves RAM is lost
    assert reader.read_only
    cache = PrefixCache(local_tiers(ram.bytes, reader))
    for snapshot in kept:
        cache.publish(snapshot, MESSAGE)
    assert cache.lookup(run(640, 5000)).miss is Miss.BAD_FILE
    assert cache.stats().entries["ram"] == len(kept)
    cache.close()


def test_a_victim_on_its_way_to_disk_is_found_all_the_time(
    model: PaperModel, disk: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = threading.Event(), disk.save

    def slow(*args):  # type: ignore[no-untyped-def]
        assert gate.wait(30)
        return real(*args)

    monkeypatch.setattr(disk, "save", slow)
    cache = PrefixCache(local_tiers(0, disk))
    cache.publish(model.snapshot(run(50)), MESSAGE)
    assert cache.stats().bytes["ram"] == 0
    waiting = cache.lookup(run(50)).hit
    assert waiting is not None
    assert waiting.tier == "ram"
    waiting.release()
    gate.set()
    cache.flush()
    saved = cache.lookup(run(50)).hit
    assert saved is not None
    assert saved.tier == "disk"
    saved.release()
    cache.close()


def test_a_disk_that_refuses_leaves_ram_at_work(
    model: PaperModel, disk: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rekindle.snapshots.files.os.write", refuse)
    cache = PrefixCache(local_tiers(PLENTY, disk))
    cache.publish(model.snapshot(run(50)), MESSAGE)
    cache.flush()
    assert cache.lookup(run(50)).hit is not None
    stats = cache.stats()
    assert (stats.states["disk"], stats.refused_saves) == ("troubled", {"disk": 1})
    cache.close()


def test_a_disk_budget_is_kept_and_what_is_left_loads(model: PaperModel, tmp_path: Path) -> None:
    probe = DiskStore(tmp_path / "probe", FINGERPRINT, PLENTY)
    size = probe.save(model.snapshot(run(50)), MESSAGE, "0" * 32).nbytes
    probe.close()
    budget = 3 * size + size // 2
    cache = PrefixCache(local_tiers(0, DiskStore(tmp_path / "real", FINGERPRINT, budget), queue=16))
    for i in range(10):
        cache.publish(model.snapshot(run(50, 100 * i)), MESSAGE)
        cache.flush()
        assert cache.stats().bytes["disk"] <= budget
    found = [i for i in range(10) if cache.known_length(run(50, 100 * i))]
    assert found == [7, 8, 9]
    cache.close()


def test_what_is_being_restored_from_disk_is_not_the_victim(
    model: PaperModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = DiskStore(tmp_path / "probe", FINGERPRINT, PLENTY)
    size = probe.save(model.snapshot(run(50)), MESSAGE, "0" * 32).nbytes
    probe.close()
    disk = DiskStore(tmp_path / "real", FINGERPRINT, 3 * size + size // 2)
    cache = PrefixCache(local_tiers(0, disk, queue=16))
    cache.publish(model.snapshot(run(50)), MESSAGE)
    cache.flush()
    load = disk.load

    def crowded(id: str) -> Snapshot:
        for i in range(1, 8):
            cache.publish(model.snapshot(run(50, 100 * i)), MESSAGE)
            cache.flush()
        return load(id)

    monkeypatch.setattr(disk, "load", crowded)
    hit = cache.lookup(run(50)).hit
    assert hit is not None
    assert same(hit.snapshot, model.snapshot(run(50)))
    hit.release()
    cache.close()


def test_a_read_only_second_cache_hits_and_does_not_save(model: PaperModel, disk: DiskStore) -> None:
    cache = PrefixCache(local_tiers(PLENTY, disk))
    cache.publish(model.snapshot(run(50)), MESSAGE)
    cache.flush()
    second = again(disk)  # flock is per open file, so one process can play both
    assert second.stats().states["disk"] == "read-only"
    assert second.lookup(run(50)).hit is not None
    second.publish(model.snapshot(run(90)), MESSAGE)
    second.close()
    assert len(disk) == 1
    cache.close()


def test_what_an_audit_sets_aside_never_comes_back(model: PaperModel, disk: DiskStore) -> None:
    cache = PrefixCache(local_tiers(PLENTY, disk))
    entry = cache.publish(model.snapshot(run(50)), MESSAGE)
    cache.quarantine(entry, "logits differ from a cold run")  # perhaps while it is being saved
    cache.flush()
    assert cache.lookup(run(50)).hit is None
    cache.close()
    fresh = again(disk)
    assert fresh.lookup(run(50)).hit is None
    fresh.close()


def test_pages_are_counted_once_in_ram(model: PaperModel) -> None:
    cache = PrefixCache(local_tiers(PLENTY))
    snapshots = [model.snapshot(run(64 * n)) for n in (1, 2, 3)]
    for snapshot in snapshots:
        cache.publish(snapshot, MESSAGE)
    pages = {p for s in snapshots for part in s.parts for p in part.pages}
    assert cache.stats().bytes["ram"] == sum(s.own_bytes for s in snapshots) + sum(p.nbytes for p in pages)


def test_what_was_refused_is_saved_as_soon_as_the_disk_has_time(
    model: PaperModel, disk: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, save = threading.Event(), disk.save
    monkeypatch.setattr(disk, "save", lambda *args: gate.wait(30) and save(*args))
    tiers = local_tiers(PLENTY, disk, queue=1)
    tiers[-1]._writer._queue_bytes = 0  # type: ignore[attr-defined]
    cache = PrefixCache(tiers)
    for i in range(8):
        cache.publish(model.snapshot(run(50, 100 * i)), MESSAGE)
    evicted = cache.find(run(50, 700))
    assert evicted is not None and cache.stats().refused_saves["queue"] >= 6
    assert cache.stats().saves_waiting == 8
    cache.quarantine(evicted, "it must not be saved")
    assert cache.stats().saves_waiting == 7
    gate.set()
    cache.flush()
    stats = cache.stats()
    assert (stats.entries["disk"], stats.saves_waiting) == (7, 0)
    cache.close()


@pytest.mark.parametrize("when", ["later", "at closing"])
def test_what_waited_when_the_disk_refused_once_is_saved_all_the_same(
    model: PaperModel, disk: DiskStore, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr("rekindle.snapshots.writer.FIRST_PAUSE", 0.1 if when == "later" else 3600)
    gate, save, fails = threading.Event(), disk.save, [OSError(errno.ENOSPC, "No space left on device")]

    def full_once(*args: Any) -> Any:
        gate.wait(30)
        if fails:
            raise fails.pop()
        return save(*args)

    monkeypatch.setattr(disk, "save", full_once)
    cache = PrefixCache(local_tiers(PLENTY, disk))
    for i in range(6):
        cache.publish(model.snapshot(run(50, 100 * i)), MESSAGE)
    gate.set()
    if when == "later":
        wait_until(lambda: cache.stats().entries["disk"] == 6)
        assert cache.stats().saves_waiting == 0
    else:
        wait_until(lambda: cache.stats().saves_waiting == 6 and not fails)
    cache.close()
    fresh = again(disk)
    assert all(fresh.known_length(run(50, 100 * i)) == 50 for i in range(6))
    fresh.close()


def test_what_was_refused_is_saved_at_closing(model: PaperModel, disk: DiskStore) -> None:
    cache = PrefixCache(local_tiers(PLENTY, disk, queue=1))
    for i in range(8):
        cache.publish(model.snapshot(run(50, 100 * i)), MESSAGE)
    cache.close()
    fresh = again(disk)
    assert all(fresh.known_length(run(50, 100 * i)) == 50 for i in range(8))
    fresh.close()


def test_many_threads_publish_and_look_up(model: PaperModel, disk: DiskStore) -> None:
    one = model.snapshot(run(50)).own_bytes
    cache = PrefixCache(local_tiers(3 * one, disk))
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            own = PaperModel()
            for i in range(15):
                start = 1000 * ((seed + i) % 5)
                cache.publish(own.snapshot(run(40 + i, start)), MESSAGE)
                hit = cache.lookup(run(60, start)).hit
                if hit:
                    assert same(hit.snapshot, own.snapshot(run(hit.position, start)))
                    hit.release()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    cache.close()
    assert all(entry.pins == 0 for entry in cache.entries())


def test_a_lookup_in_ram_reads_no_file_and_counts_nothing_it_leaves_to_others(
    model: PaperModel, disk: DiskStore
) -> None:
    first = PrefixCache(local_tiers(PLENTY, disk))
    first.publish(model.snapshot(run(100)), MESSAGE)
    first.close()
    cache = again(disk)
    assert cache.lookup_in_ram(run(120)) is None
    stats = cache.stats()
    assert (stats.lookups, stats.hits, stats.misses) == (0, {}, {})
    assert all(entry.pins == 0 for entry in cache.entries())
    found = cache.lookup(run(120))
    assert found.hit is not None and found.hit.tier == "disk"
    found.hit.release()
    found_again = cache.lookup_in_ram(run(120))
    assert found_again is not None and found_again.hit is not None
    assert (found_again.hit.tier, found_again.hit.position) == ("ram", 100)
    found_again.hit.release()
    unseen = cache.lookup_in_ram(run(50, start=7000))
    assert unseen is not None and unseen.hit is None
    cache.close()


def test_a_start_says_what_it_found_and_a_stop_what_it_saved(
    model: PaperModel, disk: DiskStore, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "rekindle.prefix"):
        cache = PrefixCache(local_tiers(PLENTY, disk))
        cache.publish(model.snapshot(run(100)), MESSAGE)
        cache.close()
        again(disk).close()
    said = [record.getMessage() for record in caplog.records if record.name == "rekindle.prefix"]
    assert [line.split(" (")[0] for line in said] == [
        "snapshots found: 0",
        "snapshots saved: 1",
        "snapshots found: 1",
        "snapshots saved: 1",
    ]
    assert all(line.endswith(str(disk.folder)) for line in said)


def test_a_cache_that_can_keep_nothing_wants_no_snapshot() -> None:
    assert not PrefixCache(local_tiers(0)).wants(list(range(64)), BoundaryKind.END)
    assert PrefixCache(local_tiers(1 << 20)).wants(list(range(64)), BoundaryKind.END)


@pytest.mark.parametrize("kind", [list, lambda tokens: np.asarray(tokens, dtype=np.uint64)])
def test_a_number_that_is_no_token_id_is_refused_and_never_made_to_fit(kind: Callable[[list[int]], Any]) -> None:
    cache = PrefixCache(local_tiers(PLENTY))
    for wrong in (1 << 31, (1 << 32) + 5, 1 << 63):
        for ask in (cache.lookup, cache.lookup_in_ram, cache.known_length, lambda t: cache.wants(t, BoundaryKind.END)):
            with pytest.raises(BadRequest, match=f"{wrong} is no token id"):
                ask(kind([1, wrong, 2]))
    with pytest.raises(BadRequest, match="-1 is no token id"):
        cache.lookup([3, -1])
    cache.close()

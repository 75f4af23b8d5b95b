"""A third tier in one file: an object store, here a dictionary of bytes. It keeps the cache's laws without a change
under src/; the same laws hold with disk in its place, and with both."""

from __future__ import annotations

import hashlib
import io
import pickle
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.paper_snapshots import FINGERPRINT, PaperModel, same

from rekindle.api.metrics import Metrics
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling, Token
from rekindle.errors import BadSnapshotFile, TierUnavailable
from rekindle.prefix import Miss, PrefixCache, Tier
from rekindle.prefix.disk import DiskTier
from rekindle.prefix.ram import RamTier
from rekindle.prefix.tier import Inherited, Offer, Room, TierCounts
from rekindle.prompt import BoundaryKind, Prompt
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.types import Page, Snapshot
from rekindle.stages import Pipeline

PLENTY = 1 << 30
MESSAGE = BoundaryKind.MESSAGE


# The tier


@dataclass
class Bucket:
    """Another machine's memory: it outlives every cache. The hooks run before a transfer, as long as it takes."""

    objects: dict[str, bytes] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)  # reason by id
    before_put: Callable[[], None] = lambda: None
    before_get: Callable[[], None] = lambda: None


class FarTier:
    name, where = "far", "a bucket"
    instant, persistent, writable = False, True, True

    def __init__(self, bucket: Bucket, budget: int) -> None:
        self.budget = budget
        self._bucket = bucket
        self._room: Room | None = None
        self._counts: Counter[str] = Counter()
        self._sender = ThreadPoolExecutor(1, "far")

    @property
    def bytes(self) -> int:
        return sum(map(len, list(self._bucket.objects.values())))

    def open(self, room: Room) -> Iterator[Inherited]:
        self._room = room
        for id, data in list(self._bucket.objects.items()):
            snapshot, kind, conversation = _unpack(data)
            yield Inherited(
                id=id,
                tokens=snapshot.tokens,
                namespace=snapshot.namespace,
                kind=kind,
                conversation=conversation,
                own_bytes=snapshot.own_bytes,
                has_logits=snapshot.logits is not None,
            )

    def add(self, offer: Offer, wait: bool = False) -> bool:
        self._sender.submit(self._put, offer)
        return True

    def _put(self, offer: Offer) -> None:
        data = _pack(offer.snapshot, offer.kind, offer.conversation)
        self._bucket.before_put()
        assert self._room is not None, "the cache opens a tier before it adds to it"
        over = self.bytes + len(data) - self.budget
        if over > 0:
            self._room.own(over)
        if self.bytes + len(data) > self.budget:
            self._counts["refused"] += 1
            offer.done(None)
            return
        id = hashlib.sha256(offer.snapshot.namespace.encode() + b"\0" + offer.snapshot.tokens.tobytes()).hexdigest()
        self._bucket.objects[id] = data
        self._counts["saves"] += 1
        offer.done(id)

    def load(self, id: str) -> Snapshot:
        assert self._room is not None, "the cache opens a tier before it loads from it"
        self._bucket.before_get()
        data = self._bucket.objects.get(id, b"")
        self._room.memory(len(data))
        try:
            return _unpack(data)[0]
        except BadSnapshotFile:
            self._counts["bad"] += 1
            raise

    def remove(self, id: str) -> None:
        self._bucket.objects.pop(id, None)

    def quarantine(self, id: str, reason: str) -> None:
        if self._bucket.objects.pop(id, None) is not None:
            self._bucket.quarantined[id] = reason

    def trim(self) -> None: ...

    def counts(self) -> TierCounts:
        refused = {"budget": self._counts["refused"]} if self._counts["refused"] else {}
        return TierCounts(saves=self._counts["saves"], refused=refused, bad_files=self._counts["bad"])

    def flush(self) -> None:
        self._sender.submit(lambda: None).result()

    def close(self) -> None:
        self._sender.shutdown()


class Pickler(pickle.Pickler):
    """Pages become tensors of their own, and copies that are complete need no waiting."""

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, Page):
            return Page, (thing.data.clone(),)
        if not isinstance(thing, type) and callable(getattr(thing, "wait", None)):
            return type(None), ()
        return NotImplemented


def _pack(*content: Any) -> bytes:
    file = io.BytesIO()
    Pickler(file).dump(content)
    body = file.getvalue()
    return hashlib.sha256(body).digest() + body


def _unpack(data: bytes) -> Any:
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise BadSnapshotFile("an object has been altered")
    return pickle.loads(data[32:])


# The laws


def run(n: int, start: int = 0) -> list[int]:
    return list(range(start, start + n))


@dataclass
class House:
    """A machine and the bucket that it uses. `cache` may be asked for again after a close: a restart."""

    folder: Path
    slower: tuple[str, ...]
    bucket: Bucket = field(default_factory=Bucket)

    def cache(self, ram: int = PLENTY, slow: int = PLENTY) -> PrefixCache:
        tiers: list[Tier] = [RamTier(ram)]
        for name in self.slower:
            if name == "disk":
                tiers.append(DiskTier(DiskStore(self.folder, FINGERPRINT, slow), queue=16))
            else:
                tiers.append(FarTier(self.bucket, slow))
        return PrefixCache(tiers)


@pytest.fixture(params=["disk", "far", "disk far"])
def house(request: pytest.FixtureRequest, tmp_path: Path) -> House:
    """RAM, and then these."""
    return House(tmp_path, tuple(request.param.split()))


@pytest.fixture
def far(tmp_path: Path) -> House:
    return House(tmp_path, ("far",))


@pytest.fixture
def three(tmp_path: Path) -> House:
    return House(tmp_path, ("disk", "far"))


@pytest.fixture
def model() -> PaperModel:
    return PaperModel()


def found_in(cache: PrefixCache, snapshot: Snapshot) -> str | None:
    """The tier of a hit as long as the snapshot, which it must be bit for bit."""
    found = cache.lookup(snapshot.tokens, namespace=snapshot.namespace)
    if found.hit is None:
        return None
    assert same(found.hit.snapshot, snapshot)
    assert found.hit.snapshot.namespace == snapshot.namespace
    found.taken()
    found.hit.release()
    return found.hit.tier


def test_a_snapshot_evicted_from_ram_is_found_in_a_slower_tier_bit_for_bit(house: House, model: PaperModel) -> None:
    snapshots = [model.snapshot(run(70, 100 * i)) for i in range(6)]
    cache = house.cache(ram=0)
    for snapshot in snapshots:
        cache.publish(snapshot, MESSAGE)
        cache.flush()
    assert [found_in(cache, snapshot) for snapshot in snapshots] == [house.slower[0]] * 6
    stats = cache.stats()
    assert stats.evictions[f"ram:to_{house.slower[0]}"] >= 6
    assert stats.entries == {"ram": 0, **dict.fromkeys(house.slower, 6)}
    cache.close()


def test_a_hit_in_a_slower_tier_is_promoted_to_every_faster_one(house: House, model: PaperModel) -> None:
    snapshot = model.snapshot(run(70))
    first = house.cache()
    first.publish(snapshot, MESSAGE)
    first.close()
    cache = house.cache()
    assert [found_in(cache, snapshot) for _ in range(2)] == [house.slower[0], "ram"]
    cache.close()


def test_what_only_the_slowest_tier_has_comes_back_to_all(three: House, model: PaperModel) -> None:
    snapshot = model.snapshot(run(70))
    other = House(three.folder / "another machine", three.slower, three.bucket)
    for machine in (three, other):
        cache = machine.cache()
        if machine is three:
            cache.publish(snapshot, MESSAGE)
        else:
            assert cache.stats().entries == {"ram": 0, "disk": 0, "far": 1}
            assert found_in(cache, snapshot) == "far"
            cache.flush()
            assert cache.stats().entries == {"ram": 1, "disk": 1, "far": 1}
        cache.close()


def test_a_restart_finds_what_survives_and_continues_its_conversations(house: House, model: PaperModel) -> None:
    cache = house.cache()
    conversations = [cache.publish(model.snapshot(run(n)), MESSAGE).conversation for n in (50, 100, 200)]
    cache.close()
    again = house.cache()
    assert again.stats().entries == {"ram": 0, **dict.fromkeys(house.slower, 3)}
    assert len(again.entries()) == 3, "one entry, however many tiers hold it"
    assert {entry.conversation for entry in again.entries()} == set(conversations)
    assert all(entry.inherited for entry in again.entries())
    for n in (200, 100, 50):
        assert found_in(again, model.snapshot(run(n))) == house.slower[0]
    assert again.continuations(run(95), 5)[0] == run(5, 95)
    again.close()


def test_every_budget_holds_and_what_is_left_loads(house: House, model: PaperModel) -> None:
    probe = house.cache()
    probe.publish(model.snapshot(run(50)), MESSAGE, "0" * 32)
    probe.close()
    size = max(probe.stats().bytes[name] for name in house.slower)
    house = House(house.folder / "real", house.slower)
    own = model.snapshot(run(50)).own_bytes
    cache = house.cache(ram=own + own // 2, slow=3 * size + size // 2)
    for i in range(10):
        cache.publish(model.snapshot(run(50, 100 * i)), MESSAGE, "0" * 32)
        cache.flush()
        stats = cache.stats()
        assert all(stats.bytes[name] <= stats.budgets[name] for name in ("ram", *house.slower)), stats
    kept = [i for i in range(10) if cache.known_length(run(50, 100 * i))]
    assert set(kept) >= {8, 9} and len(kept) < 10
    for i in kept:
        assert found_in(cache, model.snapshot(run(50, 100 * i)))
    assert any(key.startswith(house.slower[-1]) for key in cache.stats().evictions)
    cache.close()


def test_name_spaces_stay_apart_and_survive_a_restart_apart(house: House, model: PaperModel) -> None:
    owned = [replace(model.snapshot(run(70)), namespace=name) for name in ("", "alice", "bob")]
    cache = house.cache()
    for snapshot in owned:
        cache.publish(snapshot, MESSAGE)
    cache.publish(replace(model.snapshot(run(30)), namespace="alice"), MESSAGE)
    cache.close()
    again = house.cache()
    assert [found_in(again, snapshot) for snapshot in owned] == [house.slower[0]] * 3
    assert [again.known_length(run(40), name) for name in ("", "alice", "bob", "carol")] == [0, 30, 0, 0]
    again.close()


def test_a_quarantined_snapshot_never_comes_back(house: House, model: PaperModel) -> None:
    cache = house.cache()
    entry = cache.publish(model.snapshot(run(50)), MESSAGE)
    cache.publish(model.snapshot(run(30)), MESSAGE)
    cache.flush()
    cache.quarantine(entry, "logits differ from a cold run")
    late = cache.publish(model.snapshot(run(90)), MESSAGE)
    cache.quarantine(late, "while it is being saved")
    cache.close()
    assert set(house.bucket.quarantined.values()) <= {"logits differ from a cold run"}
    again = house.cache()
    assert again.known_length(run(200)) == 30
    again.close()


def test_an_altered_object_is_a_miss_that_is_not_tried_again(far: House, model: PaperModel) -> None:
    cache = far.cache(ram=0)
    for n in (50, 100):
        cache.publish(model.snapshot(run(n)), MESSAGE)
    cache.flush()
    id, data = max(far.bucket.objects.items(), key=lambda item: len(item[1]))
    far.bucket.objects[id] = data[:-1] + bytes([data[-1] ^ 1])
    found = cache.lookup(run(120))
    assert found.hit is not None
    assert (found.hit.position, found.miss) == (50, Miss.BAD_FILE)
    found.hit.release()
    assert far.bucket.quarantined == {id: "an object has been altered"}
    assert cache.lookup(run(120)).miss is not Miss.BAD_FILE
    assert (cache.stats().bad_files, cache.stats().evictions["far:bad_file"]) == (1, 1)
    cache.close()


def test_a_tier_that_does_not_answer_costs_a_miss_and_loses_nothing(far: House, model: PaperModel) -> None:
    def unreachable() -> None:
        raise TierUnavailable("no route to the bucket")

    cache, snapshot = far.cache(ram=0), model.snapshot(run(100))
    cache.publish(snapshot, MESSAGE)
    cache.flush()
    far.bucket.before_get = unreachable
    found = cache.lookup(run(120))
    assert (found.hit, found.miss) == (None, Miss.UNAVAILABLE)
    assert found.reason == "a longer snapshot lies in a tier that does not answer now"
    far.bucket.before_get = lambda: None
    assert found_in(cache, snapshot) == "far"
    assert not far.bucket.quarantined
    cache.close()


def test_where_one_tier_has_a_bad_copy_the_next_one_serves(three: House, model: PaperModel) -> None:
    snapshot = model.snapshot(run(100))
    cache = three.cache(ram=0)
    cache.publish(snapshot, MESSAGE)
    cache.flush()
    for path in (three.folder / FINGERPRINT[:16] / "objects").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert found_in(cache, snapshot) == "far"
    cache.flush()
    assert found_in(cache, snapshot) == "disk", "and what was bad is written anew"
    cache.close()


def test_a_slow_put_holds_up_neither_publishing_nor_lookups(far: House, model: PaperModel) -> None:
    gate = threading.Event()
    far.bucket.before_put = lambda: assert_waited(gate)
    cache = far.cache(ram=0)
    snapshots = [model.snapshot(run(50, 100 * i)) for i in range(3)]
    for snapshot in snapshots:
        cache.publish(snapshot, MESSAGE)
    assert cache.stats().bytes["ram"] == 0, "what leaves RAM is the tier's queue's"
    assert [found_in(cache, snapshot) for snapshot in snapshots] == ["ram"] * 3
    gate.set()
    cache.flush()
    assert [found_in(cache, snapshot) for snapshot in snapshots] == ["far"] * 3
    assert cache.stats().evictions["ram:to_far"] >= 3
    cache.close()


def test_a_slow_get_is_left_to_a_loader_and_what_it_reads_is_no_victim(far: House, model: PaperModel) -> None:
    asked, gate = threading.Event(), threading.Event()
    slow, quick = model.snapshot(run(50)), model.snapshot(run(50, 500))
    cache = far.cache(ram=quick.own_bytes)
    cache.publish(slow, MESSAGE)
    cache.flush()
    cache.publish(quick, MESSAGE)
    cache.flush()

    def wait_at_the_gate() -> None:
        asked.set()
        assert_waited(gate)

    far.bucket.before_get = wait_at_the_gate
    assert cache.lookup_in_ram(slow.tokens) is None
    with ThreadPoolExecutor(1) as loader:
        loading = loader.submit(found_in, cache, slow)
        assert asked.wait(30)
        at_once = cache.lookup_in_ram(quick.tokens)
        assert at_once is not None and at_once.hit is not None and at_once.hit.tier == "ram"
        at_once.hit.release()
        cache._moves.room_of(cache.tiers[1]).own(PLENTY)  # everything that may be evicted is
        gate.set()
        assert loading.result(30) == "far"
    cache.close()


def assert_waited(gate: threading.Event) -> None:
    assert gate.wait(30)


def test_a_save_that_the_tier_refuses_leaves_ram_at_work(far: House, model: PaperModel) -> None:
    snapshot = model.snapshot(run(50))
    cache = far.cache(slow=10)
    cache.publish(snapshot, MESSAGE)
    cache.flush()
    assert found_in(cache, snapshot) == "ram"
    assert cache.stats().refused_saves == {"budget": 1}
    assert cache.stats().entries == {"ram": 1, "far": 0}
    cache.close()


def test_counts_and_metrics_name_every_tier(three: House, model: PaperModel) -> None:
    snapshot = model.snapshot(run(70))
    first = three.cache()
    first.publish(snapshot, MESSAGE)
    first.close()
    other = House(three.folder / "another machine", three.slower, three.bucket)
    cache = other.cache()
    assert found_in(cache, snapshot) == "far"
    cache.flush()
    stats = cache.stats()
    assert (stats.hits, stats.restored) == ({"far": 1}, {"far": 70})
    assert stats.states == {"ram": "ok", "disk": "ok", "far": "ok"}
    assert cache.by_tier(70, "far") == {"ram": 0, "disk": 0, "far": 70}
    page = Metrics(status_of(stats)).page().decode()  # type: ignore[arg-type]
    for line in (
        'rekindle_cache_hits_total{tier="far"} 1.0',
        'rekindle_cache_restored_tokens_total{tier="far"} 70.0',
        'rekindle_cache_snapshots{tier="far"} 1.0',
        'rekindle_cache_snapshots{tier="disk"} 1.0',
        'rekindle_cache_budget_bytes{tier="far"} 1.073741824e+09',
    ):
        assert line in page
    cache.close()


def status_of(stats: Any) -> Any:
    """A host whose engines have done nothing."""
    idle = ("running", "waiting", "slots", "audits", "audit_mismatches")
    tokens = ("computed_tokens", "restored_tokens", "generated_tokens")
    zeros = dict.fromkeys((*idle, *tokens), 0)
    status = SimpleNamespace(pages=SimpleNamespace(total=0, free=0), work={}, cache=stats, **zeros)
    return SimpleNamespace(status=lambda: status, statuses=dict, slots=(), waiting=0)


def test_many_threads_publish_and_look_up_over_every_tier(house: House, model: PaperModel) -> None:
    cache = house.cache(ram=3 * model.snapshot(run(50)).own_bytes)
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
    cache.close()
    assert not faults
    assert all(entry.pins == 0 and not entry.adding for entry in cache.entries())
    assert all(copy.leaving is None for entry in cache.entries() for copy in entry.copies.values())


def test_an_engine_answers_from_the_bucket_after_a_restart_as_from_a_cold_run(make_tiny: Any, far: House) -> None:
    tokens = tuple(range(150))
    answers, reports = [], []
    for _ in range(2):
        engine = Engine(
            Pipeline([make_tiny("dense").stage(slots=1)]), far.cache(), EngineSettings(context=512, grid=64)
        ).start()
        events: queue.Queue[Event] = queue.Queue()
        engine.submit(Request("one", Prompt(tokens), Sampling(temperature=0), 8, frozenset(), events.put))
        seen = list(until_the_end(events))
        engine.stop()
        answers.append([event.token for event in seen if isinstance(event, Token)])
        reports.append(seen[-1].cache)
    assert answers[0] == answers[1] and len(answers[0]) == 8
    assert [report.restored_from for report in reports] == [{"ram": 0, "far": 0}, {"ram": 0, "far": 150}]


def test_a_request_is_answered_while_the_tier_that_holds_its_prefix_does_not_answer(make_tiny: Any, far: House) -> None:
    def unreachable() -> None:
        raise TierUnavailable("no route to the bucket")

    answers = []
    for hook in (lambda: None, unreachable):
        far.bucket.before_get = hook
        stage = make_tiny("dense").stage(slots=1)
        engine = Engine(Pipeline([stage]), far.cache(ram=0), EngineSettings(context=512, grid=64)).start()
        events: queue.Queue[Event] = queue.Queue()
        engine.submit(Request("one", Prompt(tuple(range(150))), Sampling(temperature=0), 8, frozenset(), events.put))
        seen = list(until_the_end(events))
        answers.append([event.token for event in seen if isinstance(event, Token)])
        far.bucket.before_get = lambda: None
        engine.stop()
    assert answers[0] == answers[1] and len(answers[0]) == 8
    assert (seen[-1].cache.computed, seen[-1].cache.miss) == (
        150,
        "a longer snapshot lies in a tier that does not answer now",
    )


def until_the_end(events: queue.Queue[Event]) -> Iterator[Any]:
    while True:
        event = events.get(timeout=60)
        yield event
        if isinstance(event, Finished | Failed):
            return

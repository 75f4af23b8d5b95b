from __future__ import annotations

from dataclasses import replace

import pytest
from support.paper_snapshots import PaperModel

from rekindle.prefix import PrefixCache, check_budgets, local_tiers, retention
from rekindle.prefix.retention import FRESH_CONVERSATIONS, PATIENCE
from rekindle.prefix.types import Entry
from rekindle.prompt import BoundaryKind

MESSAGE, SYSTEM, LATTICE = BoundaryKind.MESSAGE, BoundaryKind.SYSTEM, BoundaryKind.LATTICE
MODEL = PaperModel(attention=())  # no pages: every snapshot of a length weighs the same
ONE = MODEL.snapshot([0] * 20).own_bytes


def cache_for(snapshots: int) -> PrefixCache:
    return PrefixCache(local_tiers(snapshots * ONE + ONE // 2))


class Desk:
    """Publishes under short names: a name's tokens are those of its parent and its own."""

    def __init__(self, room: int) -> None:
        self.cache = cache_for(room)
        self.tokens: dict[str, list[int]] = {"": []}

    def publish(
        self,
        name: str,
        under: str = "",
        kind: BoundaryKind = MESSAGE,
        conversation: str | None = None,
        namespace: str = "",
    ) -> Entry:
        self.tokens[name] = [*self.tokens[under], *(hash((name, i)) % 10**6 for i in range(3))]
        snapshot = replace(MODEL.snapshot(self.tokens[name]), namespace=namespace)
        return self.cache.publish(snapshot, kind, conversation or name)

    def use(self, name: str, namespace: str = "") -> None:
        hit = self.cache.lookup(self.tokens[name], namespace=namespace).hit
        assert hit is not None, f"{name} is gone"
        hit.release()

    def there(self, *names: str, namespace: str = "") -> list[str]:
        lengths = {name: self.cache.known_length(self.tokens[name], namespace) for name in names}
        return [name for name in names if lengths[name] == len(self.tokens[name])]

    def retire_all(self) -> None:
        """Make every conversation so far an old one."""
        for _ in range(PATIENCE + 1):
            self.cache.lookup([10**7])


def test_leaves_go_before_the_ancestor_they_share() -> None:
    desk = Desk(room=3)
    desk.publish("root")
    for name in ("a", "b"):
        desk.publish(name, "root")
    desk.retire_all()
    desk.publish("c", "root")
    assert desk.there("root", "a", "b", "c") == ["root", "b", "c"]
    desk.publish("d", "root")
    assert desk.there("root", "b", "c", "d") == ["root", "c", "d"]


def test_an_ancestor_that_becomes_a_leaf_is_as_old_as_its_last_use() -> None:
    desk = Desk(room=3)
    desk.publish("old")
    desk.publish("old leaf", "old")
    desk.publish("young")
    desk.retire_all()
    desk.use("young")
    desk.retire_all()
    desk.publish("x")
    assert desk.there("old", "old leaf", "young", "x") == ["old", "young", "x"]
    desk.publish("y")
    assert desk.there("old", "young", "x", "y") == ["young", "x", "y"]


def test_old_lattice_points_go_first() -> None:
    desk = Desk(room=4)
    desk.publish("lattice 1", kind=LATTICE)
    desk.publish("lattice 2", "lattice 1", kind=LATTICE)
    desk.publish("end", "lattice 2")
    desk.publish("leaf")
    desk.retire_all()
    for name in ("lattice 2", "lattice 1"):
        desk.use(name)
    desk.retire_all()
    desk.publish("new")
    assert desk.there("lattice 1", "lattice 2", "end", "leaf", "new") == ["lattice 1", "end", "leaf", "new"]


def test_a_conversation_in_use_advances_in_a_small_tier() -> None:
    desk = Desk(room=4)
    desk.publish("turn 0", conversation="main")
    for turn in range(1, 30):
        desk.use(f"turn {turn - 1}")
        desk.publish(f"turn {turn}", f"turn {turn - 1}", conversation="main")
    assert desk.there("turn 27", "turn 28", "turn 29") == ["turn 27", "turn 28", "turn 29"]


def test_side_calls_evict_neither_the_conversation_nor_its_system_prompt() -> None:
    desk = Desk(room=8)
    desk.publish("system", kind=SYSTEM)
    desk.publish("turn 0", "system", conversation="main")
    desk.use("turn 0")
    desk.publish("turn 1", "turn 0", conversation="main")
    for i in range(50):  # titles and subagents, each with a system prompt of its own
        desk.publish(f"side system {i}", kind=SYSTEM, conversation=f"side {i}")
        desk.publish(f"side {i}", f"side system {i}", conversation=f"side {i}")
    assert desk.there("system", "turn 0", "turn 1") == ["system", "turn 0", "turn 1"]


def test_a_quiet_conversation_does_not_keep_new_ones_out_for_ever() -> None:
    desk = Desk(room=2)
    desk.publish("old 0", conversation="old")
    desk.use("old 0")
    desk.publish("old 1", "old 0", conversation="old")
    desk.retire_all()
    desk.publish("new 0")
    desk.publish("new 1", "new 0", conversation="new 0")
    assert desk.there("new 0", "new 1") == ["new 0", "new 1"]


def test_without_a_name_a_snapshot_belongs_to_the_conversation_it_continues() -> None:
    cache = cache_for(10)
    first = cache.publish(MODEL.snapshot([1, 2]), MESSAGE)
    second = cache.publish(MODEL.snapshot([1, 2, 3]), MESSAGE)
    other = cache.publish(MODEL.snapshot([7]), MESSAGE)
    assert first.conversation == second.conversation != other.conversation


def test_what_is_pinned_is_never_the_victim() -> None:
    desk = Desk(room=2)
    pinned = desk.publish("pinned")
    desk.publish("b")
    hit = desk.cache.lookup(desk.tokens["pinned"]).hit
    assert hit is not None and hit.entry is pinned
    for i in range(FRESH_CONVERSATIONS + 5):
        desk.publish(f"x{i}")
    assert desk.there("pinned") == ["pinned"]
    hit.release()
    desk.retire_all()
    desk.publish("y")
    desk.publish("z")
    desk.publish("w")
    assert desk.there("pinned") == [], "once released it is as mortal as any"


def test_all_pinned_means_over_budget_and_not_a_loop() -> None:
    desk = Desk(room=1)
    desk.publish("a")
    hits = [desk.cache.lookup(desk.tokens["a"]).hit for _ in range(2)]
    assert all(hits)
    desk.publish("b")
    assert desk.there("a", "b") == ["a"], "the newcomer had to go"
    for hit in hits:
        assert hit is not None
        hit.release()


@pytest.mark.parametrize("shape", ["flat", "chain"])
def test_the_cost_of_an_eviction_does_not_grow_with_the_number_of_snapshots(shape: str) -> None:
    def worst(population: int) -> float:
        cache = cache_for(population)
        tokens: list[int] = []
        for i in range(population):
            tokens = [*tokens, i] if shape == "chain" else [i]
            cache.publish(MODEL.snapshot(tokens[-1:] if shape == "flat" else tokens), MESSAGE)
        retention = cache._catalogue.retention["ram"]
        before = retention.steps
        rounds = 200
        for i in range(rounds):
            cache.publish(MODEL.snapshot([10**6 + i]), MESSAGE)
        assert sum(cache.stats().evictions.values()) > rounds / 2
        return (retention.steps - before) / rounds

    small, large = worst(50), worst(700)
    assert large <= small + 3, f"{small} steps an eviction among 50, {large} among 700"


def test_a_budget_smaller_than_one_snapshot_is_said_at_the_start() -> None:
    assert check_budgets(100, {"ram": 10_000}) == []
    assert check_budgets(100, {"ram": 10_000, "disk": 10_000}) == []
    assert check_budgets(100, {"ram": 0, "disk": 0}) == []  # nothing is to be kept
    [ram] = check_budgets(100, {"ram": 99, "disk": 10_000})
    assert "ram" in ram
    assert "smaller than one snapshot" in ram
    [disk] = check_budgets(100, {"ram": 10_000, "disk": 300})
    assert "disk" in disk


# What clients asked to keep


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, in its only entry."""
    time = [1000.0]
    monkeypatch.setattr(retention, "now", lambda: time[0])
    return time


def test_what_is_kept_goes_after_all_others_until_its_time_is_over(clock: list[float]) -> None:
    desk = Desk(room=4)
    desk.publish("kept")
    assert desk.cache.keep(desk.tokens["kept"], 300)
    for name in "abcd":
        desk.publish(name)
    desk.retire_all()
    assert desk.there("kept", "d") == ["kept", "d"], "it is the oldest, and is there"
    clock[0] += 301
    desk.publish("e")
    assert desk.there("kept", "b", "c", "d", "e") == ["b", "c", "d", "e"]


def test_keeping_again_makes_it_longer_and_never_shorter(clock: list[float]) -> None:
    desk = Desk(room=2)
    desk.publish("kept")
    desk.cache.keep(desk.tokens["kept"], 3600)
    desk.cache.keep(desk.tokens["kept"], 300)
    clock[0] += 3000
    for name in "abc":
        desk.publish(name)
    assert desk.there("kept") == ["kept"]


def test_what_is_kept_holds_half_of_a_tier_at_most(clock: list[float]) -> None:
    desk = Desk(room=4)
    desk.publish("mine")
    desk.use("mine")
    for i, name in enumerate("abcdef"):
        desk.publish(name)
        desk.cache.keep(desk.tokens[name], 300 + i)
    assert desk.there("mine", *"abcdef")[0] == "mine", "somebody else's, who asked for nothing"
    assert desk.there(*"ef") == ["e", "f"], "of the kept ones, those that are kept longest"


def test_a_client_that_marks_everything_pushes_out_its_own_marks(clock: list[float]) -> None:
    desk = Desk(room=6)
    desk.publish("hers", namespace="alice")
    desk.cache.keep(desk.tokens["hers"], 300, "alice")
    for name in "abcdefghij":
        desk.publish(name, namespace="bob")
        desk.cache.keep(desk.tokens[name], 3600, "bob")
    assert desk.there("hers", namespace="alice"), "hers is over first, and his are many"
    assert desk.there(*"abcdefghij", namespace="bob") == [*"fghij"]


def test_a_client_of_many_system_prompts_pushes_out_its_own() -> None:
    desk = Desk(room=8)
    desk.publish("hers", kind=SYSTEM, namespace="alice")
    for name in "abcdefghij":
        desk.publish(name, kind=SYSTEM, namespace="bob")
        if desk.there(name, namespace="bob"):
            desk.use(name, "bob")
    assert desk.there("hers", namespace="alice"), "the one that was never hit, and the oldest"
    assert len(desk.there(*"abcdefghij", namespace="bob")) < 8


def test_nothing_is_kept_that_is_not_there() -> None:
    desk = Desk(room=2)
    desk.publish("a")
    assert not desk.cache.keep([1, 2, 3], 300)
    assert not desk.cache.keep(desk.tokens["a"], 300, "another name space")

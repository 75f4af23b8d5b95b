from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rekindle.prefix.index import PrefixIndex
from rekindle.prefix.types import Entry, Node
from rekindle.prompt import BoundaryKind, common_length

TIERS = ("ram", "disk", "far")

# Two token ids and short runs: shared prefixes, splits and joins happen all the time.
runs = st.lists(st.integers(0, 1), min_size=1, max_size=9)


def ids(tokens: list[int]) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int32)


def entry_of(tokens: list[int]) -> Entry:
    return Entry(len(tokens), BoundaryKind.MESSAGE, "c", 0, has_logits=True)


@given(runs, runs)
def test_common_length_is_the_length_of_the_shared_beginning(a: list[int], b: list[int]) -> None:
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_length(ids(a), ids(b)) == expected


class IndexAgainstALongList(RuleBasedStateMachine):
    """The model: a dictionary of everything published, searched from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(TIERS)
        self.published: dict[tuple[str, tuple[int, ...]], Entry] = {}

    @rule(tokens=runs, tier=st.sampled_from(TIERS))
    def publish(self, tokens: list[int], tier: str) -> None:
        key = tuple(tokens)
        if (tier, key) in self.published:
            return
        other = next((e for (t, k), e in self.published.items() if k == key), None)
        entry = other or entry_of(tokens)
        leaf_before = self._leaves(tier)
        changed = self.index.publish(ids(tokens), entry, tier, str(key))
        self.published[tier, key] = entry
        assert {changed} - {None} == leaf_before - self._leaves(tier), "who is no leaf any more is reported"

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        if not self.published:
            return
        tier, key = data.draw(st.sampled_from(sorted(self.published)))
        leaf_before = self._leaves(tier)
        entry = self.published.pop((tier, key))
        changed = self.index.evict(entry, tier)
        assert {changed} - {None} == self._leaves(tier) - leaf_before, "who has become a leaf is reported"

    @rule(prompt=runs, longest=st.integers(1, 9))
    def go_on(self, prompt: list[int], longest: int) -> None:
        keys = [[k for t, k in self.published if t == tier and k[: len(prompt)] == tuple(prompt)] for tier in TIERS]
        rests = [k[len(prompt) : len(prompt) + longest] for of_tier in keys for k in of_tier if len(k) > len(prompt)]
        found = {tuple(run.tolist()) for run in self.index.below(ids(prompt), longest, count=1000)}
        assert found <= set(rests), "only what was published behind exactly these tokens"
        for rest in rests:
            assert any(run[: len(rest)] == rest for run in found), "and all of it"

    @rule(prompt=runs)
    def look_up(self, prompt: list[int]) -> None:
        walk = self.index.walk(ids(prompt))
        keys = {key for _, key in self.published}
        prefixes = {key for key in keys if tuple(prompt[: len(key)]) == key}
        assert [c.position for c in walk.candidates] == sorted(map(len, prefixes), reverse=True)
        assert all(len(key) <= len(prompt) for key in prefixes)
        depth = max((common_length(ids(prompt), ids(list(key))) for key in keys), default=0)
        assert walk.depth == depth
        seen = {key[depth] for key in keys if key[:depth] == tuple(prompt[:depth]) and len(key) > depth}
        assert walk.seen in (seen or {None})

    @invariant()
    def the_trees_are_tight(self) -> None:
        for tier in TIERS:
            found = {entry for entry in self.index.entries() if tier in entry.copies}
            assert found == {e for (t, _), e in self.published.items() if t == tier}
            assert self.index.counts[tier] == sum(t == tier for t, _ in self.published)
            self._check(self.index.trees("")[tier].root, is_root=True)

    def _check(self, node: Node, is_root: bool) -> None:
        assert is_root or node.entry is not None or len(node.children) > 1, "a node that serves nobody"
        for first, child in node.children.items():
            assert child.parent is node
            assert child.edge[0] == first
            assert child.depth == node.depth + len(child.edge)
            self._check(child, is_root=False)

    def _leaves(self, tier: str) -> set[Entry]:
        keys = [(k, e) for (t, k), e in self.published.items() if t == tier]
        return {e for k, e in keys if not any(len(o) > len(k) and o[: len(k)] == k for o, _ in keys)}


IndexAgainstALongList.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndexAgainstALongList = IndexAgainstALongList.TestCase


def test_an_example_to_check_by_eye() -> None:
    index = PrefixIndex(TIERS)
    for tokens in ([1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 9]):
        index.publish(ids(tokens), entry_of(tokens), "ram", "0")
    walk = index.walk(ids([1, 2, 3, 4, 6]))
    assert [c.position for c in walk.candidates] == [3]
    assert (walk.depth, walk.seen) == (4, 5)  # ours is 6


def test_the_cost_of_a_lookup_does_not_grow_with_the_number_of_snapshots() -> None:
    def steps(population: int) -> int:
        index, random = PrefixIndex(TIERS), np.random.default_rng(1)
        mine = random.integers(0, 1000, 600).astype(np.int32)
        for n in (100, 300, 500):
            index.publish(mine[:n], entry_of(mine[:n].tolist()), "ram", "0")
        for _ in range(population):
            other = random.integers(1000, 2000, 40).astype(np.int32)
            index.publish(other, entry_of(other.tolist()), "ram", "0")
        before = index.steps
        index.walk(mine)
        index.publish(mine[:550], entry_of(mine[:550].tolist()), "ram", "0")
        return index.steps - before

    assert steps(10) == steps(2000)

"""Radix trees over token ids: the longest published prefix of a prompt, in time that depends on the prompt only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rekindle.prefix.types import Copy, Entry, Node
from rekindle.prompt import common_length


@dataclass(frozen=True, slots=True)
class Path:
    """How far a prompt goes down one tree."""

    entries: tuple[Entry, ...]  # published prefixes of the prompt, shortest first
    depth: int  # where the prompt leaves the tree
    seen: int | None  # the token the tree has there


@dataclass(frozen=True, slots=True)
class Walk:
    """What the trees of all tiers know of a prompt."""

    candidates: tuple[Entry, ...]  # longest first, each once
    depth: int
    seen: int | None


class Radix:
    """The tree of one tier. Inner nodes hold an entry or part at least two ways; so removing stays local."""

    def __init__(self) -> None:
        self.root = Node(np.empty(0, dtype=np.int32), None, 0)
        self.steps = 0  # nodes visited, ever; what the cost laws count

    def walk(self, tokens: np.ndarray) -> Path:
        entries: list[Entry] = []
        node = self.root
        while True:
            self.steps += 1
            if node.entry is not None:
                entries.append(node.entry)
            child = node.children.get(int(tokens[node.depth])) if node.depth < len(tokens) else None
            if child is None:
                # At a fork any branch is something the tree has seen; the newest says most.
                return Path(tuple(entries), node.depth, next(reversed(node.children), None))
            shared = common_length(child.edge, tokens[node.depth :])
            if shared < len(child.edge):
                return Path(tuple(entries), node.depth + shared, int(child.edge[shared]))
            node = child

    def below(self, tokens: np.ndarray, longest: int, count: int) -> list[np.ndarray]:
        """Runs of at most `longest` tokens that follow exactly these in the tree; `count` of them, newest first."""
        node, inside = self.root, 0  # tokens end `inside` tokens before the end of the node's edge
        while node.depth < len(tokens):
            self.steps += 1
            child = node.children.get(int(tokens[node.depth]))
            if child is None:
                return []
            shared = common_length(child.edge, tokens[node.depth :])
            inside = len(child.edge) - shared
            if inside and node.depth + shared < len(tokens):
                return []
            node = child
        runs: list[np.ndarray] = []
        open_runs = [(node, node.edge[len(node.edge) - inside :])]
        while open_runs and len(runs) < count:
            self.steps += 1
            node, run = open_runs.pop()
            if len(run) >= longest or not node.children:
                runs += [run[:longest]] if len(run) else []
            else:
                open_runs += ((child, np.concatenate([run, child.edge])) for child in node.children.values())
        return runs

    def insert(self, tokens: np.ndarray) -> Node:
        """The node that ends exactly at `tokens`, made if need be."""
        node = self.root
        while node.depth < len(tokens):
            self.steps += 1
            rest = tokens[node.depth :]
            child = node.children.get(int(rest[0]))
            if child is None:
                return self._attach(node, rest)
            shared = common_length(child.edge, rest)
            node = child if shared == len(child.edge) else self._split(child, shared)
        return node

    def remove(self, node: Node) -> None:
        """Take the entry off a node and the node out of the tree if it no longer serves."""
        self.steps += 1
        node.entry = None
        if node.children:
            self._join(node)
            return
        assert node.parent is not None, "the root holds no entry"
        del node.parent.children[int(node.edge[0])]
        self._join(node.parent)

    def _attach(self, parent: Node, edge: np.ndarray) -> Node:
        # A copy: a view would keep the tokens of an evicted snapshot alive.
        child = Node(edge.copy(), parent, parent.depth + len(edge))
        parent.children[int(edge[0])] = child
        return child

    def _split(self, child: Node, shared: int) -> Node:
        """Put a node inside the edge of `child`, which stays the same object below it."""
        parent = child.parent
        assert parent is not None, "the root has no edge to split"
        middle = Node(child.edge[:shared], parent, parent.depth + shared)
        parent.children[int(child.edge[0])] = middle
        child.edge = child.edge[shared:]
        child.parent = middle
        middle.children[int(child.edge[0])] = child
        return middle

    def _join(self, node: Node) -> None:
        """Undo a split that no longer serves: one child, no entry."""
        if node.parent is None or node.entry is not None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        child.edge = np.concatenate([node.edge, child.edge])
        child.parent = node.parent
        node.parent.children[int(node.edge[0])] = child


class PrefixIndex:
    """A tree per tier and name space. A walk meets nothing of another name space, so neither what it finds nor how long
    it takes tells of one. Not locked: the cache that owns it is."""

    def __init__(self, tiers: Sequence[str]) -> None:
        """tiers: their names, the fastest first."""
        self._tiers = tuple(tiers)
        self._spaces: dict[str, dict[str, Radix]] = {}
        self.counts = dict.fromkeys(self._tiers, 0)

    def trees(self, namespace: str) -> dict[str, Radix]:
        """The trees of one name space by tier, empty ones where nothing was published in it."""
        return self._spaces.get(namespace) or {tier: Radix() for tier in self._tiers}

    @property
    def steps(self) -> int:
        return sum(tree.steps for trees in self._spaces.values() for tree in trees.values())

    def walk(self, tokens: np.ndarray, namespace: str = "") -> Walk:
        """Every published prefix of the prompt, in any tier, and where the prompt leaves all trees."""
        paths = [tree.walk(tokens) for tree in self.trees(namespace).values()]
        entries = sorted((entry for path in paths for entry in path.entries), key=lambda entry: -entry.position)
        depth = max(path.depth for path in paths)
        seen = (path.seen for path in paths if path.depth == depth and path.seen is not None)
        return Walk(tuple(dict.fromkeys(entries)), depth, next(seen, None))

    def below(self, tokens: np.ndarray, longest: int, count: int, namespace: str = "") -> list[np.ndarray]:
        """What any tree has after exactly these tokens; a faster tier's first, since it is newer or the same."""
        trees = self.trees(namespace).values()
        return [run for tree in trees for run in tree.below(tokens, longest, count)][:count]

    def find(self, tokens: np.ndarray, namespace: str = "") -> Entry | None:
        """The entry published under exactly these tokens."""
        found = self.walk(tokens, namespace).candidates[:1]
        return found[0] if found and found[0].position == len(tokens) else None

    def publish(self, tokens: np.ndarray, entry: Entry, tier: str, id: str) -> Entry | None:
        """Hang an entry into a tier's tree; returns the entry that is no leaf any more, if there is one."""
        assert len(tokens) == entry.position > 0, f"a key of {len(tokens)} tokens, a state at {entry.position}"
        assert tier not in entry.copies, "an entry hangs in a tree once"
        node = self._spaces.setdefault(entry.namespace, self.trees(entry.namespace))[tier].insert(tokens)
        assert node.entry is None, "one entry per prefix"
        node.entry = entry
        entry.copies[tier] = Copy(id, node)
        self.counts[tier] += 1
        parent = node.parent
        first_child = parent is not None and len(parent.children) == 1 and not node.children
        return parent.entry if parent is not None and first_child else None

    def evict(self, entry: Entry, tier: str) -> Entry | None:
        """Take an entry out of a tier's tree; returns the entry that has become a leaf, if one has."""
        assert tier in entry.copies, "only what is published can be evicted"
        node = entry.copies.pop(tier).node
        parent = node.parent
        self.trees(entry.namespace)[tier].remove(node)
        self.counts[tier] -= 1
        return parent.entry if parent is not None and not parent.children else None

    def entries(self) -> set[Entry]:
        """Every entry of every tier; for stopping and tests, never per request."""
        found = set()
        nodes = [tree.root for trees in self._spaces.values() for tree in trees.values()]
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            if node.entry is not None:
                found.add(node.entry)
        return found

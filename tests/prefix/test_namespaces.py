"""Name spaces: what one client published, no other finds: in RAM, on disk, after a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paper_snapshots import FINGERPRINT, PaperModel, same

from rekindle.prefix import Miss, PrefixCache, local_tiers
from rekindle.prompt import BoundaryKind
from rekindle.snapshots import manifest, tools
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.manifest import key_of
from rekindle.snapshots.types import Snapshot

PLENTY = 1 << 30
TOKENS = list(range(200))


def of(namespace: str, tokens: list[int] = TOKENS) -> Snapshot:
    return replace(PaperModel().snapshot(tokens), namespace=namespace)


@pytest.mark.parametrize("stranger", ["", "bob", "alic", "alice2"])
def test_a_lookup_in_another_name_space_finds_nothing_and_learns_nothing(stranger: str) -> None:
    cache = PrefixCache(local_tiers(PLENTY))
    cache.publish(of("alice"), BoundaryKind.MESSAGE)
    found = cache.lookup([*TOKENS, 7], namespace=stranger)
    assert (found.hit, found.divergence, found.seen, found.miss) == (None, 0, None, Miss.EMPTY)
    assert cache.known_length(TOKENS, stranger) == 0
    assert cache.continuations(TOKENS[:50], 10, stranger) == []
    assert cache.wants(TOKENS, BoundaryKind.MESSAGE, namespace=stranger)
    ours = cache.lookup([*TOKENS, 7], namespace="alice").hit
    assert ours is not None and ours.position == 200


def test_the_same_tokens_in_two_name_spaces_are_two_entries_and_go_one_by_one() -> None:
    cache = PrefixCache(local_tiers(PLENTY))
    entries = {name: cache.publish(of(name), BoundaryKind.MESSAGE) for name in ("", "alice", "bob")}
    assert len(cache.entries()) == 3
    cache.quarantine(entries["alice"], "a test")
    assert [cache.known_length(TOKENS, name) for name in ("", "alice", "bob")] == [200, 0, 200]


def test_name_spaces_survive_a_restart_apart(tmp_path: Path) -> None:
    cache = PrefixCache(local_tiers(PLENTY, DiskStore(tmp_path, FINGERPRINT, PLENTY)))
    for name in ("", "alice", "bob"):
        cache.publish(of(name), BoundaryKind.MESSAGE)
    cache.publish(of("alice", TOKENS[:100]), BoundaryKind.MESSAGE)
    cache.close()
    again = PrefixCache(local_tiers(PLENTY, DiskStore(tmp_path, FINGERPRINT, PLENTY)))
    for name, length in (("", 200), ("alice", 200), ("bob", 200), ("carol", 0)):
        assert again.known_length(TOKENS, name) == length
        hit = again.lookup(TOKENS, namespace=name).hit
        assert (hit.position if hit else 0) == length
        if hit is not None:
            assert hit.snapshot.namespace == name
            assert same(hit.snapshot, of(name))
            hit.release()
    assert again.known_length(TOKENS[:100], "bob") == 0
    again.close()
    assert all(finding.fault is None for finding in tools.verify_snapshots(tmp_path))
    assert sorted(info.namespace for info in tools.list_snapshots(tmp_path)) == ["", "alice", "alice", "bob"]


def test_an_export_holds_one_name_space_and_comes_back_into_it(tmp_path: Path) -> None:
    cache = PrefixCache(local_tiers(PLENTY, DiskStore(tmp_path / "a", FINGERPRINT, PLENTY)))
    for name in ("alice", "bob"):
        cache.publish(of(name, TOKENS[:100]), BoundaryKind.MESSAGE)
        cache.publish(of(name), BoundaryKind.MESSAGE)
    cache.close()
    wanted = next(i for i in tools.list_snapshots(tmp_path / "a") if i.namespace == "bob" and i.position == 200)
    assert len(tools.export_chain(tmp_path / "a", wanted.id, tmp_path / "bob.tar")) == 2
    tools.import_chain(tmp_path / "b", tmp_path / "bob.tar")
    assert {info.namespace for info in tools.list_snapshots(tmp_path / "b")} == {"bob"}


def test_the_common_name_space_writes_the_manifests_it_always_wrote(tmp_path: Path) -> None:
    """Cache directories of earlier versions are still read, and theirs of ours."""
    store = DiskStore(tmp_path, FINGERPRINT, PLENTY)
    record = store.save(of(""))
    text = (store.folder / "manifests" / f"{record.id}.json").read_bytes()
    assert b"namespace" not in text
    assert manifest.decode(text, FINGERPRINT, record.id).whose == ""
    assert record.id == key_of(FINGERPRINT, np.asarray(TOKENS, dtype=np.int32))
    store.close()


def test_a_manifest_that_claims_another_name_space_than_its_id_is_set_aside(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, FINGERPRINT, PLENTY)
    record = store.save(of("alice"))
    store.close()
    path = store.folder / "manifests" / f"{record.id}.json"
    listed = manifest.decode(path.read_bytes(), FINGERPRINT, record.id)
    path.write_bytes(manifest.encode(msgspec.structs.replace(listed, namespace="bob")))
    again = PrefixCache(local_tiers(PLENTY, DiskStore(tmp_path, FINGERPRINT, PLENTY)))
    assert [again.known_length(TOKENS, name) for name in ("", "alice", "bob")] == [0, 0, 0]
    again.close()


@settings(deadline=None)
@given(st.lists(st.tuples(st.text("ab", max_size=2), st.integers(0, 3), st.integers(1, 90)), max_size=12))
def test_each_name_space_is_what_it_would_be_alone(published: list[tuple[str, int, int]]) -> None:
    together, alone = (
        PrefixCache(local_tiers(PLENTY)),
        {name: PrefixCache(local_tiers(PLENTY)) for name, _, _ in published},
    )
    for name, start, length in published:
        tokens = list(range(start, start + length))
        together.publish(of(name, tokens), BoundaryKind.MESSAGE)
        alone[name].publish(of("", tokens), BoundaryKind.MESSAGE)
    for name, cache in alone.items():
        for start in range(4):
            prompt = list(range(start, start + 100))
            ours, theirs = together.lookup(prompt, namespace=name), cache.lookup(prompt)
            assert (ours.reached, ours.divergence, ours.seen, ours.miss) == (
                theirs.reached,
                theirs.divergence,
                theirs.seen,
                theirs.miss,
            )

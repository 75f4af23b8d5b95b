"""Prompts that part in the middle of a message: little is computed twice, and no bit is another."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
from support.snapshot_lab import Answer, Lab, RecordingCache, random_tokens, same_bits, wait_until

from rekindle.engine.engine import Engine
from rekindle.prompt import Boundary, BoundaryKind, Prompt
from rekindle.snapshots.types import Snapshot
from rekindle.spec import SnapshotBytes

SIZES = SnapshotBytes(state=1, page=1)  # as many points as there may be
SHARED = random_tokens(1000, seed=1)


@pytest.fixture(scope="module")
def lab(make_tiny: Any) -> Lab:
    return Lab(make_tiny("moe"))


@pytest.fixture
def engine(lab: Lab) -> Iterator[Engine]:
    engine = lab.engine(sizes=SIZES)
    yield engine
    engine.stop()


def seen(engine: Engine) -> dict[int, Snapshot]:
    """Published so far, by position."""
    assert isinstance(engine.prefixes, RecordingCache)
    return {snapshot.position: snapshot for snapshot in engine.prefixes.seen}


def raw(*parts: tuple[int, ...]) -> Prompt:
    """Without any boundary of its own, as a completion's text."""
    return Prompt(tuple(chain(*parts)))


def test_three_prompts_that_part_behind_a_long_prefix_compute_it_about_once(engine: Engine) -> None:
    questions = [random_tokens(60, seed) for seed in (2, 3, 4)]
    told = [Answer(engine, raw(SHARED, SHARED[:500], question)).finished.cache for question in questions]
    assert told[0].computed == 1560
    assert told[1].restored == 1280, "the last point before they part"
    assert told[2].restored == 1500, "the branch was seen once, and has a snapshot of its own"
    new = 1560 + 60 + 60
    assert sum(each.computed for each in told) <= 1.15 * new


def test_a_change_in_the_middle_of_a_message_costs_the_way_from_the_last_point(engine: Engine) -> None:
    boundaries = (Boundary(1000, BoundaryKind.SYSTEM),)
    for stamp in (2, 3):
        tokens = (*SHARED[:500], stamp, *SHARED[501:], *random_tokens(30, stamp))
        told = Answer(engine, Prompt(tokens, boundaries)).finished.cache
    assert (told.restored, told.computed) == (256, 1030 - 256)


def test_points_change_no_bit_and_no_edge(lab: Lab, engine: Engine) -> None:
    plain = lab.engine()
    answers = [Answer(each, raw(SHARED)) for each in (engine, plain)]
    assert answers[0].tokens == answers[1].tokens
    wait_until(lambda: all(1003 in seen(each) for each in (engine, plain)))
    with_points, without = seen(engine), seen(plain)
    plain.stop()
    assert set(without) == {1000, 1003} and set(with_points) == {256, 512, 768, 1000, 1003}
    for position, snapshot in without.items():
        assert same_bits(snapshot, with_points[position])
        assert snapshot.stretches == with_points[position].stretches
    points = [with_points[position] for position in (256, 512, 768)]
    assert all(stretch.cuts == () for point in points for stretch in point.stretches), "on the grid: no edge moved"
    assert all(same_bits(point, lab.cold(point)) for point in points)


def test_a_run_that_went_on_from_a_point_has_the_bits_of_a_cold_one(lab: Lab, engine: Engine) -> None:
    assert Answer(engine, raw(SHARED)).finished
    other = raw(SHARED[:700], random_tokens(300, seed=9))
    answer = Answer(engine, other)
    assert answer.finished.cache.restored == 512
    cold = lab.engine()
    assert answer.tokens == Answer(cold, Prompt(other.tokens, (Boundary(700, BoundaryKind.BRANCH),))).tokens
    cold.stop()
    wait_until(lambda: {700, 1000} <= set(seen(engine)))
    for position in (700, 1000):
        snapshot = seen(engine)[position]
        assert snapshot.stretches[0].cuts[:1] == (700,), "the branch is an edge off the grid, and the manifest says so"
        assert same_bits(snapshot, lab.cold(snapshot))

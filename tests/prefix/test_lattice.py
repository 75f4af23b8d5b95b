"""Snapshots between boundaries that lie far apart: where they lie, and that they stand in nobody's way."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st
from support.paper_snapshots import PaperModel

from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prefix.lattice import LEAST, MOST, SHARE, lattice, most_points
from rekindle.prompt import BoundaryKind
from rekindle.snapshots.disk import DiskStore
from rekindle.spec import SnapshotBytes

MESSAGE, LATTICE = BoundaryKind.MESSAGE, BoundaryKind.LATTICE
MODEL = PaperModel(attention=())  # no pages: every snapshot of a length weighs the same

grids = st.sampled_from([16, 64, 128, 512, 2048])
runs = st.tuples(st.integers(0, 100_000), st.integers(1, 150_000)).map(lambda run: (run[0], run[0] + run[1]))


@given(runs, grids, st.integers(1, MOST))
def test_points_lie_on_the_grid_inside_the_run_and_are_few(run: tuple[int, int], grid: int, most: int) -> None:
    points = lattice(*run, grid, most)
    assert points == sorted(set(points))
    assert all(run[0] < point < run[1] and point % grid == 0 for point in points)
    assert len(points) <= most + 1 + 16, "even ones, and those that halve the way to the end"


@given(runs, grids, st.integers(1, MOST), st.floats(0, 1))
@example((694, 3241), 16, 1, 0.71875)
def test_a_branch_anywhere_costs_a_small_part_of_the_run(
    run: tuple[int, int], grid: int, most: int, where: float
) -> None:
    start, stop = run
    branch = start + round((stop - start) * where)
    known = [start, *lattice(start, stop, grid, most), stop]
    again = branch - known[bisect_right(known, branch) - 1]
    assert again <= max(2 * LEAST, grid, (stop - start) / (most + 1) + 1 + grid + LEAST // 2)
    assert again <= 2 * (stop - branch) + grid + max(grid, 2 * LEAST), "less the nearer it lies to the end"


def test_where_the_points_lie_is_a_function_of_the_run_and_the_grid() -> None:
    assert lattice(0, 18_000, 512, 8) == [*range(2048, 16_385, 2048), 16_896, 17_408]
    assert lattice(30_000, 30_600, 512, 8) == [30_208], "a turn of an agent"
    assert lattice(30_000, 30_800, 2048, 8) == [], "the same where chunks are longer: it is computed in one"
    assert lattice(30_000, 32_800, 2048, 8) == [30_720, 32_768]
    assert lattice(0, 500, 512, 8) == lattice(100, 300, 64, 8) == [], "short runs have none"
    assert lattice(0, 18_000, 512, 0) == []


def test_points_take_a_part_of_the_ram_tier_however_large_one_is() -> None:
    assert most_points(1 << 40, 157 << 20) == MOST
    assert most_points(SHARE * 3 * (157 << 20), 157 << 20) == 3
    assert most_points(1 << 20, 157 << 20) == 0
    for budget, points in ((1 << 30, MOST), (4000, 1), (0, 0)):
        assert PrefixCache(local_tiers(budget), SnapshotBytes(state=1000, page=10)).points == points
    assert PrefixCache(local_tiers(1 << 30)).lattice(0, 100_000, 512) == [], "of a model whose sizes are not known"


def test_a_point_is_evicted_before_anything_else_however_new_it_is() -> None:
    one = MODEL.snapshot([0] * 9).own_bytes
    cache = PrefixCache(local_tiers(3 * one + one // 2))
    kinds = {3: MESSAGE, 6: LATTICE, 9: MESSAGE}
    for position, kind in kinds.items():
        cache.publish(MODEL.snapshot(list(range(position))), kind, "one conversation")
    hit = cache.lookup(list(range(8))).hit
    assert hit is not None and hit.position == 6
    hit.release()  # used last, by a conversation that comes back
    cache.publish(MODEL.snapshot([50, 51, 52]), MESSAGE, "another")
    assert [cache.known_length(list(range(position))) for position in kinds] == [3, 3, 9]


def test_a_point_that_is_met_as_a_boundary_is_kept_as_one() -> None:
    cache = PrefixCache(local_tiers(1 << 20))
    entry = cache.publish(MODEL.snapshot(list(range(6))), LATTICE)
    assert not cache.wants(list(range(6)), BoundaryKind.BRANCH)
    assert entry.kind is BoundaryKind.BRANCH


def test_points_go_to_disk_at_the_end_and_keep_no_other_from_its_queue(tmp_path: Path) -> None:
    model = PaperModel()

    def cache() -> PrefixCache:
        return PrefixCache(local_tiers(1 << 20, DiskStore(tmp_path, "f" * 64, 1 << 30)))

    first = cache()
    for position in (70, 140, 210):
        first.publish(model.snapshot(list(range(position))), LATTICE if position < 200 else MESSAGE)
    first.flush()
    assert first.stats().entries == {"ram": 3, "disk": 1}
    first.close()
    second = cache()
    assert second.stats().entries["disk"] == 3
    assert second.known_length(list(range(150))) == 140
    second.close()

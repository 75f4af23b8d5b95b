"""What is kept where nobody says how much: two conversations at the context limit, in RAM and across restarts."""

from __future__ import annotations

import logging
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from support.paper_machine import GIB, MIB, cpu, dense, gpu
from support.snapshot_lab import wait_until

from rekindle.build import Built, build_engine, open_model, own_cache_folder
from rekindle.build.machine import cgroup_rooms
from rekindle.build.prefix_cache import DISK_MOST, disk_budget
from rekindle.cli.serve import _cache_dir
from rekindle.config import Config, snapshot_folder
from rekindle.engine.account import Account
from rekindle.engine.types import CacheReport, Event, Failed, Finished, Request, Sampling
from rekindle.errors import BadConfig
from rekindle.placement import Machine, Plan, Wishes, known_shapes, make_plan, show_plan
from rekindle.prompt import Prompt
from rekindle.spec import snapshot_bytes

KINDS = ("27B", "35B-A3B")
CONTEXTS = (40_960, 262_144)


def paper_plan(model: str, context: int, vram: int, ram: int, cache_ram: int | None = None) -> Plan:
    spec, sizes = known_shapes(model, "Q4_K_M")
    machine = Machine((gpu(vram, "cuda:0"),), ram)
    return make_plan(machine, spec, sizes, Wishes(context, sequences=16, chunk=2048, cache_ram=cache_ram))


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("vram", [int(22.1 * GIB), 80 * GIB])
def test_ram_for_snapshots_holds_two_conversations_at_the_context_limit(model: str, context: int, vram: int) -> None:
    plan = paper_plan(model, context, vram, ram=96 * GIB)
    each = plan.snapshot_bytes.conversation(context)
    assert plan.snapshot_ram >= 2 * each
    assert plan.host_total <= 96 * GIB and plan.host_left >= 0
    assert any(f"snapshots get {plan.snapshot_ram / GIB:.2f} GiB of RAM" in reason for reason in plan.reasons)


@pytest.mark.parametrize("cache_ram", [None, 8 * GIB])
@pytest.mark.parametrize("ram", [24 * GIB, 48 * GIB, 96 * GIB])
def test_copies_of_kept_slots_are_in_the_plan_and_come_before_further_sequences(
    ram: int, cache_ram: int | None
) -> None:
    plan = paper_plan("35B-A3B", 262_144, int(22.1 * GIB), ram, cache_ram)
    assert plan.host_total <= ram
    assert plan.kept_ram == plan.snapshot_ram // 4
    assert "copies of kept slots" in show_plan(plan)
    none = paper_plan("35B-A3B", 262_144, int(22.1 * GIB), ram, cache_ram=0)
    assert none.kept_ram == 0 and none.live_pages >= plan.live_pages


def test_what_kept_slots_may_take_is_what_the_plan_says(golden: Path) -> None:
    model, settings = golden / "tiny-qwen35-Q4_K_M.gguf", {"context": 512, "sequences": 2, "threads": 1}
    built = build_engine(Config(model=model, devices=("cpu",), cache_ram=40 * MIB, **settings))
    try:
        assert built.engine.status().cache.budgets["device"] == 10 * MIB == built.plan.kept_ram
    finally:
        built.stop()


def test_a_prompt_of_32768_tokens_is_kept_by_default_and_was_not_in_2_gib() -> None:
    plan = paper_plan("27B", 40_960, 80 * GIB, ram=48 * GIB)
    needed = plan.snapshot_bytes.at(32_831)
    assert 2 * GIB < needed <= plan.snapshot_ram
    assert plan.snapshot_bytes.longest(2 * GIB) < 32_768 <= plan.snapshot_bytes.longest(plan.snapshot_ram)


@pytest.mark.parametrize(("model", "ram"), [("27B", 20 * GIB), ("35B-A3B", 14 * GIB)])
def test_where_ram_is_short_snapshots_get_what_one_running_sequence_leaves(model: str, ram: int) -> None:
    rich = paper_plan(model, 262_144, int(22.1 * GIB), ram=96 * GIB)
    short = paper_plan(model, 262_144, int(22.1 * GIB), ram)
    assert short.snapshot_ram < 2 * short.snapshot_bytes.conversation(262_144) <= rich.snapshot_ram
    assert short.cold == rich.cold and short.pool_pages == rich.pool_pages, "snapshots take nothing from the device"
    assert short.host_left >= 0


def test_more_ram_never_gives_snapshots_less() -> None:
    spec, sizes = dense()
    for make in (lambda ram: Machine((cpu(ram),), ram), lambda ram: Machine((gpu(GIB),), ram)):
        wishes = Wishes(8192, sequences=4, cache_ram=None)
        got = [make_plan(make(ram * MIB), spec, sizes, wishes).snapshot_ram for ram in range(300, 4000, 130)]
        assert got == sorted(got) and got[-1] >= 2 * snapshot_bytes(spec, "bf16").conversation(8192)


def test_a_size_that_is_asked_for_is_the_size() -> None:
    assert paper_plan("27B", 40_960, 80 * GIB, ram=96 * GIB, cache_ram=3 * GIB).snapshot_ram == 3 * GIB
    assert paper_plan("27B", 40_960, 80 * GIB, ram=96 * GIB, cache_ram=0).snapshot_ram == 0


def test_the_disk_budget_is_a_part_of_what_is_free_and_does_not_shrink_as_it_fills() -> None:
    free = 100 * GIB
    assert disk_budget(free, 0) == 25 * GIB == disk_budget(free - 20 * GIB, 20 * GIB)
    assert disk_budget(4000 * GIB, 0) == DISK_MOST
    assert disk_budget(0, 0) == 0


def test_a_container_s_limit_bounds_what_is_free(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("1:cpu:/elsewhere\n0::/box/service\n")
    for name, limit, used in (("box", 8 * GIB, 3 * GIB), ("box/service", "max", 2 * GIB)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "memory.max").write_text(f"{limit}\n")
        (tmp_path / name / "memory.current").write_text(f"{used}\n")
        (tmp_path / name / "memory.stat").write_text(f"anon 7\ninactive_file {GIB}\n")
    assert cgroup_rooms(tmp_path, membership) == [6 * GIB]
    assert cgroup_rooms(tmp_path / "none", membership) == []
    assert cgroup_rooms(tmp_path, tmp_path / "none") == []


# The folder


def test_the_user_s_own_folder_is_for_its_owner_only_and_is_taken_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    before = os.umask(0)
    try:
        folder = _cache_dir(None, False)
    finally:
        os.umask(before)
    assert folder == snapshot_folder() == tmp_path / "home" / "rekindle" / "snapshots"
    for made in (folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert _cache_dir(None, True) is None
    assert _cache_dir(tmp_path, False) == tmp_path
    with pytest.raises(BadConfig, match="exclude each other"):
        _cache_dir(tmp_path, True)


def test_a_user_folder_that_cannot_be_made_costs_a_line_and_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert own_cache_folder() is None
    assert "snapshots will not survive a restart" in caplog.text and "--cache-dir" in caplog.text


# What is said


def build(model: Path, **settings: Any) -> Built:
    return build_engine(Config(model=model, devices=("cpu",), context=2048, sequences=1, threads=1, **settings))


def ask(built: Built, length: int, shift: int = 0) -> CacheReport:
    told: list[Event] = []
    ended = threading.Event()

    def note(event: Event) -> None:
        told.append(event)
        if isinstance(event, Finished | Failed):
            ended.set()

    tokens = tuple((i * 7 + shift) % 300 for i in range(length))
    built.entry.submit(Request("one", Prompt(tokens), Sampling(temperature=0.0), 2, frozenset(), sink=note))
    assert ended.wait(60) and isinstance(told[-1], Finished)
    return told[-1].cache


def test_published_counts_what_can_be_restored_and_the_rest_is_said(
    golden: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = snapshot_bytes(open_model(golden / "tiny-qwen35-Q4_K_M.gguf").spec, "f32")
    with caplog.at_level(logging.WARNING, "rekindle"):
        room = sizes.at(256) + sizes.state + sizes.page  # one prompt, and its answer
        built = build(golden / "tiny-qwen35-Q4_K_M.gguf", cache_ram=room)
    try:
        assert f"prompts of more than {sizes.longest(room)} tokens are computed each time" in caplog.text
        short, long = ask(built, 250), ask(built, 700, shift=1)
        assert short.published == 250 + 1 and short.not_published is None
        assert ask(built, 250).restored == 250
        assert long.published == 0 and long.not_published is not None
        assert "a snapshot of 701 tokens takes" in long.not_published and "ram has" in long.not_published
        assert ask(built, 700, shift=1).restored == 0
    finally:
        built.stop()


def test_published_reaches_as_far_as_what_was_kept() -> None:
    account = Account(CacheReport(restored_from={"ram": 10}))
    account.captured.update({50, 90})
    assert account.report().published == 80 and account.report().not_published is None
    account.lose(90, "it had to give way")
    assert (account.report().published, account.report().not_published) == (40, "it had to give way")
    account.captured.add(120)  # the answer's end was kept, and holds all that is before it
    assert (account.report().published, account.report().not_published) == (110, None)


def test_a_snapshot_takes_no_more_than_the_plan_says(golden: Path) -> None:
    built = build(golden / "tiny-qwen35moe-Q4_K_M.gguf")
    try:
        ask(built, 500)
        prefixes, sizes = built.engine.prefixes, built.plan.snapshot_bytes
        wait_until(lambda: len(prefixes.entries()) == 2)
        entry = min(prefixes.entries(), key=lambda entry: entry.position)
        snapshot = prefixes.at_hand(entry)
        assert snapshot is not None and snapshot.position == 500
        held = snapshot.own_bytes + sum(page.nbytes for part in snapshot.parts for page in part.pages)
        assert sizes.at(500 - 64) < held <= sizes.at(500)
    finally:
        built.stop()


def test_two_servers_on_one_folder_both_start_and_the_second_finds_what_the_first_saved(
    golden: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = build(golden / "tiny-qwen35-Q4_K_M.gguf", cache_dir=tmp_path)
    try:
        assert ask(first, 250).restored == 0
        assert ask(first, 250).restored == 250, "published, so that it can be flushed"
        first.engine.prefixes.flush()
        with caplog.at_level(logging.WARNING, "rekindle"):
            second = build(golden / "tiny-qwen35-Q4_K_M.gguf", cache_dir=tmp_path)
        try:
            assert "another server writes to it; hits are served, nothing is saved" in caplog.text
            assert ask(second, 250).restored_from["disk"] == 250
            assert ask(second, 250, shift=1).published == 251, "in its own RAM"
        finally:
            second.stop()
        assert ask(first, 250).restored == 250
    finally:
        first.stop()

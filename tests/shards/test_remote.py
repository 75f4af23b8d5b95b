"""A remote stage answers what the same stage answers at home."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.paper_hall import QUICK, Hall
from support.paper_shard import HIDDEN, POOL, TOO_MUCH, TORN, VOCAB, PaperStage, paper_server, terms

from rekindle.batch import Batch, Segment, Wanted
from rekindle.errors import BadFrame, LinkRefused, PoolFull, RekindleError, SnapshotMismatch, StageLost
from rekindle.shards import RemoteStage, client, frames
from rekindle.snapshots.types import Part
from rekindle.spec import PAGE, Span
from rekindle.stages.types import PageCount, PendingTokens, Stage, StageOutput

FIRST, LAST, LAYERS = Span(0, 4), Span(4, 8), 8


def first() -> PaperStage:
    return PaperStage(FIRST, LAYERS)


def last() -> PaperStage:
    return PaperStage(LAST, LAYERS)


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(100), k=length))


def run(stage: Stage, slot: int, tokens: Sequence[int], position: int = 0, wanted: Wanted = Wanted.LAST) -> StageOutput:
    batch = Batch((Segment(slot, position, tuple(tokens), wanted),))
    return stage.forward(batch, None if stage.span.start == 0 else torch.ones(batch.rows, HIDDEN))


def same_tensor(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))


def same_parts(a: Sequence[Part], b: Sequence[Part]) -> bool:
    return len(a) == len(b) and all(map(same_part, a, b))


def same_part(a: Part, b: Part) -> bool:
    pages = [same_tensor(x.data, y.data) for x, y in zip(a.pages, b.pages, strict=True)]
    same_names = list(a.tensors) == list(b.tensors)
    return (
        a.layer == b.layer
        and all(pages)
        and same_names
        and all(same_tensor(tensor, b.tensors[name]) for name, tensor in a.tensors.items())
    )


def share_pages(old: Sequence[Part], new: Sequence[Part]) -> bool:
    """Every page of the old parts is the very same object in the new ones."""
    kv = [(a, b) for a, b in zip(old, new, strict=True) if a.is_paged and b.is_paged]
    return bool(kv) and all(x is y for a, b in kv for x, y in zip(a.pages, b.pages[: len(a.pages)], strict=True))


def count_pages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pages every frame brings, from now on."""
    counts: list[int] = []
    import_tensors = frames.import_tensors

    def counting(*args: Any) -> dict[str, torch.Tensor]:
        tensors = import_tensors(*args)
        counts.append(sum(tensor.shape[0] for name, tensor in tensors.items() if name.endswith("/pages")))
        return tensors

    monkeypatch.setattr(frames, "import_tensors", counting)
    return counts


# The grid


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.parametrize("make", [first, last], ids=["first", "last"])
@pytest.mark.parametrize("wanted", list(Wanted))
@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, 2 * PAGE + 5])
def test_every_operation_equals_the_local_one(
    hall: Hall, transport: str, make: Callable[[], PaperStage], wanted: Wanted, length: int
) -> None:
    local, remote = make(), hall.remote(make(), transport)
    answers = []
    for stage in (local, remote):
        stage.open(0)
        stage.open(2)
        out = run(stage, 0, prompt(length), wanted=wanted)
        both = Batch((Segment(0, length, (5,), wanted), Segment(2, 0, prompt(9), Wanted.ALL)), rewindable=True)
        step = stage.forward(both, None if stage.span.start == 0 else torch.ones(10, HIDDEN))
        stage.rewind(2, 4)
        captured = [stage.capture(0), stage.capture(2)]
        counted = stage.pages()
        stage.open(1)
        stage.restore(1, length + 1, captured[0])
        again = run(stage, 1, (8, 9), length + 1)
        restored = stage.capture(1)
        stage.close(0)
        answers.append((out, step, captured, counted, again, restored, stage.pages()))
    here, there = answers
    for i in (0, 1, 4):
        assert same_tensor(here[i].hidden, there[i].hidden)
        assert same_tensor(here[i].logits, there[i].logits)
        assert same_tensor(here[i].scores, there[i].scores)
    assert all(map(same_parts, here[2], there[2]))
    assert same_parts(here[5], there[5])
    assert (here[3], here[6]) == (there[3], there[6])


def test_a_remote_stage_has_the_span_and_slots_of_the_stage_it_stands_for(hall: Hall) -> None:
    remote = hall.remote(last())
    assert (remote.span, remote.slots) == (LAST, 4)
    assert remote.device == f"{remote.endpoint} (paper)"


def test_a_restored_slot_equals_a_cold_one(hall: Hall) -> None:
    remote = hall.remote(first())
    remote.open(0)
    run(remote, 0, prompt(150))
    remote.open(1)
    remote.restore(1, 150, remote.capture(0))
    assert same_tensor(run(remote, 0, (3, 4), 150).hidden, run(remote, 1, (3, 4), 150).hidden)
    assert same_parts(remote.capture(0), remote.capture(1))


# Pages cross the link once


def test_a_chain_of_captures_sends_every_page_once_and_shares_them(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = hall.remote(first())
    remote.open(0)
    run(remote, 0, prompt(3 * PAGE))
    counts = count_pages(monkeypatch)
    before = remote.capture(0)
    assert sum(counts) == 3 * 2  # two attention layers
    run(remote, 0, prompt(2 * PAGE + 1), 3 * PAGE)
    del counts[:]
    after = remote.capture(0)
    assert sum(counts) == 2 * 2
    del counts[:]
    assert same_parts(remote.capture(0), after)
    assert sum(counts) == 0
    assert share_pages(before, after)


def test_pages_given_by_a_restore_are_known_to_both_ends(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = hall.remote(first())
    remote.open(0)
    run(remote, 0, prompt(2 * PAGE + 3))
    snapshot = remote.capture(0)
    remote.open(1)
    remote.restore(1, 2 * PAGE + 3, snapshot)
    counts = count_pages(monkeypatch)
    again = remote.capture(1)
    assert sum(counts) == 0
    assert same_parts(again, snapshot)
    assert share_pages(snapshot, again)


def test_a_page_written_again_after_a_rewind_is_sent_again(hall: Hall) -> None:
    local, remote = first(), hall.remote(first())
    for stage in (local, remote):
        stage.open(0)
        run(stage, 0, prompt(PAGE + 3))
        stage.capture(0)
        stage.forward(Batch((Segment(0, PAGE + 3, prompt(PAGE)),), rewindable=True), None)
        stage.rewind(0, PAGE + 7)
        run(stage, 0, prompt(2 * PAGE, seed=2), PAGE + 7)
    assert same_parts(local.capture(0), remote.capture(0))


def test_after_a_capture_that_could_not_be_read_every_page_is_sent_again(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = hall.remote(first())
    remote.open(0)
    run(remote, 0, prompt(2 * PAGE + 3))
    snapshot = remote.capture(0)

    def unreadable(*_: Any) -> None:
        raise BadFrame("the reply is smudged")

    with monkeypatch.context() as patch:
        patch.setattr(client, "import_parts", unreadable)
        with pytest.raises(BadFrame, match="smudged"):
            remote.capture(0)
    counts = count_pages(monkeypatch)
    assert same_parts(remote.capture(0), snapshot)
    assert sum(counts) == 2 * 2


def test_a_slot_opened_anew_shares_nothing_with_its_past(hall: Hall) -> None:
    local, remote = first(), hall.remote(first())
    for stage in (local, remote):
        stage.open(0)
        run(stage, 0, prompt(PAGE))
        stage.capture(0)
        stage.close(0)
        stage.open(0)
        run(stage, 0, prompt(PAGE, seed=2))
    assert same_parts(local.capture(0), remote.capture(0))


# Restore in two phases


def test_nothing_is_adopted_before_the_commit_nor_after_an_abort(hall: Hall) -> None:
    stage = first()
    remote = hall.remote(stage)
    remote.open(0)
    run(remote, 0, prompt(70))
    snapshot = remote.capture(0)
    remote.open(1)
    remote.prepare_restore(1, 70, snapshot)
    assert stage.tokens[1] == []
    remote.abort_restore(1)
    with pytest.raises(SnapshotMismatch, match="commits a restore, the shard has none"):
        remote.commit_restore(1)
    assert stage.tokens[1] == []
    remote.prepare_restore(1, 70, snapshot)
    remote.commit_restore(1)
    assert stage.tokens[1] == list(prompt(70))


def test_a_restore_that_one_shard_refuses_is_adopted_by_none(hall: Hall) -> None:
    stages = [first(), last()]
    remotes = [hall.remote(stage) for stage in stages]
    for remote in remotes:
        remote.open(0)
        run(remote, 0, prompt(70))
        remote.open(1)
    parts = [part for remote in remotes for part in remote.capture(0)]
    torn = [replace(p, pages=p.pages[:0]) if p.layer == 7 else p for p in parts]
    remotes[0].prepare_restore(1, 70, torn)
    with pytest.raises(SnapshotMismatch, match="layer 7 holds 6 positions, the snapshot is at 70"):
        remotes[1].prepare_restore(1, 70, torn)
    for remote in remotes:
        remote.abort_restore(1)
    assert [stage.tokens[1] for stage in stages] == [[], []]


class CarefulStage(PaperStage):
    """Checks a restore before it adopts it, by itself."""

    def prepare_restore(self, slot: int, position: int, parts: Sequence[Part]) -> None:
        if position > 100:
            raise PoolFull(f"position {position} needs more pages than are free")
        self.ready = {slot: (position, parts)}

    def commit_restore(self, slot: int) -> None:
        self.restore(slot, *self.ready.pop(slot))

    def abort_restore(self, slot: int) -> None:
        self.ready.pop(slot, None)


def test_a_stage_that_knows_two_phases_is_asked_in_two_phases(hall: Hall) -> None:
    stage = CarefulStage(FIRST, LAYERS)
    remote = hall.remote(stage)
    remote.open(0)
    run(remote, 0, prompt(90))
    snapshot = remote.capture(0)
    run(remote, 0, prompt(90), 90)
    remote.open(1)
    with pytest.raises(PoolFull, match="position 180"):
        remote.prepare_restore(1, 180, remote.capture(0))
    remote.prepare_restore(1, 90, snapshot)
    assert 1 in stage.ready
    remote.abort_restore(1)
    assert stage.ready == {}
    remote.restore(1, 90, snapshot)
    assert stage.tokens[1] == list(prompt(90))


# Errors


def test_an_error_of_our_tree_arrives_as_itself(hall: Hall) -> None:
    remote = hall.remote(first())
    remote.open(0)
    with pytest.raises(PoolFull, match=r"no page is left for slot 0 \(forward of 1 rows .* on shard ipc://.*\[0, 4\)"):
        run(remote, 0, (TOO_MUCH,))


def test_any_other_error_arrives_with_its_name_and_the_shard_goes_on(hall: Hall) -> None:
    remote = hall.remote(first())
    remote.open(0)
    with pytest.raises(RekindleError, match="RuntimeError: the paper tore"):
        run(remote, 0, (TORN,))
    assert remote.lost is None
    remote.open(0)
    assert run(remote, 0, (1,)).hidden is not None


def test_a_segment_that_does_not_begin_where_its_slot_stands_is_refused(hall: Hall) -> None:
    remote = hall.remote(first())
    remote.open(0)
    with pytest.raises(BadFrame, match="slot 0 stands at 0, the frame's segment begins at 5"):
        run(remote, 0, prompt(3), 5)
    run(remote, 0, prompt(3))
    with pytest.raises(BadFrame, match="slot 0 stands at 3, the frame's segment begins at 0"):
        run(remote, 0, prompt(3))
    remote.restore(1, 3, remote.capture(0))
    with pytest.raises(BadFrame, match="slot 1 stands at 3, the frame's segment begins at 4"):
        run(remote, 1, prompt(3), 4)
    run(remote, 0, prompt(3), 3)


def test_a_slot_goes_back_only_into_its_last_block_and_once(hall: Hall) -> None:
    remote = hall.remote(first())
    remote.open(0)
    run(remote, 0, prompt(5))
    for position in (3, 6):
        with pytest.raises(BadFrame, match=f"slot 0 can be between 5 and 5, the frame goes back to {position}"):
            remote.rewind(0, position)
    remote.forward(Batch((Segment(0, 5, (1, 2, 3)),), rewindable=True), None)
    with pytest.raises(BadFrame, match="slot 0 can be between 5 and 8, the frame goes back to 4"):
        remote.rewind(0, 4)
    remote.rewind(0, 7)
    with pytest.raises(BadFrame, match="slot 0 can be between 7 and 7, the frame goes back to 6"):
        remote.rewind(0, 6)
    remote.forward(Batch((Segment(0, 7, (4, 5)),), rewindable=True), None)
    remote.capture(0)
    with pytest.raises(BadFrame, match="slot 0 can be between 9 and 9, the frame goes back to 8"):
        remote.rewind(0, 8)
    run(remote, 0, (9,), 9)


def test_a_token_beyond_the_vocabulary_or_31_bits_is_refused_and_the_shard_goes_on(hall: Hall) -> None:
    server = paper_server(hall.address("ipc"), {"paper": (stage := first())}, vocabulary=VOCAB)
    server.start()
    remote = hall.connect(server, stage)
    remote.open(0)
    with pytest.raises(BadFrame, match=f"the frame brings token {VOCAB}, the vocabulary has {VOCAB}"):
        run(remote, 0, (1, VOCAB, 2))
    for token in (1 << 31, 1 << 32, (1 << 48) - 1, -1):
        with pytest.raises(BadFrame, match=f"slot 0: {token} is no token id"):
            run(remote, 0, (token,))
    run(remote, 0, (1, VOCAB - 1))
    remote.stop()
    server.stop()


def test_a_slot_the_stage_does_not_have_and_wrong_hidden_rows_are_refused(hall: Hall) -> None:
    remote = hall.remote(last())
    with pytest.raises(BadFrame, match="names slot 4, the stage has 4"):
        remote.open(4)
    remote.open(0)
    batch = Batch((Segment(0, 0, (1, 2)),))
    with pytest.raises(BadFrame, match="the batch has 2 rows"):
        remote.forward(batch, torch.ones(3, HIDDEN))
    with pytest.raises(BadFrame, match="float16"):
        remote.forward(batch, torch.ones(2, HIDDEN).half())
    with pytest.raises(BadFrame, match="takes"):
        remote.forward(batch, None)


# The handshake


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("fingerprint", "another", "model fingerprint: shard has paper-model, head expects another"),
        ("span", Span(0, 3), r"span: shard has \[0, 4\), head expects \[0, 3\)"),
        ("hidden_dtype", "bfloat16", "hidden dtype: shard has float32, head expects bfloat16"),
        ("kv_dtype", "float32", "kv dtype: shard has bfloat16, head expects float32"),
        ("slots", 5, "slots: shard has 4, head needs 5"),
    ],
)
def test_ends_that_disagree_say_so_with_both_sides(hall: Hall, field: str, value: Any, says: str) -> None:
    server = hall.serve(first())
    with pytest.raises(LinkRefused, match=says):
        RemoteStage(server.endpoint, "paper", replace(terms(FIRST), **{field: value}), deadlines=QUICK)


def test_an_unknown_stage_is_refused_by_name(hall: Hall) -> None:
    with pytest.raises(LinkRefused, match="stage 'glass': shard hosts paper"):
        RemoteStage(hall.serve(first()).endpoint, "glass", terms(FIRST), deadlines=QUICK)


def test_ends_of_unlike_versions_refuse_each_other(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    server = hall.serve(first())
    speak = frames.export_frame

    def speak_version_9(*args: Any) -> list[Any]:
        header, *rest = speak(*args)
        return [frames.MAGIC + b"\x09" + bytes(header)[3:], *rest]

    monkeypatch.setattr(frames, "export_frame", speak_version_9)
    with pytest.raises(LinkRefused, match=f"speaks frame version 9, this end version {frames.VERSION}"):
        RemoteStage(server.endpoint, "paper", terms(FIRST), deadlines=QUICK)


def test_nobody_listening_is_a_loss_inside_the_deadline(hall: Hall) -> None:
    with pytest.raises(StageLost, match=r"no answer to hello within 0\.\d s"):
        RemoteStage(f"ipc://{hall.folder}/nobody", "paper", terms(FIRST), deadlines=replace(QUICK, connect=0.3))


def test_a_frame_larger_than_the_shard_takes_is_a_loss_not_a_hang(hall: Hall) -> None:
    server = paper_server(hall.address("ipc"), {"paper": first()}, limits=frames.Limits(1 << 16, 1 << 16))
    server.start()
    hall._servers.append(server)
    remote = hall.connect(server, first())
    remote.open(0)
    local = first()
    local.open(0)
    run(local, 0, prompt(40 * PAGE))
    with pytest.raises(StageLost, match="lost during prepare of slot 0: the connection broke"):
        remote.restore(0, 40 * PAGE, local.capture(0))
    remote.reconnect()
    remote.open(0)


# Leases


def test_a_stage_is_held_by_one_head_until_it_leaves(hall: Hall) -> None:
    stage = first()
    server = hall.serve(stage)
    held = hall.connect(server, stage)
    with pytest.raises(LinkRefused, match="is held by another head, whose lease ends in"):
        hall.connect(server, stage, replace(QUICK, connect=0.3))
    held.stop()
    hall.connect(server, stage).open(0)


def test_a_head_that_leaves_leaves_no_slot_open(hall: Hall) -> None:
    stage = first()
    remote = hall.remote(stage)
    for slot in range(3):
        remote.open(slot)
        run(remote, slot, prompt(100))
    assert remote.pages().used == 6
    remote.stop()
    assert stage.pages() == PageCount(POOL, 0, POOL)
    with pytest.raises(StageLost, match="the head left"):
        remote.open(0)


def test_a_head_that_disappears_loses_its_slots_when_the_lease_ends(hall: Hall) -> None:
    stage = first()
    server = hall.serve(stage, lease=0.5)
    silent = hall.connect(server, stage, replace(QUICK, ping=3600))
    silent.open(0)
    run(silent, 0, prompt(10))
    successor = hall.connect(server, stage)  # waits for the lease to end
    assert successor.pages().used == 0
    with pytest.raises(StageLost, match="does not know this session"):
        silent.open(1)
    successor.open(0)


def test_pings_keep_a_lease_alive(hall: Hall) -> None:
    stage = first()
    server = hall.serve(stage, lease=0.4)
    remote = hall.connect(server, stage, replace(QUICK, ping=0.05))
    remote.open(0)
    with pytest.raises(LinkRefused, match="held by another head"):
        hall.connect(server, stage, replace(QUICK, connect=1.2))
    run(remote, 0, (1,))


def test_a_head_whose_lease_ended_learns_it_from_its_pulse(hall: Hall) -> None:
    stage = first()
    server = hall.serve(stage, lease=0.2)
    remote = hall.connect(server, stage, replace(QUICK, ping=0.6))
    wait_until(lambda: remote.lost is not None)
    assert "does not know this session" in str(remote.lost)
    remote.reconnect()
    remote.open(0)


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until, "it never became true"
        time.sleep(0.01)


# Order and overlap


class GatedStage(PaperStage):
    """Its forwards wait at a gate."""

    def __init__(self) -> None:
        super().__init__(FIRST, LAYERS)
        self.gate = threading.Event()
        self.began = threading.Event()

    def forward(self, batch: Batch, hidden: torch.Tensor | None, pending: PendingTokens | None = None) -> StageOutput:
        self.began.set()
        assert self.gate.wait(20)
        return super().forward(batch, hidden)


def test_commands_in_flight_run_in_the_order_they_were_made(hall: Hall) -> None:
    stage = GatedStage()
    remote = hall.remote(stage)
    remote.open(0)
    tokens = prompt(12)
    pending = [remote.submit(Batch((Segment(0, i, (token,)),)), None) for i, token in enumerate(tokens)]
    assert not any(p.done() for p in pending)
    stage.gate.set()
    results = [p.result() for p in reversed(pending)]
    assert all(p.done() for p in pending)
    cold = first()
    cold.open(0)
    for i, token in enumerate(tokens):
        assert same_tensor(run(cold, 0, (token,), i).hidden, results[-1 - i].hidden)


def test_threads_share_a_link_and_each_gets_its_own_answer(hall: Hall) -> None:
    remote = hall.remote(first())
    wrong: list[str] = []

    def work(slot: int) -> None:
        cold = first()
        for stage in (cold, remote):
            stage.open(slot)
        for i, token in enumerate(prompt(40, seed=slot)):
            if not same_tensor(run(cold, slot, (token,), i).hidden, run(remote, slot, (token,), i).hidden):
                wrong.append(f"slot {slot} row {i}")

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_heartbeats_are_answered_while_a_forward_runs(hall: Hall) -> None:
    stage = GatedStage()
    server = hall.serve(stage, lease=0.5)
    remote = hall.connect(server, stage, replace(QUICK, ping=0.05, silence=0.5))
    remote.open(0)
    pending = remote.submit(Batch((Segment(0, 0, (1,)),)), None)
    assert stage.began.wait(10)
    time.sleep(1.2)  # more than twice the silence and the lease that would end the session
    assert remote.lost is None
    stage.gate.set()
    assert pending.result().hidden is not None


def test_a_call_past_its_deadline_loses_the_shard_and_says_what_was_under_way(hall: Hall) -> None:
    stage = GatedStage()
    server = hall.serve(stage)
    remote = hall.connect(server, stage, replace(QUICK, call=0.3))
    remote.open(0)
    with pytest.raises(StageLost, match=r"ipc://.* span \[0, 4\): lost during forward of 2 rows .* within 0.3 s"):
        run(remote, 0, (1, 2))
    with pytest.raises(StageLost, match="reconnect first"):
        remote.open(0)
    stage.gate.set()
    remote.reconnect()
    assert remote.pages().used == 0
    remote.open(0)
    run(remote, 0, (1, 2))


def test_commands_of_a_session_that_ended_are_not_run(hall: Hall) -> None:
    stage = GatedStage()
    remote = hall.remote(stage)
    remote.open(0)
    pending = [remote.submit(Batch((Segment(0, i, (1,)),)), None) for i in range(3)]
    assert stage.began.wait(10)
    remote.reconnect()
    stage.began.clear()
    stage.gate.set()
    remote.open(0)
    assert remote.pages().used == 0
    assert not stage.began.is_set()
    for each in pending:
        with pytest.raises(StageLost, match="the head connects anew"):
            each.result()


def test_two_stages_of_one_shard_do_not_wait_for_each_other(hall: Hall) -> None:
    slow, quick = GatedStage(), last()
    server = paper_server(hall.address("ipc"), {"slow": slow, "quick": quick}, lease=60)  # type: ignore[dict-item]
    server.start()
    hall._servers.append(server)
    remotes = [
        RemoteStage(server.endpoint, name, terms(span), deadlines=QUICK)
        for name, span in [("slow", FIRST), ("quick", LAST)]
    ]
    hall._remotes.extend(remotes)
    for remote in remotes:
        remote.open(0)
    pending = remotes[0].submit(Batch((Segment(0, 0, (1,)),)), None)
    assert slow.began.wait(10)
    assert run(remotes[1], 0, (1,)).logits is not None
    slow.gate.set()
    pending.result()


def test_a_server_that_stops_stops_its_stages(hall: Hall) -> None:
    stage = first()
    server = hall.serve(stage)
    hall.connect(server, stage).open(0)
    server.stop()
    assert stage.stopped
    assert stage.tokens == {}

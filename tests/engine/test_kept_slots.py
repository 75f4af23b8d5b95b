"""The device as the first tier: the next turn goes on in the slot of the last, and nobody can tell from the answer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.answers import arriving_together
from support.mortal import Mortal
from support.paper_hall import QUICK
from support.snapshot_lab import (
    GREEDY,
    PLENTY,
    Answer,
    Lab,
    RecordingCache,
    check_slots,
    on_engine,
    random_tokens,
    same_bits,
    wait_until,
)

from rekindle.engine.drafting import Drafts
from rekindle.engine.engine import AT_FIRST, Engine, EngineSettings
from rekindle.engine.router import Router
from rekindle.prefix import HeldStates, PrefixCache, local_tiers
from rekindle.prompt import Boundary, BoundaryKind, Prompt
from rekindle.shards import RemoteStage, ShardServer, Terms
from rekindle.snapshots.disk import DiskStore
from rekindle.spec import SnapshotBytes, Span
from rekindle.speculative.lookup import PromptLookup
from rekindle.stages import LocalStage, Pipeline

SPLIT = (Span(0, 3), Span(3, 8))
LOOKUP = Drafts("lookup", PromptLookup, None)


@pytest.fixture(scope="module", params=["dense", "moe"])
def lab(request: Any, make_tiny: Any) -> Lab:
    return Lab(make_tiny(request.param))


@pytest.fixture(scope="module")
def dense(make_tiny: Any) -> Lab:
    return Lab(make_tiny("dense"))


def stop(engine: Engine) -> None:
    check_slots(engine)
    engine.stop()
    assert all(stage.pages().used == 0 for stage in engine.pipeline.stages)


def goes_on(answer: Answer, said: Prompt | tuple[int, ...], new: int = 20, seed: int = 90) -> Prompt:
    tokens = said.tokens if isinstance(said, Prompt) else said
    return Prompt((*tokens, *answer.tokens, *random_tokens(new, seed)))


def restored(answer: Answer) -> dict[str, int]:
    return dict(answer.finished.cache.restored_from)


def kept_tokens(engine: Engine, first: int) -> list[tuple[int, ...]]:
    """Of every kept slot the first tokens; the least recently used first."""
    return on_engine(engine, lambda: [tuple(kept.tokens[:first].tolist()) for kept in engine._roster.kept._kept])


class Verbs:
    """Counts what the engine asks of its pipeline."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        for name in ("open", "close", "restore", "capture"):
            monkeypatch.setattr(engine.pipeline, name, self._counted(name, getattr(engine.pipeline, name)))

    def _counted(self, name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **how: Any) -> Any:
            self.calls[name] += 1
            return verb(*arguments, **how)

        return call


@pytest.mark.parametrize("spans", [(), SPLIT], ids=["one stage", "split"])
@pytest.mark.parametrize("drafts", [None, LOOKUP], ids=["plain", "lookup"])
def test_ten_turns_restore_nothing_and_every_state_is_that_of_a_run_that_never_stopped(
    lab: Lab, spans: tuple[Span, ...], drafts: Drafts | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {} if drafts is None else {"drafts": drafts}
    engine, cold = lab.engine(spans=spans, keeps=True, **settings), lab.engine(ram=0)
    verbs = Verbs(engine, monkeypatch)
    said, known = Prompt(random_tokens(150, 1)), 0
    for turn in range(10):
        answer = Answer(engine, said, max_tokens=6)
        assert answer.tokens == Answer(cold, said, max_tokens=6).tokens
        assert restored(answer) == {"device": known, "ram": 0, "disk": 0}
        assert answer.finished.cache.computed == len(said.tokens) - known
        known = len(said.tokens) + 5  # the last token was drawn and never consumed
        said = goes_on(answer, said, seed=100 + turn)
    assert (verbs.calls["open"], verbs.calls["restore"], verbs.calls["close"]) == (1, 0, 0)
    assert engine.status().cache.restored["device"] == engine.status().restored_tokens
    stop(engine)
    cold.stop()
    assert isinstance(engine.prefixes, RecordingCache)
    assert len(engine.prefixes.seen) >= 20, "captures go on behind the scenes"
    for snapshot in engine.prefixes.seen:
        if not any(stretch.how == "verify" for stretch in snapshot.stretches):
            assert same_bits(snapshot, lab.never_stopped(snapshot))


def test_a_prompt_that_is_kept_whole_runs_no_forward(lab: Lab) -> None:
    engine = lab.engine(keeps=True)
    prompt = Prompt(random_tokens(140, 3))
    first = Answer(engine, prompt, max_tokens=0).finished
    assert first.cache.computed == 140
    again = Answer(engine, prompt, max_tokens=5)
    assert restored(again)["device"] == 140 and again.finished.cache.computed == 0 and again.finished.cache.miss is None
    cold = lab.engine(ram=0)
    assert again.tokens == Answer(cold, prompt, max_tokens=5).tokens
    cold.stop()
    stop(engine)


def test_without_any_other_tier_the_next_turn_still_goes_on(dense: Lab) -> None:
    engine = dense.engine(ram=0, keeps=True)
    prompt = Prompt(random_tokens(100, 4))
    answer = Answer(engine, prompt)
    assert answer.finished.cache.published == 0, "it lasts only while nobody needs the slot"
    told = Answer(engine, goes_on(answer, prompt)).finished.cache
    assert told.restored_from["device"] == 103 and told.computed == 21
    assert told.miss == "the prompt is new from position 103 on"
    stop(engine)


def test_a_turn_of_a_kept_conversation_is_not_read_from_disk_while_it_waits_for_its_turn(
    dense: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = dense.engine(tmp_path, ram=0, keeps=True, slots=AT_FIRST + 3, pages=400)
    prompt = Prompt(random_tokens(150, 1))
    answer = Answer(engine, prompt)
    wait_until(lambda: engine.status().cache.entries["disk"] >= 2)
    read, load = list[str](), DiskStore.load
    monkeypatch.setattr(DiskStore, "load", lambda store, id: (read.append(id), load(store, id))[1])
    with arriving_together(engine):
        others = [Answer(engine, Prompt(random_tokens(70, 10 + seed))) for seed in range(AT_FIRST)]
        again = Answer(engine, goes_on(answer, prompt))
    assert all(other.finished for other in others)
    assert restored(again) == {"device": 153, "ram": 0, "disk": 0}
    assert not read
    stop(engine)


def test_one_slot_is_taken_over_by_its_conversation_and_given_up_for_another(dense: Lab) -> None:
    engine = dense.engine(slots=1, keeps=True)
    one, two = Prompt(random_tokens(100, 5)), Prompt(random_tokens(100, 6))
    first = Answer(engine, one)
    one = goes_on(first, one)
    first = Answer(engine, one)
    assert restored(first)["device"] == 103
    assert restored(Answer(engine, two)) == {"device": 0, "ram": 0, "disk": 0}
    assert restored(Answer(engine, goes_on(first, one))) == {"device": 0, "ram": 127, "disk": 0}
    assert engine.status().cache.evictions["device:given_up"] == 2
    assert engine.status().cache.entries["device"] == 1
    stop(engine)


def test_the_slot_that_was_used_longest_ago_is_given_up_first(dense: Lab) -> None:
    engine = dense.engine(slots=3, keeps=True)
    said = [Prompt(random_tokens(100, 10 + i)) for i in range(3)]
    answers = [Answer(engine, prompt).wait() for prompt in said]
    said[0] = goes_on(answers[0], said[0])  # type: ignore[arg-type]
    Answer(engine, said[0]).wait()
    Answer(engine, Prompt(random_tokens(100, 20))).wait()  # needs a slot
    lengths = [engine.kept_length(prompt.tokens, "") for prompt in said]
    assert [length > 0 for length in lengths] == [False, False, False], "an answer's tokens are part of the key"
    assert kept_tokens(engine, 100) == [said[2].tokens, said[0].tokens[:100], random_tokens(100, 20)]
    stop(engine)


def test_a_slot_that_somebody_in_line_will_take_over_is_given_up_last(dense: Lab) -> None:
    """Three conversations in three slots, and a stranger who has taken one: the first asks for a slot, and gets his."""
    engine = dense.engine(slots=3, keeps=True)
    said = [Prompt(random_tokens(100, 110 + i)) for i in range(3)]
    answers = [Answer(engine, prompt) for prompt in said]
    said = [goes_on(answer, prompt) for answer, prompt in zip(answers, said, strict=True)]
    order = [said.index(next(p for p in said if p.tokens[:100] == kept)) for kept in kept_tokens(engine, 100)]
    Answer(engine, Prompt(random_tokens(100, 120))).wait()
    gate = threading.Event()
    engine._inbox.put(lambda: gate.wait(60) and None)  # all are there before the first step
    again = [Answer(engine, said[i]) for i in order]
    gate.set()
    assert [restored(answer)["device"] > 0 for answer in again] == [False, True, True]
    stop(engine)


def test_of_two_requests_for_one_kept_state_the_first_takes_it_over(dense: Lab) -> None:
    engine = dense.engine(keeps=True)
    prompt = Prompt(random_tokens(130, 7))
    longer = goes_on(Answer(engine, prompt), prompt)
    gate = threading.Event()
    engine._inbox.put(lambda: gate.wait(60) and None)  # both are there before the first step
    both = [Answer(engine, longer, max_tokens=6) for _ in range(2)]
    gate.set()
    assert [restored(answer) for answer in both] == [
        {"device": 133, "ram": 0, "disk": 0},
        {"device": 0, "ram": 154, "disk": 0},  # it waited for its twin's boundary
    ]
    assert both[0].tokens == both[1].tokens
    stop(engine)


def test_no_other_name_space_takes_over_a_slot(dense: Lab) -> None:
    engine = dense.engine(keeps=True)
    prompt = Prompt(random_tokens(130, 8))
    first = Answer(engine, prompt, namespace="alice")
    longer = goes_on(first, prompt)
    assert restored(Answer(engine, longer, namespace="bob")) == {"device": 0, "ram": 0, "disk": 0}
    assert engine.kept_length(longer.tokens, "carol") == 0
    assert restored(Answer(engine, longer, namespace="alice"))["device"] == 133
    stop(engine)


def test_a_branch_shares_the_pages_of_the_kept_slot(dense: Lab) -> None:
    """Only recurrent state and the open page travel."""
    engine = dense.engine(keeps=True)
    prompt = Prompt(random_tokens(300, 9), (Boundary(200, BoundaryKind.MESSAGE),))
    Answer(engine, prompt).wait()
    used = engine.status().pages.used
    branch = Answer(engine, Prompt((*prompt.tokens[:200], *random_tokens(5, 77))), max_tokens=1)
    assert restored(branch) == {"device": 0, "ram": 200, "disk": 0}
    assert engine.status().cache.entries["device"] == 2
    assert engine.status().pages.used == used + 1, "three full pages are shared, the open one is its own"
    stop(engine)


def test_a_branch_gives_up_the_slots_of_others_before_the_one_that_it_shares_pages_with(dense: Lab) -> None:
    engine = dense.engine(slots=2, keeps=True)
    prompt = Prompt(random_tokens(300, 11), (Boundary(200, BoundaryKind.MESSAGE),))
    Answer(engine, prompt).wait()
    Answer(engine, Prompt(random_tokens(70, 12))).wait()
    branch = Prompt((*prompt.tokens[:200], *random_tokens(5, 78)))
    assert restored(Answer(engine, branch, max_tokens=1))["ram"] == 200
    assert kept_tokens(engine, 205) == [prompt.tokens[:205], branch.tokens]
    stop(engine)


def test_a_preparation_in_the_background_is_taken_over(dense: Lab) -> None:
    engine = dense.engine(keeps=True)
    prompt = Prompt(random_tokens(120, 13))
    first = Answer(engine, prompt)
    prepared = goes_on(first, prompt, 40)
    assert restored(Answer(engine, prepared, max_tokens=0, background=True))["device"] == 123
    asked = Prompt((*prepared.tokens, *random_tokens(10, 14)))
    assert restored(Answer(engine, asked)) == {"device": 164, "ram": 0, "disk": 0}
    stop(engine)


# Room


@pytest.mark.parametrize("spans", [(), SPLIT], ids=["one stage", "split"])
def test_kept_slots_are_given_up_before_a_request_waits_or_is_preempted(
    dense: Lab, spans: tuple[Span, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """12 pages; two conversations of 5 each are kept, and a third needs 9."""
    engine = dense.engine(spans=spans, keeps=True, pages=12, slots=4, context=700)
    for seed in (15, 16):
        Answer(engine, Prompt(random_tokens(300, seed))).wait()
    assert engine.status().pages.used == 10
    with caplog.at_level("INFO", "rekindle.engine"):
        answer = Answer(engine, Prompt(random_tokens(550, 17)), max_tokens=12)
        assert len(answer.tokens) == 12
    assert "pages are short" not in caplog.text
    assert engine.status().cache.entries["device"] == 1
    stop(engine)


def test_a_restore_that_fits_only_without_the_kept_slots_is_no_prompt_that_is_too_long(dense: Lab) -> None:
    engine = dense.engine(keeps=True, pages=12, slots=4, context=700)
    prompt = Prompt(random_tokens(550, 18))
    longer = goes_on(Answer(engine, prompt), prompt)
    for seed in (15, 16):
        Answer(engine, Prompt(random_tokens(300, seed))).wait()
    assert restored(Answer(engine, longer)) == {"device": 0, "ram": 553, "disk": 0}
    stop(engine)


def test_a_restore_waits_for_no_running_sequence_while_kept_slots_have_the_pages(dense: Lab) -> None:
    """13 pages: 5 for the one that runs, 5 for the one that is restored, 5 that are kept."""
    engine = dense.engine(keeps=True, pages=13, slots=4, context=700)
    prompt = Prompt(random_tokens(250, 21))
    longer = goes_on(Answer(engine, prompt), prompt)
    on_engine(engine, engine._endings.give_up_kept)
    Answer(engine, Prompt(random_tokens(280, 22))).wait()
    asked, running = [], []

    def ask(tokens_so_far: int) -> None:
        if tokens_so_far == 3:
            asked.append(Answer(engine, longer, at_token=lambda _: running.append(engine.status().running)))

    runs = Answer(engine, Prompt(random_tokens(260, 23)), max_tokens=40, at_token=ask)
    assert len(runs.tokens) == 40
    assert restored(asked[0])["ram"] == 253
    assert running[0] == 2, "beside the other"
    assert engine.status().cache.evictions["device:given_up"] == 2
    stop(engine)


def test_kept_slots_hold_no_place_on_the_device_that_a_running_sequence_could_have(dense: Lab) -> None:
    """A pool of 7 places with host memory behind it: what is restored comes back to the device whole."""
    engine = dense.engine(keeps=True, pages=7, pool={"host_pages": 60}, slots=4)
    prompt = Prompt(random_tokens(300, 19))
    longer = goes_on(Answer(engine, prompt), prompt)
    Answer(engine, Prompt(random_tokens(350, 20))).wait()
    assert engine.status().cache.entries["device"] == 1, "the second had to have the places of the first"
    away = engine.status().work["pages:away"]
    assert restored(Answer(engine, longer))["ram"] == 303
    assert engine.status().work["pages:away"] == away
    stop(engine)


def test_kept_slots_take_no_more_than_the_ram_that_their_copies_are_for(dense: Lab) -> None:
    sizes = SnapshotBytes(state=1000, page=100)
    engine = dense.engine(ram=4000, sizes=sizes, keeps=True)
    for seed in range(4):
        Answer(engine, Prompt(random_tokens(100, 30 + seed))).wait()
    stats = engine.status().cache
    assert (stats.entries["device"], stats.bytes["device"], stats.budgets["device"]) == (2, 3424, 4000)
    stop(engine)


# Bad moments


def test_a_state_whose_logits_are_no_numbers_is_not_gone_on_from(dense: Lab) -> None:
    engine = dense.engine(keeps=True)
    prompt = Prompt(random_tokens(100, 40))
    answer = Answer(engine, prompt)
    answer.wait()

    def poison() -> None:
        (kept,) = engine._roster.kept._kept
        bad = engine._publisher.bring(torch.full((320,), torch.nan))
        object.__setattr__(kept, "logits", bad)

    on_engine(engine, poison)
    assert restored(Answer(engine, goes_on(answer, prompt)))["device"] == 0
    stop(engine)


@pytest.mark.parametrize("call", ["forward", "capture", "close", "open"])
def test_a_lost_stage_takes_every_kept_slot_with_it_and_no_answer(dense: Lab, call: str) -> None:
    dies_at: dict[str, int] = {}
    back = Mortal(dense.stage(Span(3, 8), slots=3), dies_at)
    engine = dense.engine(stages=[dense.stage(Span(0, 3), slots=3), back], keeps=True)
    cold = dense.engine(ram=0)
    said = [Prompt(random_tokens(100 + i, 41 + i)) for i in range(3)]
    answers = [Answer(engine, prompt) for prompt in said]
    for turn in range(2):
        said = [goes_on(answer, prompt, seed=60 + turn) for answer, prompt in zip(answers, said, strict=True)]
        if not turn:
            dies_at[call] = 0
        stranger = Prompt(random_tokens(50, 70 + turn))  # has to have a slot of theirs
        assert Answer(engine, stranger).tokens == Answer(cold, stranger).tokens
        answers = [Answer(engine, prompt) for prompt in said]
        assert [answer.tokens for answer in answers] == [Answer(cold, prompt).tokens for prompt in said]
    assert back.deaths == 1
    stop(engine)
    cold.stop()


def test_requests_that_fail_and_clients_that_leave_keep_no_slot(dense: Lab) -> None:
    engine = dense.engine(keeps=True)
    gate = threading.Event()
    gone = Answer(engine, Prompt(random_tokens(100, 44)), max_tokens=400, at_token=lambda n: n < 3 or gate.wait(60))
    gone.first_token.wait(60)
    engine.cancel(gone.id)
    gate.set()
    gone.wait()
    assert engine.status().cache.entries["device"] == 0
    stop(engine)


def test_a_changed_model_file_stops_captures_and_not_the_conversation(dense: Lab) -> None:
    """What lies in a slot is of the weights that were loaded, as every answer is."""
    engine = dense.engine(keeps=True)
    prompt = Prompt(random_tokens(100, 45))
    answer = Answer(engine, prompt)
    answer.wait()
    engine.degrade("the file has changed")
    assert restored(Answer(engine, goes_on(answer, prompt)))["device"] == 103
    stop(engine)


# Audits, replicas, shards


def test_a_slot_that_was_taken_over_is_audited_like_a_restore(lab: Lab) -> None:
    engine = lab.engine(audit=1, keeps=True)
    prompt = Prompt(random_tokens(100, 46))
    longer = goes_on(Answer(engine, prompt), prompt)
    assert restored(Answer(engine, longer))["device"] == 103
    wait_until(lambda: engine.status().audits == 1)
    assert engine.status().audit_mismatches == 0
    engine.stop()


def test_an_audit_finds_a_kept_state_that_is_wrong(dense: Lab) -> None:
    engine = dense.engine(audit=1, keeps=True)
    prompt = Prompt(random_tokens(100, 47))
    answer = Answer(engine, prompt)
    answer.wait()
    (stage,) = engine.pipeline.stages
    assert isinstance(stage, LocalStage)

    def spoil() -> None:
        state = next(iter(stage._state.layers[0].live(engine._roster.kept._kept[0].slot).values()))
        state += 0.01 * torch.randn(state.shape)

    on_engine(engine, spoil)
    Answer(engine, goes_on(answer, prompt)).wait()
    wait_until(lambda: engine.status().audits == 1)
    assert engine.status().audit_mismatches == 1
    engine.stop()


def test_a_conversation_returns_to_the_replica_that_keeps_its_slot(dense: Lab) -> None:
    shared = PrefixCache(local_tiers(PLENTY), None, HeldStates())
    settings = EngineSettings(context=1024, grid=64)
    engines = [Engine(Pipeline([dense.stage()]), shared, settings).start() for _ in range(2)]
    router = Router(engines)
    said = [Prompt(random_tokens(100 + i, 48 + i)) for i in range(2)]
    answers = [Answer(engine, prompt, GREEDY) for engine, prompt in zip(engines, said, strict=True)]
    for turn in range(3):
        said = [goes_on(answer, prompt, seed=70 + turn) for answer, prompt in zip(answers, said, strict=True)]
        for i in (1, 0):  # the second first: of equals the router takes the first
            answers[i] = Answer(router, said[i], GREEDY)  # type: ignore[arg-type]
            assert restored(answers[i])["device"]
    assert router.status().cache.entries["device"] == 2
    for engine in engines:
        engine.stop()


@pytest.fixture
def shard(dense: Lab, tmp_path: Path) -> Iterator[ShardServer]:
    stages = {"back": dense.stage(Span(3, 8))}
    server = ShardServer(
        stages, f"ipc://{tmp_path}/shard", fingerprint="tiny", hidden_dtype="float32", kv_dtype="float32"
    )
    server.start()
    yield server
    server.stop()


def test_a_conversation_goes_on_across_a_shard_and_outlives_the_loss_of_its_slots(
    dense: Lab, shard: ShardServer
) -> None:
    terms = Terms("tiny", Span(3, 8), "float32", "float32", slots=4)
    remote = RemoteStage(shard.endpoint, "back", terms, deadlines=QUICK)
    engine = dense.engine(stages=[dense.stage(Span(0, 3)), remote], keeps=True)
    cold = dense.engine(ram=0)
    said = Prompt(random_tokens(150, 50))
    tiers = []
    for turn in range(5):
        if turn == 3:
            remote._session.lose("the link was cut while nobody asked")
        answer = Answer(engine, said)
        assert answer.tokens == Answer(cold, said).tokens
        tiers.append([tier for tier, tokens in restored(answer).items() if tokens])
        said = goes_on(answer, said, seed=80 + turn)
    assert tiers == [[], ["device"], ["device"], ["device"], ["device"]], "the loss shows when the step is sent"
    assert engine.status().cache.evictions["device:given_up"] == 0
    stop(engine)
    cold.stop()

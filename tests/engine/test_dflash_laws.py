"""A drafter with weights, DFlash or MTP, changes no answer, and drafts after a restore as if there had been none.

The target knows four tokens, so a random drafter is right now and then; about a target of 320 it is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.drafter_files import tiny_drafter
from support.mortal import Mortal
from support.mtp_files import folder_with_block
from support.paper_drafter import PaperReader
from support.paper_hall import QUICK
from support.snapshot_lab import PLENTY, Answer, Lab, RecordingCache, same_bits, wait_until

from rekindle.batch import Ask, Batch
from rekindle.build.drafts import DraftWeights
from rekindle.engine.drafting import Drafts
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.pace import Pace
from rekindle.engine.types import DraftReport, Sampling
from rekindle.experts import RoutingCounts, SpanExperts
from rekindle.layers import load_span, span
from rekindle.prefix import local_tiers
from rekindle.prompt import Boundary, BoundaryKind, Prompt
from rekindle.shards import RemoteStage, ShardServer, Terms
from rekindle.snapshots.types import DRAFTER_LAYER, Part, Snapshot
from rekindle.spec import Span
from rekindle.speculative.files import open_drafter
from rekindle.speculative.lookup import PromptLookup
from rekindle.speculative.mtp_file import MtpFile
from rekindle.stages import LocalStage, Pipeline
from rekindle.stages.paused import PausedForward
from rekindle.stages.types import PendingTokens

VOCAB, LENGTH = 4, 40
GREEDY, SEEDED = Sampling(temperature=0), Sampling(temperature=1.0, seed=5)
PENALISED = Sampling(temperature=1.0, seed=6, top_k=5, repetition_penalty=1.3, presence_penalty=0.5)
ALONE = Drafts(model="drafter", off=None)
SEEDS = {"dense 1": 5, "moe 2": 4, "dense mtp": 5, "moe mtp": 1}  # of drafters that are right now and then
SPANS = {"one stage": (), "three stages": (Span(0, 2), Span(2, 5), Span(5, 8))}
BOTH = Drafts("lookup", PromptLookup, None, "drafter")


@pytest.fixture(autouse=True)
def _no_long_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences draft again after two tokens, however wrong the drafter was."""
    monkeypatch.setattr("rekindle.speculative.width.MOST_REST", 2)


class Target:
    """A tiny target and a drafter for it."""

    def __init__(self, tiny: Any, folder: Path, version: str, seed: int = 0, recorded: bool = False) -> None:
        """version: of DFlash, or mtp. recorded: drafted tokens stay where the drafter is until they are verified."""
        self.file: DraftWeights
        if version == "mtp":
            tiny = type(tiny)(folder_with_block(tiny.folder, folder, seed), tiny.reference)
            self.file = MtpFile(tiny.open())
        else:
            self.file = open_drafter(tiny_drafter(folder, tiny.open().spec, int(version), seed))
        self.lab, self.tiny = Lab(tiny, recorded), tiny
        self._straight = self.lab.engine(ram=0)
        self._known: dict[tuple[Any, ...], list[int]] = {}

    def engine(self, folder: Path | None = None, ram: int = PLENTY, drafts: Drafts = ALONE, **fields: Any) -> Engine:
        return self.lab.engine(folder, ram, drafter=self.file, drafts=drafts, **fields)

    def plain(self, asked: Prompt, sampling: Sampling = GREEDY, max_tokens: int = LENGTH) -> list[int]:
        """Of a run without a drafter."""
        key = asked.tokens, sampling.seed, sampling.top_k, max_tokens
        if key not in self._known:
            self._known[key] = Answer(self._straight, asked, sampling, max_tokens=max_tokens).tokens
        return self._known[key]

    def stop(self) -> None:
        self._straight.stop()


@pytest.fixture(scope="module", params=["dense 1", "moe 2", "dense mtp", "moe mtp", "dense 1 ahead", "moe 2 ahead"])
def target(request: Any, make_tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    kind, version, *ahead = request.param.split()
    folder = tmp_path_factory.mktemp("drafter") / "d"
    made = Target(make_tiny(kind, vocab_size=VOCAB), folder, version, SEEDS[f"{kind} {version}"], bool(ahead))
    yield made
    made.stop()


def prompt(seed: int, length: int = 100, cuts: tuple[int, ...] = ()) -> Prompt:
    tokens = tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())
    return Prompt(tokens, tuple(Boundary(cut, BoundaryKind.MESSAGE) for cut in cuts))


def outcome(report: DraftReport) -> tuple[int, int, int]:
    return report.blocks, report.proposed, report.accepted


def seen(engine: Engine) -> list[Snapshot]:
    assert isinstance(engine.prefixes, RecordingCache)
    return engine.prefixes.seen


# Tokens


@pytest.mark.parametrize(
    ("drafts", "sampling"),
    [(ALONE, GREEDY), (ALONE, SEEDED), (ALONE, PENALISED), (BOTH, GREEDY), (BOTH, PENALISED)],
    ids=["greedy", "seeded", "penalised", "greedy with lookup", "penalised with lookup"],
)
def test_the_tokens_are_those_of_a_run_without_a_drafter(target: Target, drafts: Drafts, sampling: Sampling) -> None:
    engine = target.engine(drafts=drafts)
    answer = Answer(engine, prompt(1), sampling, max_tokens=LENGTH)
    assert answer.tokens == target.plain(prompt(1), sampling)
    draft = answer.finished.draft
    engine.stop()
    assert draft.drafter == ("drafter" if drafts is ALONE else "lookup and drafter") and draft.cold_from is None
    assert draft.blocks and draft.proposed >= draft.accepted
    if sampling is GREEDY and drafts is ALONE:
        assert 0 < draft.accepted < draft.proposed


def test_blocks_between_the_sections_of_anothers_prompt_change_no_token(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span, "SECTION", 0)  # sections of two layers …
    monkeypatch.setattr(Pace, "sections", lambda *_: 1)  # … one at a time, however long steps take here
    engine, paused = target.engine(turns=True, max_gap=1e-9), list[int]()
    run_some = engine._launcher._run_some

    def noting(forward: PausedForward, *rest: Any) -> bool:
        paused.append(forward.sections)
        return run_some(forward, *rest)

    engine._launcher._run_some = noting  # type: ignore[method-assign]
    long, asked = prompt(4, 700), list[Answer]()

    def ask(count: int) -> None:  # by the engine's own thread, so that the first goes on beside it
        if count == 3:
            asked.append(Answer(engine, long, max_tokens=LENGTH))

    first = Answer(engine, prompt(1), at_token=ask, max_tokens=LENGTH).wait()
    (second,) = asked
    assert [first.tokens, second.tokens] == [target.plain(prompt(1)), target.plain(long)]
    again = Answer(engine, long, max_tokens=LENGTH)
    assert again.tokens == second.tokens and again.finished.draft.cold_from is None
    engine.stop()
    assert not target.lab.recorded or max(paused) > 1, "chunks paused"


@pytest.mark.parametrize("version", ["1", "2", "mtp"])
def test_a_drafter_that_is_never_right_changes_nothing(make_tiny: Any, tmp_path: Path, version: str) -> None:
    target = Target(make_tiny("dense"), tmp_path / "d", version)
    engine = target.engine()
    answer = Answer(engine, prompt(1), max_tokens=LENGTH)
    assert answer.tokens == target.plain(prompt(1))
    assert answer.finished.draft.blocks > 8 and answer.finished.draft.accepted <= 1
    engine.stop()
    target.stop()


@pytest.mark.parametrize(("right", "spans"), zip((1.0, 0.7), SPANS.values(), strict=True), ids=["always", "often"])
def test_a_drafter_that_is_always_or_often_right_changes_nothing(
    target: Target, right: float, spans: tuple[Span, ...]
) -> None:
    expected = target.plain(prompt(1), SEEDED)
    stages = [target.lab.stage(span) for span in spans or (None,)]
    pipeline = Pipeline(stages, drafter=PaperReader(right, [*prompt(1).tokens, *expected], VOCAB))
    settings = EngineSettings(context=2048, grid=64, drafts=ALONE)
    engine = Engine(pipeline, RecordingCache(local_tiers(PLENTY)), settings).start()
    answer = Answer(engine, prompt(1), SEEDED, max_tokens=LENGTH)
    assert answer.tokens == expected
    report = answer.finished.draft
    engine.stop()
    assert report.accepted == report.proposed if right == 1.0 else 0 < report.accepted < report.proposed
    assert report.mean_accepted > (5 if right == 1.0 else 0)


@pytest.mark.parametrize("version", ["2", "mtp"])
def test_cold_experts_and_far_pages_change_nothing(make_tiny: Any, tmp_path: Path, version: str) -> None:
    """Two of eight experts are hot, and the pool holds less than the prompt."""
    target = Target(make_tiny("moe", vocab_size=VOCAB), tmp_path / "d", version, SEEDS[f"moe {version}"])
    file = target.tiny.open()
    experts = SpanExperts([[1, 5]] * file.spec.layers, [2] * file.spec.layers, RoutingCounts(file.spec.layers, 8))
    model = load_span(file, file.spec.whole, torch.device("cpu"), torch.float32, experts=experts)
    stage = LocalStage(model, slots=4, pages=4, kv_type="f32", host_pages=64)
    settings = EngineSettings(context=2048, grid=64, drafts=ALONE)
    pipeline = Pipeline([stage], drafter=target.lab.drafter(target.file, [stage]))
    engine = Engine(pipeline, RecordingCache(local_tiers(PLENTY)), settings).start()
    answer = Answer(engine, prompt(1, 300), max_tokens=LENGTH)
    assert answer.tokens == target.plain(prompt(1, 300))
    assert answer.finished.draft.accepted and stage.paging().page_outs
    engine.stop()
    target.stop()


def test_sequences_draft_and_are_verified_together(target: Target) -> None:
    """Three at a time, of different lengths."""
    asked = [prompt(seed, 60 + 25 * seed) for seed in range(3)]
    engine = target.engine(ram=0)
    answers = [Answer(engine, each, SEEDED, max_tokens=LENGTH) for each in asked]
    assert [answer.tokens for answer in answers] == [target.plain(each, SEEDED) for each in asked]
    assert all(answer.finished.draft.blocks for answer in answers)
    assert sum(answer.finished.draft.accepted for answer in answers)
    engine.stop()


def test_a_step_ahead_waits_for_the_drafter(target: Target) -> None:
    engine = target.engine(async_steps=1)
    answer = Answer(engine, prompt(3), max_tokens=LENGTH)
    assert answer.tokens == target.plain(prompt(3))
    assert answer.finished.draft.blocks
    engine.stop()


@pytest.mark.parametrize("at", [3, 11])
def test_an_end_inside_a_block_leaves_the_snapshot_of_a_run_without_a_drafter(target: Target, at: int) -> None:
    """As far as a snapshot decides answers; beside that it has the drafter's context, as long as its key."""
    asked, engine = prompt(4), target.engine()
    ended: list[int] = []

    def stop_when(token: int) -> bool:
        ended.append(token)
        return len(ended) % at == 0

    answer = Answer(engine, asked, max_tokens=LENGTH, stop_when=stop_when)
    assert answer.tokens == target.plain(asked)[:at]
    longer = Prompt((*asked.tokens, *answer.tokens, *prompt(5, 9).tokens))
    again = Answer(engine, longer, max_tokens=8)
    assert again.tokens == target.plain(longer, max_tokens=8)
    assert again.finished.cache.restored == len(asked.tokens) + at - 1
    assert again.finished.draft.cold_from is None
    engine.stop()
    snapshot = next(s for s in seen(engine) if s.position == len(asked.tokens) + at - 1)
    assert snapshot.parts[-1].layer == DRAFTER_LAYER
    oracle = target.lab.never_stopped(snapshot)
    pairs = zip(snapshot.parts, oracle.parts, strict=False)
    assert all(torch.allclose(a.tensors[n], b.tensors[n], atol=1e-5) for a, b in pairs for n in a.tensors)


# Splits, restores


def test_features_come_from_every_stage(target: Target) -> None:
    """The blocks are those of one stage."""
    whole = target.engine(ram=0)
    expected = Answer(whole, prompt(6), max_tokens=LENGTH)
    engine = target.engine(ram=0, spans=SPANS["three stages"])
    answer = Answer(engine, prompt(6), max_tokens=LENGTH)
    assert answer.tokens == target.plain(prompt(6))
    assert outcome(answer.finished.draft) == outcome(expected.finished.draft)
    assert answer.finished.draft.accepted
    both = [Answer(engine, prompt(6), max_tokens=LENGTH) for _ in range(2)]
    assert all(each.tokens == answer.tokens for each in both)
    whole.stop()
    engine.stop()


@pytest.fixture
def with_shard(target: Target, tmp_path: Path) -> Iterator[Engine]:
    """Layers 3 to 5 in a shard."""
    middle = Span(3, 6)
    server = ShardServer(
        {"middle": target.lab.stage(middle)},
        f"ipc://{tmp_path}/shard",
        fingerprint="tiny",
        hidden_dtype="float32",
        kv_dtype="float32",
    )
    server.start()
    terms = Terms("tiny", middle, "float32", "float32", slots=4)
    remote = RemoteStage(server.endpoint, "middle", terms, deadlines=QUICK)
    stages = [target.lab.stage(Span(0, 3)), remote, target.lab.stage(Span(6, 8))]
    pipeline = Pipeline(stages, drafter=target.lab.drafter(target.file, stages))
    settings = EngineSettings(context=2048, grid=64, drafts=ALONE)
    engine = Engine(pipeline, RecordingCache(local_tiers(PLENTY)), settings).start()
    yield engine
    engine.stop()
    server.stop()


def test_features_come_from_a_shard(target: Target, with_shard: Engine) -> None:
    whole = target.engine(ram=0)
    expected = Answer(whole, prompt(6), SEEDED, max_tokens=LENGTH)
    answer = Answer(with_shard, prompt(6), SEEDED, max_tokens=LENGTH)
    assert answer.tokens == expected.tokens == target.plain(prompt(6), SEEDED)
    assert outcome(answer.finished.draft) == outcome(expected.finished.draft)
    whole.stop()


FIRST, SECOND = 150, 151  # tokens of a prompt, and of one that goes on from it


def two_turns() -> tuple[Prompt, Prompt]:
    """Chunks of both end at FIRST, so that a restored run has the bits of a cold one."""
    whole = prompt(8, SECOND, cuts=(FIRST,))
    return Prompt(whole.tokens[:FIRST]), whole


@pytest.mark.parametrize(
    ("tier", "spans"),
    [
        ("device", SPANS["one stage"]),
        ("device", SPANS["three stages"]),
        ("ram", SPANS["one stage"]),
        ("disk", SPANS["one stage"]),
        ("disk", SPANS["three stages"]),
    ],
    ids=["device", "device, split", "RAM", "disk", "disk, onto another split"],
)
def test_after_a_restore_the_same_blocks_are_drafted_as_without_it(
    target: Target, tmp_path: Path, tier: str, spans: tuple[Span, ...]
) -> None:
    first, second = two_turns()
    cold = target.engine(ram=0)
    expected = Answer(cold, second, max_tokens=LENGTH)
    folder, ram = (tmp_path, 0) if tier == "disk" else (None, PLENTY)
    engine = target.engine(folder, ram, spans=() if tier == "disk" else spans, keeps=tier == "device")
    Answer(engine, first, max_tokens=1).wait()
    if tier == "disk":
        engine.stop()
        engine = target.engine(folder, ram, spans=spans)
    answer = Answer(engine, second, max_tokens=LENGTH)
    assert answer.tokens == expected.tokens == target.plain(second)
    assert answer.finished.cache.restored_from[tier] == FIRST
    assert outcome(answer.finished.draft) == outcome(expected.finished.draft)
    assert answer.finished.draft.cold_from is None and answer.finished.draft.accepted
    engine.stop()
    cold.stop()


def test_a_snapshot_without_the_drafters_part_restores_and_drafting_begins_there(target: Target) -> None:
    """And the answer says so. A server without a drafter reads a snapshot with the part."""
    first, second = two_turns()
    expected = target.plain(second)
    saved = {}
    for name, engine in (("without", target.lab.engine()), ("with", target.engine())):
        Answer(engine, first, max_tokens=1).wait()
        engine.stop()
        saved[name] = next(snapshot for snapshot in seen(engine) if snapshot.position == FIRST)
    assert same_bits(saved["without"], saved["with"])
    cold, none = target.engine(), target.lab.engine()
    cold.prefixes.publish(saved["without"], BoundaryKind.MESSAGE)
    none.prefixes.publish(saved["with"], BoundaryKind.MESSAGE)
    answer = Answer(cold, second, max_tokens=LENGTH)
    assert answer.tokens == expected
    assert answer.finished.cache.restored == FIRST and answer.finished.draft.cold_from == FIRST
    assert answer.finished.draft.blocks
    answer = Answer(none, second, max_tokens=LENGTH)
    assert answer.tokens == expected and answer.finished.cache.restored == FIRST
    cold.stop()
    none.stop()


def test_an_audit_compares_what_decides_answers(target: Target) -> None:
    """The cold run reads no features, and a snapshot with a drafter's context is not found wrong for it."""
    first, second = two_turns()
    engine = target.engine(audit=1)
    Answer(engine, first, max_tokens=1).wait()
    assert Answer(engine, second, max_tokens=2).finished.cache.restored == FIRST
    wait_until(lambda: engine.status().audits == 1)
    assert engine.status().audit_mismatches == 0
    engine.stop()


def test_another_drafters_context_is_left_alone(target: Target, tmp_path: Path) -> None:
    first, second = two_turns()
    other = open_drafter(tiny_drafter(tmp_path / "other", target.tiny.open().spec, seed=9))
    stranger = target.lab.engine(tmp_path, 0, drafter=other, drafts=ALONE)
    Answer(stranger, first, max_tokens=1).wait()
    stranger.stop()
    engine = target.engine(tmp_path, 0)
    answer = Answer(engine, second, max_tokens=LENGTH)
    assert answer.tokens == target.plain(second)
    assert answer.finished.cache.restored == FIRST and answer.finished.draft.cold_from == FIRST
    engine.stop()


def test_a_sequence_that_left_its_slot_drafts_on(target: Target) -> None:
    """Pages are short: sequences wait with all their state, the drafter's too."""
    asked = [prompt(seed, 60) for seed in range(3)]
    engine = target.engine(ram=0, pages=4)
    answers = [Answer(engine, each, max_tokens=LENGTH) for each in asked]
    assert [answer.tokens for answer in answers] == [target.plain(each) for each in asked]
    assert all(answer.finished.draft.cold_from is None for answer in answers)
    assert engine.status().pages.used == 0
    engine.stop()


def test_a_lost_stage_comes_back_and_the_drafter_begins_anew(target: Target) -> None:
    stages = [target.lab.stage(Span(0, 5)), Mortal(target.lab.stage(Span(5, 8)), {"rewind": 1})]
    local = [stages[0], target.lab.stage(Span(5, 8))]
    pipeline = Pipeline(stages, drafter=target.lab.drafter(target.file, local))
    settings = EngineSettings(context=2048, grid=64, drafts=ALONE)
    engine = Engine(pipeline, RecordingCache(local_tiers(PLENTY)), settings).start()
    answer = Answer(engine, prompt(13), max_tokens=LENGTH)
    assert answer.tokens == target.plain(prompt(13))
    assert stages[1].deaths == 1 and answer.finished.draft.blocks
    engine.stop()


def test_what_the_drafter_cannot_reach_is_not_sent(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long prompt only the positions that a block or a snapshot needs."""
    rows = []
    forward = LocalStage.forward

    def counting(stage: LocalStage, batch: Any, *rest: Any) -> Any:
        output = forward(stage, batch, *rest)
        rows.append((batch.segments[0].position, [len(tap) for tap in output.features]))
        return output

    monkeypatch.setattr(LocalStage, "forward", counting)
    monkeypatch.setattr("rekindle.speculative.context.FULL", 30)
    engine = target.engine()
    Answer(engine, prompt(9, 300), max_tokens=2).wait()
    engine.stop()
    reach = engine.pipeline.drafter.reach if engine.pipeline.drafter else 0
    taps = len(target.file.spec.taps)
    assert reach == (31 if isinstance(target.file, MtpFile) else 30 if target.file.spec.selector is None else 32)
    assert rows[:5] == [(at, [] if at < 256 else [reach] * taps) for at in range(0, 300, 64)]


# Faults


class Faulty(PaperReader):
    """Drafts until one of its verbs fails, and is not to be called again."""

    reach = 64

    def __init__(self, verb: str, text: list[int]) -> None:
        super().__init__(0.7, text, VOCAB)
        self.verb, self.left, self.after = verb, 2, 0

    def _count(self, verb: str) -> None:
        self.after += self.left == 0
        if verb == self.verb:
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("out of memory")

    def propose(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        self._count("propose")
        return super().propose(asks)

    def read(self, batch: Batch, features: Sequence[torch.Tensor], pending: PendingTokens | None) -> None:
        self._count("read")

    def capture(self, slot: int) -> Sequence[Part]:
        self._count("capture")
        return ()

    def rewind(self, slot: int, position: int) -> None:
        self._count("rewind")


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("verb", ["propose", "read", "capture"])
def test_a_fault_of_the_drafter_ends_drafting_and_no_request(
    target: Target, verb: str, spans: tuple[Span, ...], caplog: pytest.LogCaptureFixture
) -> None:
    expected = target.plain(prompt(1), SEEDED)
    drafter = Faulty(verb, [*prompt(1).tokens, *expected])
    pipeline = Pipeline([target.lab.stage(span) for span in spans or (None,)], drafter=drafter)
    settings = EngineSettings(context=2048, grid=64, drafts=ALONE)
    engine = Engine(pipeline, RecordingCache(local_tiers(PLENTY)), settings).start()
    for _ in range(2):
        answer = Answer(engine, prompt(1), SEEDED, max_tokens=LENGTH)
        assert answer.tokens == expected
    off = answer.finished.draft.off
    engine.stop()
    assert off == "the drafter failed with RuntimeError, the log says where"
    assert drafter.left == 0 and drafter.after == 0
    assert caplog.text.count("the drafter failed and drafts no more") == 1
    assert len(seen(engine)) >= 2, "the target's states are kept"

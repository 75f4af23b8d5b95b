"""A drafter changes no answer and no snapshot, whether it is right always, never or sometimes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.mortal import Mortal
from support.paper_drafter import paper_drafts
from support.paper_hall import QUICK
from support.snapshot_lab import PLENTY, Answer, Lab, RecordingCache, random_tokens, tensors

from rekindle.batch import Ask
from rekindle.engine.drafting import LEARNT, Draft, Drafts, Measures, Proposer, filling_step
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import FinishReason, Sampling
from rekindle.prefix import local_tiers
from rekindle.prompt import Prompt
from rekindle.shards import RemoteStage, ShardServer, Terms
from rekindle.snapshots.types import Snapshot
from rekindle.spec import Span
from rekindle.speculative.cost import FIRST_PLAIN, Costs
from rekindle.speculative.lookup import PromptLookup
from rekindle.speculative.width import Purse, Width
from rekindle.stages import Pipeline

ALWAYS, NEVER, SOMETIMES = 1.0, 0.0, 0.7
LENGTH = 40
GREEDY = Sampling(temperature=0)
SEEDED = Sampling(temperature=1.0, seed=5)
PENALISED = Sampling(
    temperature=1.0,
    seed=6,
    top_k=40,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.4,
    logit_bias={3: 4.0, 9: -5.0},
)


@pytest.fixture(scope="module", params=["dense", "moe"])
def lab(request: Any, make_tiny: Any) -> Lab:
    return Lab(make_tiny(request.param))


@pytest.fixture(scope="module")
def dense(make_tiny: Any) -> Lab:
    return Lab(make_tiny("dense"))


def prompt(seed: int, length: int = 100) -> Prompt:
    return Prompt(random_tokens(length, seed))


def plain(lab: Lab, asked: Prompt, sampling: Sampling = GREEDY, **fields: Any) -> Answer:
    engine = lab.engine(ram=0)
    answer = Answer(engine, asked, sampling, **{"max_tokens": LENGTH, **fields})
    answer.wait()
    engine.stop()
    return answer


def text(asked: Prompt, answer: Answer) -> list[int]:
    return [*asked.tokens, *answer.tokens]


def seen(engine: Engine) -> list[Snapshot]:
    assert isinstance(engine.prefixes, RecordingCache)
    return engine.prefixes.seen


def apart(a: Snapshot, b: Snapshot) -> float:
    """The largest difference in any tensor, as a share of the tensor's largest value."""
    pairs = zip(tensors(a), tensors(b), strict=True)
    return max(float((x - y).abs().max() / y.abs().max().clamp(min=1e-30)) for x, y in pairs if x.numel())


# Tokens


@pytest.mark.parametrize("right", [ALWAYS, NEVER, SOMETIMES])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
def test_the_tokens_are_those_of_a_run_without_drafts(lab: Lab, right: float, sampling: Sampling) -> None:
    expected = plain(lab, prompt(1), sampling)
    engine = lab.engine(drafts=paper_drafts(right, text(prompt(1), expected)))
    answer = Answer(engine, prompt(1), sampling, max_tokens=LENGTH)
    assert answer.tokens == expected.tokens
    draft = answer.finished.draft
    engine.stop()
    assert draft.blocks and draft.proposed >= draft.blocks
    if right == ALWAYS:
        assert draft.accepted == draft.proposed and draft.mean_accepted > 5
    if right == NEVER:
        assert draft.accepted == 0 and draft.blocks <= 8, "it rests longer and longer"


@pytest.mark.parametrize("ahead", [0, 1], ids=["step by step", "one step ahead"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
def test_sequences_with_blocks_of_different_widths_share_batches(dense: Lab, sampling: Sampling, ahead: int) -> None:
    """Four at a time: one drafter is always right, one never, one sometimes; one sequence drafts nothing."""
    asked = [prompt(seed, 70 + 9 * seed) for seed in range(4)]
    expected = [plain(dense, each, sampling) for each in asked]
    engine = dense.engine(ram=0, async_steps=ahead)
    drafts = [paper_drafts(r, text(p, e)) for r, p, e in zip((ALWAYS, NEVER, SOMETIMES), asked, expected, strict=False)]
    answers = []
    for each, its in zip(asked, [*drafts, Drafts()], strict=True):
        engine.settings = replace(engine.settings, drafts=its)
        answers.append(Answer(engine, each, sampling, max_tokens=LENGTH))
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    blocks = [answer.finished.draft.blocks for answer in answers]
    engine.stop()
    assert all(blocks[:3]) and not blocks[3]


@pytest.mark.parametrize("seeds", [(4,), (4, 5, 6)], ids=["alone", "beside others"])
def test_penalties_do_not_hold_up_the_next_step(dense: Lab, seeds: tuple[int, ...]) -> None:
    """A card may ask for penalties by default: what was drawn is counted before the host knows it."""
    expected = [plain(dense, prompt(seed), PENALISED).tokens for seed in seeds]
    engine = dense.engine(ram=0, async_steps=1)
    ahead = list[int]()
    launch = engine._launcher.launch
    engine._launcher.launch = lambda step: (ahead.append(len(engine._flights)), launch(step))  # type: ignore[method-assign]
    answers = [Answer(engine, prompt(seed), PENALISED, max_tokens=LENGTH) for seed in seeds]
    assert [answer.tokens for answer in answers] == expected
    engine.stop()
    assert max(ahead) == 1, "a step was launched while another was in flight"


def test_log_probabilities_are_those_of_the_rows_that_the_tokens_were_drawn_from(dense: Lab) -> None:
    sampling = Sampling(temperature=0, logprobs=2)
    expected = plain(dense, prompt(2), sampling)
    engine = dense.engine(drafts=paper_drafts(SOMETIMES, text(prompt(2), expected)))
    rows = Answer(engine, prompt(2), sampling, max_tokens=LENGTH).rows
    engine.stop()
    for row, one in zip(rows, expected.rows, strict=True):
        assert row.logprob is not None and one.logprob is not None
        assert row.logprob.logprob == pytest.approx(one.logprob.logprob, abs=1e-4)
        assert [token for token, _ in row.logprob.top] == [token for token, _ in one.logprob.top]


@pytest.mark.parametrize("right", [ALWAYS, SOMETIMES])
def test_a_step_ahead_waits_for_what_is_drafted(dense: Lab, right: float) -> None:
    expected = plain(dense, prompt(3))
    engine = dense.engine(drafts=paper_drafts(right, text(prompt(3), expected)), async_steps=1)
    answer = Answer(engine, prompt(3), max_tokens=LENGTH)
    assert answer.tokens == expected.tokens
    engine.stop()
    assert answer.finished.draft.blocks


# Ends inside a block


def stop_string(at: int) -> dict[str, Any]:
    """A stop string that is complete with the answer's token number `at`."""
    asked: list[int] = []

    def complete(token: int) -> bool:
        asked.append(token)
        return len(asked) == at

    return {"stop_when": complete}


@pytest.mark.parametrize("how", ["stop token", "stop string", "max_tokens"])
@pytest.mark.parametrize("at", [2, 3, 6, 17])
def test_an_end_inside_a_block_leaves_the_snapshot_of_a_run_without_drafts(lab: Lab, how: str, at: int) -> None:
    """With the same tokens and position; its state and its logits differ by rounding alone, and restoring it works."""
    asked, whole = prompt(4), plain(lab, prompt(4), SEEDED)
    stop = whole.tokens[at - 1]
    at = whole.tokens.index(stop) + 1

    def fields() -> dict[str, Any]:
        if how == "stop token":
            return {"stop_tokens": frozenset({stop}), "max_tokens": LENGTH}
        return {"max_tokens": LENGTH, **stop_string(at)} if how == "stop string" else {"max_tokens": at}

    straight = lab.engine()
    expected = Answer(straight, asked, SEEDED, **fields())
    engine = lab.engine(
        drafts=paper_drafts(ALWAYS, text(asked, whole), [*text(asked, expected), *random_tokens(90, 5)])
    )
    answer = Answer(engine, asked, SEEDED, **fields())
    assert answer.tokens == expected.tokens
    assert (answer.finished.reason, answer.finished.stop_token) == (
        expected.finished.reason,
        expected.finished.stop_token,
    )
    assert answer.finished.completion_tokens == expected.finished.completion_tokens
    straight.stop()
    longer = Prompt((*asked.tokens, *answer.tokens, *random_tokens(9, 6)))
    again = Answer(engine, longer, max_tokens=2)
    assert again.finished.cache.restored == expected.finished.cache.restored + seen(straight)[-1].position
    engine.stop()
    ours = next(s for s in seen(engine) if s.position == seen(straight)[-1].position)
    theirs = seen(straight)[-1]
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert apart(ours, theirs) <= 1e-5
    assert again.tokens == plain(lab, longer, max_tokens=2).tokens


def test_state_after_a_rewind_is_the_state_of_single_steps(lab: Lab) -> None:
    """Recurrent state too; the manifest says how it was computed."""
    asked, whole = prompt(7), plain(lab, prompt(7))
    for end in range(3, 30, 4):
        engine = lab.engine(drafts=paper_drafts(SOMETIMES, text(asked, whole)))
        Answer(engine, asked, max_tokens=end).wait()
        engine.stop()
        snapshot = seen(engine)[-1]
        assert snapshot.position == 100 + end - 1
        assert [stretch.how for stretch in snapshot.stretches] == ["prefill", "verify"]
        assert apart(snapshot, lab.never_stopped(snapshot)) <= 1e-6


# Splits, small pools, restores


def test_two_stages_go_back_together(lab: Lab) -> None:
    expected = plain(lab, prompt(8), SEEDED)
    engine = lab.engine(spans=(Span(0, 3), Span(3, 8)), drafts=paper_drafts(SOMETIMES, text(prompt(8), expected)))
    answers = [Answer(engine, prompt(8), SEEDED, max_tokens=LENGTH) for _ in range(3)]
    assert all(answer.tokens == expected.tokens for answer in answers)
    assert all(answer.finished.draft.accepted for answer in answers)
    engine.stop()


def test_a_shard_goes_back_with_the_stages_around_it(lab: Lab, tmp_path: Path) -> None:
    middle, expected = Span(3, 6), plain(lab, prompt(8), SEEDED)
    terms = Terms("tiny", middle, "float32", "float32", slots=4)
    shard = ShardServer(
        {"middle": lab.stage(middle)},
        f"ipc://{tmp_path}/shard",
        fingerprint="tiny",
        hidden_dtype="float32",
        kv_dtype="float32",
    )
    shard.start()
    stages = [
        lab.stage(Span(0, 3)),
        RemoteStage(shard.endpoint, "middle", terms, deadlines=QUICK),
        lab.stage(Span(6, 8)),
    ]
    settings = EngineSettings(context=2048, grid=64, drafts=paper_drafts(SOMETIMES, text(prompt(8), expected)))
    engine = Engine(Pipeline(stages), RecordingCache(local_tiers(PLENTY)), settings).start()
    answers = [Answer(engine, prompt(8), SEEDED, max_tokens=LENGTH) for _ in range(2)]
    assert all(answer.tokens == expected.tokens for answer in answers)
    assert all(answer.finished.draft.accepted for answer in answers)
    engine.stop()
    shard.stop()
    assert apart(seen(engine)[-1], lab.never_stopped(seen(engine)[-1])) <= 1e-6


def test_a_stage_that_is_lost_while_it_goes_back_is_recovered(dense: Lab) -> None:
    expected = plain(dense, prompt(13))
    front, back = dense.stage(Span(0, 5)), Mortal(dense.stage(Span(5, 8)), {"rewind": 1})
    settings = EngineSettings(context=2048, grid=64, drafts=paper_drafts(SOMETIMES, text(prompt(13), expected)))
    engine = Engine(Pipeline([front, back]), RecordingCache(local_tiers(PLENTY)), settings).start()
    answer = Answer(engine, prompt(13), max_tokens=LENGTH)
    assert answer.tokens == expected.tokens
    assert back.deaths == 1
    engine.stop()


def test_a_pool_that_holds_little_more_than_the_answers_changes_nothing(dense: Lab) -> None:
    """Blocks that find no page give way to single rows, and sequences to older ones."""
    asked = [prompt(seed, 60) for seed in range(4)]
    expected = [plain(dense, each, max_tokens=80) for each in asked]
    drafts = paper_drafts(SOMETIMES, *(text(p, e) for p, e in zip(asked, expected, strict=True)))
    engine = dense.engine(ram=0, pages=7, drafts=drafts)
    answers = [Answer(engine, each, max_tokens=80) for each in asked]
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert engine.status().pages.used == 0
    engine.stop()


@pytest.mark.parametrize("tier", ["device", "ram", "disk"])
def test_drafting_goes_on_after_a_restore(dense: Lab, tmp_path: Path, tier: str) -> None:
    asked = prompt(9)
    first = plain(dense, asked)
    longer = Prompt((*text(asked, first), *random_tokens(20, 10)))
    second = plain(dense, longer)
    drafts = paper_drafts(SOMETIMES, text(asked, first), text(longer, second))
    ram, folder = (0, tmp_path) if tier == "disk" else (PLENTY, None)
    engine = dense.engine(folder, ram, drafts=drafts, keeps=tier == "device")
    assert Answer(engine, asked, max_tokens=LENGTH).tokens == first.tokens
    if tier == "disk":
        engine.stop()
        engine = dense.engine(folder, ram, drafts=drafts)
    answer = Answer(engine, longer, max_tokens=LENGTH)
    assert answer.tokens == second.tokens
    assert answer.finished.cache.restored_from[tier] == len(asked.tokens) + LENGTH - 1
    assert answer.finished.draft.accepted
    engine.stop()


# Truth


def test_the_answer_says_who_drafted_or_why_nothing_was_drafted(dense: Lab) -> None:
    engine = dense.engine(drafts=Drafts(off="--draft off"))
    assert Answer(engine, prompt(11)).finished.draft.off == "--draft off"
    engine.stop()
    engine = dense.engine(drafts=Drafts("lookup", PromptLookup, None))
    short = Answer(engine, prompt(11), max_tokens=2).finished.draft
    assert (short.drafter, short.off) == ("off", "an answer of 2 tokens at most leaves nothing to draft")
    draft = Answer(engine, prompt(11)).finished.draft
    said = None if draft.blocks else "nothing was proposed that would have paid for its time"
    assert (draft.drafter, draft.off) == ("lookup", said)
    engine.stop()


def test_text_that_repeats_itself_is_looked_up(dense: Lab) -> None:
    """The tiny model says nothing twice by itself; a bias makes it."""
    sampling = Sampling(temperature=0, logit_bias={7: 1000.0})
    engine = dense.engine(drafts=Drafts("lookup", PromptLookup, None))
    answer = Answer(engine, prompt(12), sampling, max_tokens=LENGTH)
    assert answer.tokens == [7] * LENGTH
    assert answer.finished.reason is FinishReason.LENGTH
    assert answer.finished.draft.mean_accepted > 5
    engine.stop()


class Counting:
    """A drafter that only counts what it takes in."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def __len__(self) -> int:
        return sum(self.taken)

    def extend(self, tokens: Sequence[int]) -> None:
        self.taken.append(len(tokens))

    def propose(self, most: int) -> tuple[int, ...]:
        return (1,) * most


def test_a_long_prompt_is_taken_in_by_parts_and_nothing_is_proposed_before_its_end() -> None:
    drafter = Counting()
    draft, tokens = Draft("paper", drafter), [0] * (2 * LEARNT + 5)
    for _ in range(2):
        assert draft.propose(tokens, 9) == ()
        draft.learn(tokens)
    assert draft.propose(tokens, 9) == (1,) * 4
    assert drafter.taken == [LEARNT, LEARNT, 5]


def test_an_expectation_that_is_not_met_makes_the_sequence_rest() -> None:
    """A step was held back for it in vain; the second time it rests for two tokens."""

    class Odd(Counting):
        def propose(self, most: int) -> tuple[int, ...]:
            return (1,) * most if len(self) % 2 else ()

    draft = Draft("paper", Odd())
    for known, expected in ((3, True), (5, True), (7, False), (9, True)):
        assert draft.expects([0] * known, 9) == expected
        assert draft.propose([0] * (known + 1), 9) == ()


class Refusing:
    """A sequence of which the drafter is asked, and whose grammar refuses what it proposes."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.tokens, self.in_flight, self.verifies_unseen = draft, [1] * 10, 0, False

    def propose(self) -> tuple[int, ...]:
        return ()

    def admit(self, drafted: tuple[int, ...]) -> tuple[int, ...]:
        return ()

    def ask(self) -> Ask | None:
        most = self.draft.asks_for(self.tokens, 8)
        return Ask(0, len(self.tokens) - 1, 1, most) if most else None


@pytest.mark.parametrize("proposes", [3, 0])
@pytest.mark.parametrize("measured", [True, False])
def test_a_pass_of_which_nothing_may_follow_is_paid_for_and_the_drafter_rests(proposes: int, measured: bool) -> None:
    passes = list[int]()

    def ask(asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        passes.append(len(asks))
        return [(5,) * proposes for _ in asks]

    measures = Measures(Costs() if measured else None)
    for _ in range(FIRST_PLAIN if measures.costs is not None else 0):
        measures.costs.note_step(1, 1, 1.0)
    sequence = Refusing(Drafts(model="dflash", off=None).of(1000, measures))
    proposer = Proposer(ask)
    for _ in range(400):
        assert proposer.propose([sequence]) == ([()], None)
        sequence.tokens.append(1)
    assert 1 < len(passes) < 40
    assert sequence.draft.report().blocks == sequence.draft.report().proposed == 0


def test_a_block_for_which_no_page_is_free_makes_the_drafter_rest(dense: Lab) -> None:
    """Of a text that repeats itself, drafted blocks never fit; single rows do."""
    asked = prompt(1)
    expected = plain(dense, asked)
    engine = dense.engine(drafts=paper_drafts(ALWAYS, text(asked, expected)))
    fits = engine._launcher._scheduler._next_rows
    refused = list[int]()

    def rows(sequence: Any, drafted: tuple[int, ...], _: Any) -> Any:
        refused.append(len(drafted)) if drafted else None
        return fits(sequence, drafted, lambda s, end: end == s.position + 1)

    engine._launcher._scheduler._next_rows = rows  # type: ignore[method-assign]
    answer = Answer(engine, asked, GREEDY, max_tokens=LENGTH)
    assert answer.tokens == expected.tokens and answer.finished.draft.blocks == 0
    engine.stop()
    assert 1 < len(refused) < 8


CHEAP, DEAR = 0.01, 0.3  # rows, in tokens


@pytest.mark.parametrize(
    ("row", "filled"),
    [(CHEAP, {0: 0, 1: 1, 2: 3, 4: 7, 8: 11, 15: 15}), (DEAR, {1: 1, 3: 3, 4: 3, 5: 3, 6: 7, 7: 7})],
)
def test_a_block_fills_its_step_or_the_next_smaller_one_where_that_is_cheaper(
    row: float, filled: dict[int, int]
) -> None:
    """Recorded steps have 2, 4, 8, 12 or 16 rows."""
    assert {width: filling_step(width, lambda tokens: row * tokens) for width in filled} == filled


def test_a_filled_block_is_paid_for_too() -> None:
    costs = {4: 1.0, 7: 9.0}
    assert Width(lambda width: costs.get(width, 99.0), Purse(), lambda width: 7).at(0) == 4

"""An answer keeps to its grammar, however it is computed, and touches nobody else's."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from support.answers import arriving_together
from support.paper_drafter import PaperReader, paper_drafts
from support.snapshot_lab import PLENTY, Answer, Lab, RecordingCache, random_tokens
from support.vocabulary import longest_match

from rekindle.engine.drafting import Drafts
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.flight import Flight
from rekindle.engine.recorded_draws import RecordedDraws
from rekindle.engine.types import FinishReason, Sampling
from rekindle.grammar import Grammar, GrammarKind
from rekindle.grammar import guide as guides
from rekindle.grammar.compiler import Compiler, Vocabulary
from rekindle.grammar.frame import ThinkingFrame, in_library_form, whole
from rekindle.grammar.guide import Guide, Rules, make_masks
from rekindle.prefix import local_tiers
from rekindle.prompt import Prompt
from rekindle.spec import Span
from rekindle.speculative.lookup import PromptLookup
from rekindle.stages import Pipeline

STOP, OTHER_STOP = 318, 319
WORDS = (b"ab", b"ba", b"aa", b"12", b'{"', b'": ', b"</think>", b"\n\n", b"true", b"bab")
PIECES = [bytes([byte]) for byte in range(256)] + [*WORDS] + [b""] * (318 - 256 - len(WORDS)) + [b"<stop>", b"<other>"]
STOPS = frozenset({STOP})
SEEDED = Sampling(temperature=1.0, seed=5)
GREEDY = Sampling(temperature=0)
PENALISED = Sampling(temperature=1.0, seed=6, top_k=40, repetition_penalty=1.3, presence_penalty=0.5)
CARD = Sampling(temperature=1.0, top_k=20, top_p=0.8, presence_penalty=1.5, seed=3)
WIDE_OPEN = Sampling(temperature=0.9, top_p=0.9, frequency_penalty=0.3, seed=4)
LONG = r"([ab]{3,5} [0-9]{2};){6,9}"


@cache
def compiler(missing: bytes = b"") -> Compiler:
    tokens = [piece if not missing or missing not in piece else b"" for piece in PIECES]
    return Compiler(lambda: Vocabulary(tokens, [STOP, OTHER_STOP], [STOP], partial(longest_match, tokens[:STOP])))


def rules(text: str, kind: str = "regex", thinking: ThinkingFrame = ThinkingFrame.NONE) -> Rules:
    return compiler().compile(whole(thinking, in_library_form(Grammar(GrammarKind(kind), text, "field"))), "field")


def said(answer: Answer) -> str:
    return b"".join(PIECES[token] for token in answer.tokens).decode()


@pytest.fixture(scope="module")
def lab(make_tiny: Any) -> Lab:
    return Lab(make_tiny("dense"))


def prompt(seed: int = 1, length: int = 70) -> Prompt:
    return Prompt(random_tokens(length, seed))


def ask(engine: Any, asked: Prompt, grammar: Rules | None, sampling: Sampling = SEEDED, **fields: Any) -> Answer:
    return Answer(engine, asked, sampling, **{"max_tokens": 120, "stop_tokens": STOPS, "rules": grammar, **fields})


def alone(lab: Lab, asked: Prompt, grammar: Rules | None, sampling: Sampling = SEEDED, **settings: Any) -> Answer:
    engine = lab.engine(ram=0, **settings)
    answer = ask(engine, asked, grammar, sampling)
    answer.wait()
    engine.stop()
    return answer


# The language


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
@pytest.mark.parametrize(
    ("kind", "text", "matches"),
    [
        ("regex", LONG, LONG),
        ("regex", "/a[/]{1,3}\n?b", "/a[/]{1,3}\n?b"),
        ("choice", '["ab", "a", "ab ab", "12/\\"x\\"\\n"]', 'ab|a|ab ab|12/"x"\n'),
        ("lark", 'start: "x" (NUMBER ",")~2..3\nNUMBER: /[0-9]{1,3}/', "x([0-9]{1,3},){2,3}"),
        ("lark", 'root ::= "(" item{2} ")"\nitem ::= [ab] [12]', r"\(([ab][12]){2}\)"),
    ],
    ids=["regex", "regex with slashes", "choice", "lark", "ebnf"],
)
def test_an_answer_is_in_the_language(lab: Lab, kind: str, text: str, matches: str, sampling: Sampling) -> None:
    answer = alone(lab, prompt(), rules(text, kind), sampling)
    assert re.fullmatch(matches, said(answer)), said(answer)
    assert (answer.finished.reason, answer.finished.stop_token) == (FinishReason.STOP, STOP)


def test_a_grammar_begins_after_the_thinking(lab: Lab) -> None:
    answer = alone(lab, prompt(), rules("[0-9]{4}", thinking=ThinkingFrame.OPEN), SEEDED)
    thought, _, rest = said(answer).partition("</think>")
    assert answer.finished.reason is FinishReason.LENGTH or re.fullmatch(r"[ \n]{0,4}[0-9]{4}", rest)
    biased = Sampling(temperature=0, logit_bias={PIECES.index(b"</think>"): 100.0})
    assert re.fullmatch(
        r"</think>[ \n]{0,4}[0-9]{4}",
        said(alone(lab, prompt(), rules("[0-9]{4}", thinking=ThinkingFrame.OPEN), biased)),
    )
    assert thought or rest


def test_a_stop_token_is_allowed_exactly_where_the_grammar_ends(lab: Lab) -> None:
    eager = Sampling(temperature=0, logit_bias={STOP: 100.0, OTHER_STOP: 99.0, ord("c"): 50.0})
    engine = lab.engine(ram=0)
    for stops in (STOPS, STOPS | {OTHER_STOP}, STOPS | {ord("c")}):
        answer = ask(engine, prompt(), rules("[cd]{3,7}"), eager, stop_tokens=stops)
        assert len(said(answer)) == 3, "it stops as soon as it may, and no sooner"
        assert answer.finished.stop_token in stops
    engine.stop()


# However it is computed


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
@pytest.mark.parametrize("right", [1.0, 0.0, 0.7], ids=["always", "never", "sometimes"])
def test_drafts_change_no_token(lab: Lab, right: float, sampling: Sampling) -> None:
    plain = alone(lab, prompt(), rules(LONG), sampling)
    drafts = paper_drafts(right, [*prompt().tokens, *plain.tokens, STOP, 0, 0, 0])
    drafted = alone(lab, prompt(), rules(LONG), sampling, drafts=drafts)
    assert drafted.tokens == plain.tokens
    if right == 1.0:
        assert drafted.finished.draft.accepted > 10


class Unseen(PaperReader):
    """Could leave its tokens on the device."""

    drafts_ahead = True


def test_a_grammar_admits_drafted_tokens_before_they_are_verified(lab: Lab) -> None:
    plain = alone(lab, prompt(), rules(LONG))
    text = [*prompt().tokens, *plain.tokens, STOP, *[0] * 16]
    pipeline = Pipeline([lab.stage()], drafter=Unseen(0.7, text, 318))
    settings = EngineSettings(context=2048, grid=64, drafts=Drafts(model="drafter", off=None))
    engine = Engine(pipeline, RecordingCache(local_tiers(0)), settings).start()
    drafted = ask(engine, prompt(), rules(LONG))
    assert drafted.tokens == plain.tokens and drafted.finished.draft.off is None
    assert drafted.finished.draft.accepted > 3
    engine.stop()


def test_prompt_lookup_changes_no_token(lab: Lab) -> None:
    """The prompt repeats what the grammar allows, and what it does not."""
    shown = Prompt(tuple(b"abba 12;abba 12;xx;abba 12;abba;abba 12;" * 3))
    plain = alone(lab, shown, rules(LONG), GREEDY)
    drafted = alone(lab, shown, rules(LONG), GREEDY, drafts=Drafts("lookup", PromptLookup, None))
    assert drafted.tokens == plain.tokens and drafted.finished.draft.blocks > 0


@pytest.mark.parametrize(
    "settings",
    [{"async_steps": 1}, {"spans": (Span(0, 3), Span(3, 8))}, {"pages": 4, "slots": 2}],
    ids=["running ahead", "two stages", "few pages"],
)
def test_the_way_through_the_engine_changes_no_token(lab: Lab, settings: dict[str, Any]) -> None:
    """Nor those of others beside it."""
    constrained = [rules(LONG), rules("[0-9]{30}"), None, None]
    expected = [alone(lab, prompt(seed), grammar).tokens for seed, grammar in enumerate(constrained)]
    engine = lab.engine(ram=0, **settings)
    answers = [ask(engine, prompt(seed), grammar) for seed, grammar in enumerate(constrained)]
    assert [answer.tokens for answer in answers] == expected
    engine.stop()


def test_a_prefix_is_shared_with_requests_without_a_grammar(lab: Lab) -> None:
    cold = alone(lab, prompt(), rules(LONG))
    free = alone(lab, prompt(), None)
    engine = lab.engine()
    assert ask(engine, prompt(), None).tokens == free.tokens
    warm = ask(engine, prompt(), rules(LONG))
    assert warm.tokens == cold.tokens
    assert warm.finished.cache.computed == 0
    assert ask(engine, prompt(), None).tokens == free.tokens
    engine.stop()


# Ways that lead nowhere


def test_a_dead_end_ends_the_answer_with_a_note_and_no_garbage(lab: Lab) -> None:
    """No token of this vocabulary has a "z"."""
    source = whole(ThinkingFrame.NONE, in_library_form(Grammar(GrammarKind.REGEX, "a{4}z", "field")))
    answer = alone(lab, prompt(), compiler(b"z").compile(source, "field"))
    assert said(answer) == "aaaa"
    assert answer.finished.reason is FinishReason.LENGTH
    assert answer.finished.stuck is not None and "grammar" in answer.finished.stuck


def test_a_slow_grammar_ends_its_answer(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.grammar.guide.SLOW", 0.0)
    answer = alone(lab, prompt(), rules("a{100}"))
    assert answer.finished.stuck is not None and "ms per token" in answer.finished.stuck


class PanicException(BaseException):
    """What the library raises where Rust code panics."""


class Panicking:
    """A matcher at fault."""

    def deep_copy(self) -> Panicking:
        return self

    def consume_token(self, token: int) -> bool:
        raise PanicException("index out of bounds")

    def unsafe_compute_mask_ptr(self, *_: object) -> None:
        raise PanicException("index out of bounds")


def test_a_panic_of_the_library_ends_its_answer_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = lab.engine(ram=0, drafts=Drafts("lookup", PromptLookup, None))
    shown = Prompt(tuple(b"abba 12;" * 9))
    expected, grammar = alone(lab, prompt(), None).tokens, rules(LONG)
    with monkeypatch.context() as patch:
        patch.setattr(Rules, "begin", lambda rules, stops: broken(Guide(rules.matcher, rules.vocabulary, stops)))
        bad = ask(engine, shown, grammar)
    beside = ask(engine, prompt(), None)
    assert bad.finished.stuck == "the grammar's library failed: index out of bounds"
    assert beside.tokens == expected
    engine.stop()


def broken(way: Guide) -> Guide:
    way._matcher = Panicking()
    return way


# One answer's way through a grammar


def guide(text: str) -> Guide:
    return rules(text).begin(STOPS)


def allowed(way: Guide) -> set[int]:
    return {token for token in range(len(PIECES)) if int(way.mask[token // 32]) >> token % 32 & 1}


def test_drafted_tokens_are_tried_and_taken_back() -> None:
    way = guide("[ab]{2}[0-9]{2}")
    before = allowed(way)
    assert way.admit([ord("a"), ord("b"), ord("1"), ord("x"), ord("2")]) == tuple(b"ab1")
    assert allowed(way) == before
    for token in b"ab1":
        way.accept(token)
    assert allowed(way) == set(b"0123456789")


def test_a_draft_that_others_followed_differently_leaves_no_trace() -> None:
    way, plain = guide("[ab]{2}[0-9]{2}"), guide("[ab]{2}[0-9]{2}")
    way.admit(list(b"ab1"))
    for token in b"bb4":
        way.accept(token)
        plain.accept(token)
        assert allowed(way) == allowed(plain)


def test_a_drafted_stop_token_is_admitted_where_the_grammar_ends() -> None:
    assert guide("cd").admit([*b"cd", STOP, 0]) == (*b"cd", STOP)
    assert guide("cd").admit([*b"c", STOP, *b"d"]) == (*b"c",)


# Masks of several answers at the same time

WAYS = ("[ab]{40}", "([ab]{2}[0-9]{2};)*", "[0-9]{3}", "(ab|b[0-9])+", "a{50}")


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As with many cores, and for guides that are not known yet; how many masks each call made."""
    made, execute = list[int](), guides._executor()

    class Counting:
        def unsafe_compute_mask_ptr(self, pairs: list[Any], *where: int) -> None:
            made.append(len(pairs))
            execute.unsafe_compute_mask_ptr(pairs, *where)

    monkeypatch.setattr(guides, "cores", lambda: 8)
    monkeypatch.setattr(guides, "_executor", Counting)
    monkeypatch.setattr(guides, "SUSPECT", float("inf"))  # the machine may have other work
    monkeypatch.setattr(guides, "TRUSTED", 0)
    return made


def test_masks_made_together_are_those_made_one_by_one(together: list[int]) -> None:
    def begun(text: str) -> Guide:
        return rules(text).begin(STOPS | {OTHER_STOP})

    ways, plain, rng = [begun(text) for text in WAYS], [begun(text) for text in WAYS], np.random.default_rng(0)
    for _ in range(30):
        for number, (way, one) in enumerate(zip(ways, plain, strict=True)):
            tokens = sorted(allowed(one) - {STOP, OTHER_STOP})
            if not tokens:  # at its end
                ways[number], plain[number] = begun(WAYS[number]), begun(WAYS[number])
                continue
            token = int(rng.choice(tokens))
            way.accept(token)
            one.accept(token)
        make_masks(ways)
        assert [(allowed(way), way.stuck) for way in ways] == [(allowed(one), one.stuck) for one in plain]
    assert len(together) >= 25 and max(together) == len(WAYS)


def test_after_masks_that_took_long_each_is_timed_by_itself(
    together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = [guide("c{50}") for _ in range(4)]
    monkeypatch.setattr(guides, "SUSPECT", 0.0)
    for calls in (1, 1):  # the second step makes none together
        for way in ways:
            way.accept(ord("c"))
        make_masks(ways)
        assert len(together) == calls
        assert all(allowed(way) == {ord("c")} for way in ways)


def test_a_fault_amid_masks_made_together_is_its_own_guides_alone(
    together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        def unsafe_compute_mask_ptr(self, *_: object) -> None:
            raise PanicException("index out of bounds")

    monkeypatch.setattr(guides, "_executor", Failing)
    ways = [guide("c{50}") for _ in range(4)]
    for way in ways:
        way.accept(ord("c"))
    ways[1]._matcher = Panicking()  # type: ignore[assignment]
    make_masks(ways)
    assert [way.stuck is None for way in ways] == [True, False, True, True]
    assert allowed(ways[1]) == set()


def test_answers_whose_masks_are_made_together_are_those_of_runs_alone(lab: Lab, together: list[int]) -> None:
    asked = [(CARD, rules("[0-9]{12}")), (PENALISED, rules("[0-9]{12}")), (CARD, rules(LONG)), (CARD, rules("[ab]{9}"))]
    expected = [alone(lab, prompt(seed), each[1], each[0]).tokens for seed, each in enumerate(asked)]
    engine = lab.engine(ram=0)
    with arriving_together(engine):
        answers = [ask(engine, prompt(seed), grammar, sampling) for seed, (sampling, grammar) in enumerate(asked)]
    assert [answer.tokens for answer in answers] == expected
    engine.stop()
    assert together


# Recorded draws, as on a GPU


def recording(lab: Lab, ram: int = 0, **settings: Any) -> tuple[Any, list[int]]:
    """An engine that replays draws as a GPU does, by running them again; and the replays."""
    replays = list[int]()

    def record(step: Any) -> Any:
        def replay() -> None:
            replays.append(1)
            step()

        return replay

    engine = lab.engine(ram=ram, **settings)
    vocab = lab._oracle.model.spec.drawable or lab._oracle.model.spec.vocab
    draws = RecordedDraws(record, torch.device("cpu"), vocab, 4)
    engine._launcher.draw = engine._restorer.draw = draws  # type: ignore[method-assign]
    return engine, replays


@pytest.mark.parametrize("sampling", [CARD, replace(CARD, temperature=0)], ids=["drawn", "greedy"])
def test_the_first_token_of_a_prompt_restored_whole_is_a_recorded_draw_too(lab: Lab, sampling: Sampling) -> None:
    engine, replays = recording(lab, ram=PLENTY)
    first = ask(engine, prompt(), None, sampling, max_tokens=1)
    assert first.finished.cache.restored == 0 and len(replays) == 1
    again = ask(engine, prompt(), None, sampling, max_tokens=1)
    assert again.finished.cache.restored == len(prompt().tokens) and len(replays) == 2
    assert first.tokens == again.tokens
    engine.stop()


@pytest.mark.parametrize("settings", [{"async_steps": 1}, {"drafts": Drafts("lookup", PromptLookup, None)}])
def test_recorded_draws_change_no_token(lab: Lab, settings: dict[str, Any]) -> None:
    """Of several answers at once: with penalties, with a grammar, running ahead, with drafts."""
    asked = [(CARD, None), (PENALISED, rules("[0-9]{12}")), (CARD, rules(LONG))]
    expected = [alone(lab, prompt(seed), each[1], each[0]).tokens[:8] for seed, each in enumerate(asked)]
    engine, replays = recording(lab, **settings)
    answers = [
        ask(engine, prompt(seed), grammar, sampling, max_tokens=8) for seed, (sampling, grammar) in enumerate(asked)
    ]
    assert [answer.tokens for answer in answers] == expected
    engine.stop()
    assert len(replays) >= 5


def test_recorded_draws_without_top_k_change_no_token(lab: Lab) -> None:
    expected = alone(lab, prompt(), None, WIDE_OPEN).tokens[:8]
    engine, replays = recording(lab, async_steps=1)
    assert ask(engine, prompt(), None, WIDE_OPEN, max_tokens=8).tokens == expected
    engine.stop()
    assert len(replays) >= 7


def test_the_next_draw_is_on_its_way_before_a_client_gets_a_token(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a grammar, which has to know the token first."""
    draws, at_tokens, draw = list[int](), list[int](), Flight.draw

    def noted(self: Flight) -> None:
        if self.drawn is None and self.drawing:
            draws.append(1)
        draw(self)

    monkeypatch.setattr(Flight, "draw", noted)
    engine = lab.engine(ram=0, async_steps=1)
    fields = {"max_tokens": 10, "stop_tokens": STOPS, "rules": rules(LONG)}
    answer = Answer(engine, prompt(), CARD, at_token=lambda _: at_tokens.append(len(draws)), **fields)
    assert len(answer.tokens) == 10
    engine.stop()
    assert all(drawn >= number + 1 for number, drawn in enumerate(at_tokens[1:-1], 2)), at_tokens

"""Laws of text that comes token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import BadRequest
from rekindle.text import Detokenizer, StopText, StopWatcher, Tokenizer


@given(ids=st.lists(st.integers(0, 2100), max_size=30), skip=st.booleans())
def test_pushes_joined_are_the_decode_of_all(golden: Tokenizer, ids: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(golden, skip)
    assert "".join([*map(detokenizer.push, ids), detokenizer.finish()]) == golden.decode(ids, skip)


@given(text=st.text(alphabet=st.sampled_from("aé好👍\u200d🏽\n"), max_size=15))
def test_no_push_shows_half_a_character(golden: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(golden)
    assert "\ufffd" not in "".join(map(detokenizer.push, golden.encode(text)))
    assert detokenizer.finish() == ""


def test_an_unfinished_character_shows_at_the_end_only(golden: Tokenizer) -> None:
    first, *_ = golden.encode("\U0001f9ff")
    detokenizer = Detokenizer(golden)
    assert detokenizer.push(first) == ""
    assert detokenizer.finish() == "\ufffd"


def test_a_dropped_control_token_does_not_tear_a_character(golden: Tokenizer) -> None:
    first, *rest = golden.encode("\U0001f9ff")
    control = golden.id_of("<|im_end|>")
    assert control is not None
    detokenizer = Detokenizer(golden)
    assert "".join(map(detokenizer.push, [first, control, *rest])) == "\U0001f9ff"


def _first_complete(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the shortest beginning of the text that ends with a stop string; of several, the longest."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


_LETTERS = st.text(alphabet="ab\n", max_size=14)


@given(pieces=st.lists(_LETTERS, max_size=8), stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_stop_text_does_not_depend_on_how_text_was_cut(pieces: list[str], stops: list[str]) -> None:
    watcher = StopText(stops)
    shown = "".join([*map(watcher.push, pieces), watcher.finish()])
    assert (shown, watcher.met) == _first_complete("".join(pieces), stops)


@given(text=_LETTERS, stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_shown_can_become_part_of_a_stop_string(text: str, stops: list[str]) -> None:
    watcher, shown, seen = StopText(stops), "", ""
    for letter in text:
        seen += letter
        shown += watcher.push(letter)
        if watcher.met:
            break
        tail = next(n for n in range(len(seen), -1, -1) if any(s.startswith(seen[len(seen) - n :]) for s in stops))
        assert shown == seen[: len(seen) - tail]  # and nothing is held longer than needed


def test_text_after_the_stop_is_never_shown() -> None:
    watcher = StopText(["END"])
    assert [watcher.push("one E"), watcher.push("ND two"), watcher.push("three"), watcher.finish()] == [
        "one ",
        "",
        "",
        "",
    ]
    assert watcher.met == "END"


def test_watcher_ends_with_the_token_that_completes_a_stop_string(golden: Tokenizer) -> None:
    ids = golden.encode("say hello\nUser: me")
    watcher = StopWatcher(Detokenizer(golden), ["\nUser:"])
    said = next(n for n in range(1, len(ids) + 1) if watcher.push(ids[n - 1]))
    assert "\nUser:" in golden.decode(ids[:said])
    assert "\nUser:" not in golden.decode(ids[: said - 1])


def test_without_stop_strings_nothing_is_held_and_nothing_stops(golden: Tokenizer) -> None:
    assert StopText([]).push("abc") == "abc"
    watcher = StopWatcher(Detokenizer(golden), [])
    assert not any(map(watcher.push, golden.encode("abc")))


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadRequest, match="empty"):
        StopText([""])

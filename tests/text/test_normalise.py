"""Volatile lines of clients."""

from __future__ import annotations

from rekindle.text import normalise_messages
from rekindle.text.normalise import dated_line

HEADER = "x-anthropic-billing-header: cc_version=2.1; cch=0f3a1;"


def test_a_volatile_line_goes_and_its_neighbours_stay() -> None:
    messages = [{"role": "system", "content": f"You are kind.\n{HEADER}\nBe brief."}]
    assert normalise_messages(messages) == [{"role": "system", "content": "You are kind.\nBe brief."}]


def test_a_part_or_message_of_nothing_else_goes_whole() -> None:
    parts = [{"type": "text", "text": HEADER}, {"type": "text", "text": "Be brief.", "cache_control": {}}]
    user = {"role": "user", "content": "hi"}
    kept = [{"role": "system", "content": parts[1:]}, user]
    assert normalise_messages([{"role": "system", "content": parts}, user]) == kept
    assert normalise_messages([{"role": "system", "content": HEADER}, user]) == [user]


def test_only_the_named_role_and_only_the_beginning_of_a_line_count() -> None:
    messages = [{"role": "user", "content": HEADER}, {"role": "system", "content": f"see {HEADER}"}]
    assert normalise_messages(messages) == messages


def test_messages_without_text_pass() -> None:
    messages = [{"role": "system", "content": ""}, {"role": "assistant", "content": None, "tool_calls": []}]
    assert normalise_messages(messages) == messages


def test_the_callers_messages_are_left_alone() -> None:
    messages = [{"role": "system", "content": f"a\n{HEADER}"}]
    normalise_messages(messages)
    assert messages[0]["content"] == f"a\n{HEADER}"


def test_no_rules_remove_nothing() -> None:
    messages = [{"role": "system", "content": HEADER}]
    assert normalise_messages(messages, ()) == messages


def test_a_dated_line_is_found_in_time_that_grows_with_the_text() -> None:
    """A run of blank lines was read again from each of them: 400,000 would have taken ten minutes."""
    assert dated_line("a" + "\n" * 400_000 + "today is 2026-11-17\n") == [400_001]
    assert dated_line("a" + "\n" * 400_000 + '  {"day": "2026-11-17"}') == []

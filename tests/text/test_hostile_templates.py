"""Templates are programs out of somebody's file: what they ask for has limits, and nobody else is hurt."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from rekindle.errors import BadModelFile, BadRequest
from rekindle.text import ChatTemplate, Tokenizer, TurnMemory, sandbox
from rekindle.text.sandbox import Template
from rekindle.text.sentinels import MAX_DEPTH, is_deep

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASK = [{"role": "user", "content": "attack"}]


def only_when_asked(body: str) -> str:
    """Harmless for the probes at load."""
    return "{% if messages[0].content == 'attack' %}" + body + "{% endif %}" + PLAIN


TOO_LONG = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ ((messages | length + 8) ** 99999999) | length }}",
    "replacing": "{% set s = 'x' * 9999 %}{% for i in range(99999) %}{{ s.replace('x', 'yy')[:0] }}{% endfor %}",
}
TOO_LARGE = {
    "a wide format": "{{ '%1000000000d' % (messages | length) }}",
    "a wide format method": "{{ '{:>3000000000}'.format('x') }}",
    "multiplied text": "{{ 'x' * 10 ** 10 }}",
    "a multiplied list": "{{ ([1] * 10 ** 9) | length }}",
    "doubled text": "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubled lists": "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "a wide center": "{{ 'x' | center(3000000000) }}",
    "quadratic replacing": "{% set s = 'x' * 99999 %}{{ s.replace('x', s) | length }}",
    "a long text": "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    "a macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}


def template(tokenizer: Tokenizer, body: str) -> ChatTemplate:
    return ChatTemplate(only_when_asked(body), tokenizer)


@pytest.mark.parametrize("body", TOO_LONG.values(), ids=TOO_LONG.keys())
def test_a_template_that_takes_too_long_fails_its_request(
    body: str, golden: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = template(golden, body)
    monkeypatch.setattr(sandbox, "SECONDS", 0.3)
    with pytest.raises(BadRequest, match=r"chat template refuses these messages: .*(0\.3 seconds|memory)"):
        made.render(ASK)
    assert made.render([{"role": "user", "content": "hello"}]).tokens, "the next request finds a template that works"


@pytest.mark.parametrize("body", TOO_LARGE.values(), ids=TOO_LARGE.keys())
def test_a_template_that_needs_too_much_fails_its_request(body: str, golden: Tokenizer) -> None:
    made = template(golden, body)
    with pytest.raises(BadRequest, match="the model's chat template refuses these messages: ") as caught:
        made.render(ASK)
    assert len(str(caught.value)) < 300
    assert made.render([{"role": "user", "content": "hello"}]).tokens


def test_others_render_while_a_template_is_stuck(golden: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One C call that would hold this interpreter for seconds, were it made here."""
    monkeypatch.setattr(sandbox, "SECONDS", 3.0)
    stuck = template(golden, "{{ (messages | length + 8) ** 99999999 }}")
    ended = threading.Event()

    def attack() -> None:
        with pytest.raises(BadRequest):
            stuck.render(ASK)
        ended.set()

    thread = threading.Thread(target=attack)
    thread.start()
    rendered = 0
    while not ended.is_set():
        stuck.render([{"role": "user", "content": "hello"}])
        rendered += 1
        time.sleep(0.01)
    thread.join()
    assert rendered > 1


def test_a_template_that_can_render_nothing_fails_at_load(golden: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.3)
    with pytest.raises(BadModelFile, match=r"renders no conversation of a few words: .* more than 0\.3 seconds"):
        ChatTemplate(TOO_LONG["nested loops"], golden)


BROKEN = {
    "a syntax error": "{% if %}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "an open tag": "{% include 'x' %}{%",
    "a constant of many digits": "{{ 9 ** 99999999 }}",
}


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN.keys())
def test_a_template_that_does_not_compile_is_one_sentence_at_load(
    source: str, golden: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 1.0)
    with pytest.raises(BadModelFile, match="the chat template does not compile: "):
        ChatTemplate(source, golden)


def test_values_nested_without_end_fail_their_request() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(BadRequest, match="nested too deep"):
        Template("{{ x }}").render({"x": deep})


def test_a_template_does_not_inherit_the_servers_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_API_KEY", "the server's own")
    monkeypatch.setattr(sandbox._workers, "_idle", [])
    Template("x")
    (worker,) = sandbox._workers._idle
    assert b"REKINDLE_API_KEY" not in Path(f"/proc/{worker._process.pid}/environ").read_bytes()


def test_how_deep_a_value_is_depends_on_what_lies_deepest() -> None:
    def nested(levels: int, inside: list[object]) -> object:
        return inside if levels == 1 else [0, {"a": nested(levels - 1, inside)}][levels % 2 :]

    for levels in (1, 2, MAX_DEPTH // 2, MAX_DEPTH // 2 + 1):
        value = nested(levels, [1])
        deepest = _depth(value)
        assert is_deep(value) == (deepest >= MAX_DEPTH)
        assert is_deep(nested(levels, [])) == (deepest - 1 >= MAX_DEPTH)
    assert not is_deep(7) and not is_deep([]) and not is_deep(list(range(1000)))


def _depth(value: object) -> int:
    """Levels above the deepest thing in it."""
    inside = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return 1 + max(map(_depth, inside)) if inside else 0


@pytest.mark.parametrize("depth", [65, 600, 5000])
def test_arguments_of_a_call_that_nest_too_deep_are_refused_in_a_sentence(golden: Tokenizer, depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(BadRequest, match="arguments"):
        template(golden, "").render(messages)
    memory = TurnMemory()
    memory.restored(messages)
    memory.remember_message(messages[1])

"""What a template takes of thinking and effort is found by asking it."""

from __future__ import annotations

from rekindle.text import ChatTemplate, Tokenizer

CHOOSY = """{%- if reasoning_effort is defined and reasoning_effort not in ['low', 'medium', 'xhigh'] %}
{{- raise_exception('Unknown effort') }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"""


def test_a_choosy_template_says_which_efforts_it_takes(golden: Tokenizer, qwen: ChatTemplate) -> None:
    assert ChatTemplate(CHOOSY, golden).efforts == ("low", "medium", "xhigh")
    assert qwen.efforts == ()
    assert qwen.takes_option("enable_thinking")
    assert not qwen.takes_option("thinking"), "a part of another name is no name"


def test_thinking_is_closed_as_the_template_closes_it(golden: Tokenizer, qwen: ChatTemplate) -> None:
    tokens = qwen.thinking_tokens
    assert tokens is not None
    assert golden.decode(tokens.close, skip_control=False) == "\n</think>\n\n"
    assert (tokens.begin, tokens.end) == (golden.id_of("<think>"), golden.id_of("</think>"))
    shows_none = ChatTemplate(CHOOSY, golden).thinking_tokens
    assert shows_none is not None and shows_none.close == tokens.close

"""What a grammar leaves no choice about is written as the model writes it."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from support.vocabulary import longest_match, qwen_vocabulary

from rekindle.api.model_text import ModelText
from rekindle.grammar import Grammar, GrammarKind
from rekindle.grammar.calls import CallableTool, CallFormat, calls_only
from rekindle.grammar.compiler import Compiler, Vocabulary
from rekindle.grammar.frame import ThinkingFrame, in_library_form, whole
from rekindle.grammar.guide import Guide
from rekindle.text import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(qwen_vocabulary())


def walked(tokenizer: Tokenizer, guide: Guide, text: str) -> list[int]:
    """Along the text, with the longest token that the grammar allows."""
    left, taken = text.encode(), list[int]()
    while left:
        allowed = np.flatnonzero(np.unpackbits(guide.mask.view(np.uint8), bitorder="little")).tolist()
        fitting = [(len(data), id) for id in allowed if (data := tokenizer.token_bytes(id)) and left.startswith(data)]
        assert fitting, f"nothing goes on with {left!r}"
        size, token = max(fitting)
        guide.accept(token)
        taken.append(token)
        left = left[size:]
    return taken


ORDER = {
    "type": "object",
    "properties": {"customer": {"type": "string"}, "country": {"enum": ["France", "Germany"]}},
    "required": ["customer", "country"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar(GrammarKind.REGEX, r"The answer is (yes|no)\.", "x"), "The answer is yes."),
        (Grammar.of_choices(["another place", "some other place"], "x"), "some other place"),
        (Grammar.of_schema(ORDER, "x"), '{"customer": "Anna", "country": "Germany"}'),
    ],
)
def test_forced_text_has_the_tokens_that_the_model_would_write(
    tokenizer: Tokenizer, grammar: Grammar, text: str
) -> None:
    rules = ModelText(tokenizer, None).compile(whole(ThinkingFrame.NONE, in_library_form(grammar)), "x")
    taken = walked(tokenizer, rules.begin(tokenizer.stop_ids), text)
    assert len(taken) <= len(tokenizer.encode(text)) + 1, [tokenizer.token_text(token) for token in taken]


def test_markup_is_its_token(tokenizer: Tokenizer) -> None:
    call = calls_only([CallableTool("read", ORDER, True, "x")], CallFormat.XML, False)
    rules = ModelText(tokenizer, None).compile(whole(ThinkingFrame.NONE, call), "x")
    guide = rules.begin(tokenizer.stop_ids)
    taken = walked(tokenizer, guide, "<tool_call>\n<function=read>\n<parameter=customer>\n")
    assert taken[0] == tokenizer.id_of("<tool_call>")


def test_a_tokenizer_that_changes_text_leaves_it_letter_by_letter() -> None:
    tokens = [*(bytes([byte]) for byte in range(256)), b"<stop>", b"\xc3\xa9", b"ab"]

    def normal(text: str) -> list[int]:
        return longest_match([*tokens[:256], b"", *tokens[257:]], unicodedata.normalize("NFC", text))

    compiler = Compiler(lambda: Vocabulary(tokens, [256], [256], normal))
    for text, first in (("ab", {258}), ("e\u0301", {ord("e")})):
        source = whole(ThinkingFrame.NONE, in_library_form(Grammar(GrammarKind.REGEX, text, "x")))
        mask = compiler.compile(source, "x").begin().mask
        assert {id for id in range(len(tokens)) if int(mask[id // 32]) >> id % 32 & 1} == first

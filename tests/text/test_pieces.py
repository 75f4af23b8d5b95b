"""Long texts are encoded in pieces, and no further than their reader wants."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.api import ModelText
from rekindle.errors import BadRequest, PromptTooLong
from rekindle.text import Tokenizer, TooManyTokens, pieces
from rekindle.text.pretokenizers import PRE_TOKENIZERS

LETTERS = st.one_of(
    st.text(max_size=40),
    st.text("ab Z9_\n\t.,'’!?-、。中é\u0301½²ſ<", max_size=60),
    st.sampled_from(["don't ", "we'LL.", " x1 ", "\r\n", "  \n  ", "…", "a.b,c;d", "日本語。文", "e\u0301 e\u0301."]),
)


def byte_vocabulary(pre: str) -> dict[str, Any]:
    from rekindle.text.tokenizer import _byte_alphabet

    alphabet = sorted(_byte_alphabet(), key=_byte_alphabet().get)  # type: ignore[arg-type]
    blank, newline = alphabet[32], alphabet[10]
    merges = [("a", "b"), (blank, "a"), (blank, "ab"), ("a", "a"), ("aa", "aa"), (".", newline), (".", ","), ("Z", "9")]
    tokens = [*alphabet, *dict.fromkeys("".join(pair) for pair in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
    }


TOKENIZERS = {pre: Tokenizer.from_gguf(byte_vocabulary(pre)) for pre in PRE_TOKENIZERS}


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(LETTERS, max_size=12))
def test_the_ids_of_the_pieces_are_the_ids_of_the_text(pre: str, parts: list[str]) -> None:
    tokenizer, text = TOKENIZERS[pre], "".join(parts).encode("utf-8", "ignore").decode()
    whole = tokenizer._backend.encode(text, add_special_tokens=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", 3)
        cut = list(pieces._pieces(text))
        assert "".join(cut) == text
        assert tokenizer.encode(text) == whole.ids
        assert tokenizer.encode_with_ends(text) == (whole.ids, [end for _, end in whole.offsets])


def test_a_long_prose_is_cut_at_all() -> None:
    assert len(list(pieces._pieces("The quick brown fox. " * 10_000))) > 3


class Counting:
    """A backend that counts the characters it was given."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.characters = 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, **options)


@pytest.fixture
def counted() -> tuple[Tokenizer, Counting]:
    tokenizer = Tokenizer.from_gguf(byte_vocabulary("qwen35"))
    tokenizer._backend = counting = Counting(tokenizer._backend)  # type: ignore[assignment]
    return tokenizer, counting


def test_encoding_stops_at_the_limit(counted: tuple[Tokenizer, Counting]) -> None:
    tokenizer, counting = counted
    text = "a b c. " * 200_000
    with pytest.raises(TooManyTokens):
        tokenizer.encode(text, limit=len(text) // 4)
    assert 0 < counting.characters < len(text) * 0.7
    assert len(tokenizer.encode("ab ab", limit=2)) == 2
    with pytest.raises(TooManyTokens):
        tokenizer.encode("ab ab ab", limit=2)


@pytest.mark.parametrize("letter", ["a", "x", " ", "中"])
def test_what_is_too_long_however_it_is_encoded_is_refused_before_it_is(
    counted: tuple[Tokenizer, Counting], letter: str
) -> None:
    tokenizer, counting = counted
    text = ModelText(tokenizer, None, context=1000)
    with pytest.raises(PromptTooLong, match="maximum context length is 1000"):
        text.encode(letter * 2_000_000, True)
    assert counting.characters == 0


def test_a_word_without_end_is_refused_before_it_is_merged(counted: tuple[Tokenizer, Counting]) -> None:
    tokenizer, counting = counted
    with pytest.raises(BadRequest, match="no word ends"):
        tokenizer.encode("x" * (pieces.LONGEST_WORD + 1))
    assert counting.characters == 0


def test_a_list_of_tokens_longer_than_the_context_is_refused_before_it_is_walked() -> None:
    text = ModelText(TOKENIZERS["qwen35"], None, context=1000)
    with pytest.raises(PromptTooLong, match="the prompt has 1001"):
        text.prompt_of([10**9] * 1001)


def test_a_panic_inside_the_library_is_an_error_with_a_message() -> None:
    class PanicException(BaseException):
        pass

    class Panicking:
        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            raise PanicException("index out of bounds")

    tokenizer = Tokenizer.from_gguf(byte_vocabulary("qwen35"))
    tokenizer._backend = Panicking()  # type: ignore[assignment]
    with pytest.raises(BadRequest, match="cannot encode this text: index out of bounds"):
        tokenizer.encode("x")

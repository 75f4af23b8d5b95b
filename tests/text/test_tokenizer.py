"""Laws of text ↔ ids."""

from __future__ import annotations

import importlib.util
import itertools
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import BadModelFile
from rekindle.text import Tokenizer

CORPUS = [
    "",
    " ",
    "Hello, world! It's we'll I'M",
    "family 👩‍👩‍👧‍👦 and flag 🏳️‍🌈 and skin 👍🏽",
    "你好，世界。這是一個測試。 日本語のテキスト 한국어",
    "e\u0301 a\u0308\u0323 हिन्दी में क्षत्रिय עִבְרִית ภาษาไทย x\u0301\u0302\u0303y",
    "1234567890123456789 3.14159 ١٢٣ Ⅷ ²³",
    "def f(x):\n\treturn  x\n\n\n\tif  a:\n        b\r\n\r\nend  \n",
    "\r\n\r\n \t \n x \r y",
    "<|im_start|>system<|im_end|> <think> </tool_call> <|endoftext|>",
    "ﬁ Å ℃ \u212b",
    "a" * 3000,
    "ab" * 1500 + "!" * 500,
    "null\x00 bell\x07 \u200b\ufeff \ue000",
]

QWEN35_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _qwen35_words(text: str) -> list[str]:
    return regex.findall(QWEN35_WORDS, unicodedata.normalize("NFC", text))


def _smollm_words(text: str) -> list[str]:
    """Every digit alone, GPT-2's words between."""
    return [word for piece in regex.findall(r"\p{N}|\P{N}+", text) for word in regex.findall(GPT2_WORDS, piece)]


def _reference_ids(metadata: dict[str, Any], words: list[str]) -> list[int]:
    """BPE by its definition: merge the pair of lowest rank until none is left. A byte without a token is dropped."""
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    printable = [b for b in range(256) if 0x21 <= b < 0x7F or 0xA1 <= b < 0xAD or b >= 0xAE]
    letter = {b: chr(b) for b in printable}
    letter |= {b: chr(256 + n) for n, b in enumerate(b for b in range(256) if b not in letter)}
    out: list[int] = []
    for word in words:
        parts = [letter[b] for b in word.encode()]
        while pairs := [(ranks[p], i) for i, p in enumerate(itertools.pairwise(parts)) if p in ranks]:
            _, at = min(pairs)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        out += [ids[part] for part in parts if part in ids]
    return out


@pytest.mark.parametrize("text", [text for text in CORPUS if len(text) < 1000])
def test_qwen35_is_bpe_by_its_definition(golden_metadata: dict[str, Any], golden: Tokenizer, text: str) -> None:
    assert golden.encode(text) == _reference_ids(golden_metadata, _qwen35_words(text))


@given(st.text(alphabet=st.sampled_from("aé\u0301\u0902क1२ \n\r\t'sS.<|ſ好👍\u200d"), max_size=20))
def test_qwen35_cuts_marks_as_another_regex_engine_does(
    golden_metadata: dict[str, Any], golden: Tokenizer, text: str
) -> None:
    assert golden.encode(text) == _reference_ids(golden_metadata, _qwen35_words(text))


def test_qwen35_keeps_a_mark_with_its_letter_and_qwen2_does_not(golden_metadata: dict[str, Any]) -> None:
    words = {}
    for pre in ("qwen35", "qwen2"):
        backend = Tokenizer.from_gguf(golden_metadata | {"tokenizer.ggml.pre": pre})._backend
        words[pre] = [span for _, span in backend.pre_tokenizer.pre_tokenize_str("कि x12")]
    assert words["qwen35"] == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert words["qwen2"] == [(0, 1), (1, 2), (2, 4), (4, 5), (5, 6)]


@pytest.mark.parametrize("text", [text for text in CORPUS if len(text) < 1000])
def test_smollm_is_bpe_by_its_definition(smol_metadata: dict[str, Any], smol: Tokenizer, text: str) -> None:
    assert smol.encode(text) == _reference_ids(smol_metadata, _smollm_words(text))


# transformers' conversion forgets that SmolLM cuts digits first, which shows with digits that are not ASCII.
@pytest.mark.slow
@pytest.mark.parametrize("text", [text for text in CORPUS if "Ⅷ" not in text])
def test_smollm_equals_transformers_on_the_same_file(smol_file: Path, smol: Tokenizer, text: str) -> None:
    assert smol.encode(text) == _hf_smol(smol_file).encode(text, add_special_tokens=False, split_special_tokens=True)


_HF_SMOL: list[Any] = []


def _hf_smol(file: Path) -> Any:
    if not _HF_SMOL:
        transformers = pytest.importorskip("transformers")
        _HF_SMOL.append(transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name))
    return _HF_SMOL[0]


def test_llama3_takes_digits_by_threes_and_whole_words_without_merges(llama_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(llama_metadata)
    number, word = tokenizer.id_of("123"), tokenizer.id_of("hello")
    assert tokenizer.encode("123123") == [number, number]  # "123" has no merges; it is a token, so it needs none
    assert tokenizer.encode("hello") == [word]
    assert len(tokenizer.encode("hello1234")) == 3


def test_gpt2_is_the_default(llama_metadata: dict[str, Any]) -> None:
    named = Tokenizer.from_gguf(llama_metadata | {"tokenizer.ggml.pre": "gpt-2"})
    unnamed = Tokenizer.from_gguf({k: v for k, v in llama_metadata.items() if k != "tokenizer.ggml.pre"})
    assert [named.encode(t) for t in CORPUS] == [unnamed.encode(t) for t in CORPUS]


@pytest.mark.parametrize("text", CORPUS)
def test_decode_gives_back_the_normalised_text(golden: Tokenizer, text: str) -> None:
    assert golden.decode(golden.encode(text)) == unicodedata.normalize("NFC", text)


@given(st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<think>", "</tool_call>", "<", "|>", "a", " ", "\n"])))
def test_plain_text_never_becomes_a_special_token(golden: Tokenizer, pieces: list[str]) -> None:
    assert not golden.special_ids & set(golden.encode("".join(pieces)))


def test_a_word_that_spells_a_special_token_is_no_special_token_even_without_merges() -> None:
    tokens = {chr(b): b for b in range(0x21, 0x7F)} | {"stop": 200}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [*tokens],
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": [],
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode_template("stop") == [len(tokens) - 1]
    assert len(tokenizer.encode("stop")) == 4


def test_of_two_special_tokens_at_one_place_the_longer_is_read(golden_metadata: dict[str, Any]) -> None:
    tokens = list(golden_metadata["tokenizer.ggml.tokens"])
    tokens[2003], tokens[2004] = "<x>", "<x>y"
    tokenizer = Tokenizer.from_gguf(golden_metadata | {"tokenizer.ggml.tokens": tokens})
    assert tokenizer.encode_template("<x>y<x>") == [2004, 2003]


def test_template_text_has_special_tokens_where_transformers_has_them(
    golden_metadata: dict[str, Any], golden: Tokenizer
) -> None:
    text = "<|im_start|>user\nüber <think>x</think><|im_end|>\n<|im_start|><|im_end|>"
    assert golden.encode_template(text) == _folder_backend(golden_metadata).encode(text).ids


def _folder_backend(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """The same vocabulary, built with the library directly, its added tokens registered as in published folders."""
    texts, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    plain = {text: i for i, text in enumerate(texts) if types[i] == 1}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(plain, merges))
    backend.normalizer = tokenizers.normalizers.NFC()
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN35_WORDS), "isolated")
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = tokenizers.decoders.ByteLevel()
    for text, kind in zip(texts, types, strict=True):
        if kind in (3, 4):
            backend.add_tokens([tokenizers.AddedToken(text, special=kind == 3, normalized=False)])
    return backend


@pytest.fixture
def folder(golden_metadata: dict[str, Any], tmp_path: Path) -> Path:
    _folder_backend(golden_metadata).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}, "bos_token": null}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2002, 2000]}')
    return tmp_path


def test_folder_and_gguf_of_one_vocabulary_are_the_same_tokenizer(golden: Tokenizer, folder: Path) -> None:
    other = Tokenizer.from_folder(folder)
    assert other.identity() == golden.identity()
    assert other.control_ids == golden.control_ids
    assert other.markup_ids == golden.markup_ids
    assert other.stop_ids == golden.stop_ids
    assert (other.bos_id, other.add_bos) == (None, False)
    assert [other.encode(t) for t in CORPUS] == [golden.encode(t) for t in CORPUS]


def test_identity_changes_with_a_token_and_with_a_merge(golden_metadata: dict[str, Any], golden: Tokenizer) -> None:
    merges = list(golden_metadata["tokenizer.ggml.merges"])
    swapped = Tokenizer.from_gguf(golden_metadata | {"tokenizer.ggml.merges": [merges[2], *merges[:2], *merges[3:]]})
    tokens = list(golden_metadata["tokenizer.ggml.tokens"])
    tokens[2032] = "<|other|>"
    renamed = Tokenizer.from_gguf(golden_metadata | {"tokenizer.ggml.tokens": tokens})
    assert len({golden.identity(), swapped.identity(), renamed.identity()}) == 3


class _Lazy(Sequence[str]):
    """A sequence that decodes an entry when asked."""

    def __init__(self, items: list[str]) -> None:
        self._items = [item.encode() for item in items]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index].decode()

    def __iter__(self) -> Iterator[str]:
        return (item.decode() for item in self._items)


def test_lazy_sequences_load_as_lists_do(golden_metadata: dict[str, Any], golden: Tokenizer) -> None:
    keys = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
    lazy = Tokenizer.from_gguf(golden_metadata | {key: _Lazy(golden_metadata[key]) for key in keys})
    assert lazy.identity() == golden.identity()
    assert lazy.encode(CORPUS[4]) == golden.encode(CORPUS[4])


def test_surrogates_do_not_crash(golden: Tokenizer) -> None:
    assert golden.decode(golden.encode("a\ud800b\udc00")) == "a\ufffdb\ufffd"
    assert golden.decode(golden.encode("\ud83d\ude00")) == "😀"


def test_kinds_follow_the_shape_where_the_file_is_wrong(golden_metadata: dict[str, Any]) -> None:
    types = list(golden_metadata["tokenizer.ggml.token_type"])
    types[2001], types[2024] = 4, 3  # <|im_start|> as user-defined, <think> as control
    tokenizer = Tokenizer.from_gguf(golden_metadata | {"tokenizer.ggml.token_type": types})
    assert 2001 in tokenizer.control_ids
    assert 2024 in tokenizer.markup_ids


def test_stop_ids_are_eos_and_whatever_ends_a_turn(golden: Tokenizer, smol: Tokenizer) -> None:
    assert golden.stop_ids == {golden.id_of("<|im_end|>"), golden.id_of("<|endoftext|>")}
    assert smol.stop_ids == {0, 2}


def test_a_token_stands_for_the_bytes_of_its_letters_or_for_its_text_where_one_is_no_byte(
    golden_metadata: dict[str, Any],
) -> None:
    letters = [*golden_metadata["tokenizer.ggml.tokens"]]
    found = {letter: Tokenizer.from_gguf(golden_metadata).token_bytes(id) for id, letter in enumerate(letters[:256])}
    assert sorted(found.values()) == [bytes([byte]) for byte in range(256)]
    assert (found["a"], found["\u0120"], found["\u0100"]) == (b"a", b" ", b"\0")
    strange = Tokenizer.from_gguf(
        golden_metadata
        | {"tokenizer.ggml.tokens": [*letters[:1000], "a日", *letters[1001:]], "tokenizer.ggml.merges": []}
    )
    assert strange.token_bytes(1000) == "a日".encode()


def test_control_tokens_leave_no_text_and_markup_does(golden: Tokenizer) -> None:
    ids = golden.encode_template("<think>a</think><|im_end|>")
    assert golden.decode(ids) == "<think>a</think>"
    assert golden.decode(ids, skip_control=False) == "<think>a</think><|im_end|>"
    assert golden.token_text(2002) == "<|im_end|>"
    assert golden.token_bytes(2040) == golden.token_bytes(10**9) == golden.token_bytes(-1) == b""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "klingon"}, "klingon.*qwen35"),
        ({"tokenizer.ggml.model": "llama"}, "'llama'.*gpt2"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "not a pair"),
        ({"tokenizer.ggml.merges": ["a Ж"]}, "disagree"),
        ({"tokenizer.ggml.token_type": [1]}, "2048 entries.* 1"),
        ({"tokenizer.ggml.token_type": [9] * 2048}, r"\[9\]"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "5000.*2048"),
    ],
)
def test_a_bad_file_is_refused_with_both_sides_named(
    golden_metadata: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadModelFile, match=message):
        Tokenizer.from_gguf(golden_metadata | change)


def test_a_missing_or_foreign_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": []}}')
    with pytest.raises(BadModelFile, match="Unigram"):
        Tokenizer.from_folder(tmp_path)


def test_the_room_needs_no_torch() -> None:
    spec = importlib.util.find_spec("rekindle.text")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    sources = [file.read_text() for file in Path(spec.submodule_search_locations[0]).glob("*.py")]
    assert not any("import torch" in source or "from torch" in source for source in sources)

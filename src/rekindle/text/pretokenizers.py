"""How text is cut into words before byte-pair merging, one entry per `tokenizer.ggml.pre` name."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from rekindle.errors import BadModelFile

_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"  # newline runs, blanks before a word's own blank, other blanks
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"  # English contractions

# Letters alone; a combining mark counts as punctuation, so it ends a word.
_QWEN2 = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
# Letters and combining marks together.
_QWEN35 = _SHORT + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL
# As qwen2, with digits in runs of three.
_LLAMA3 = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One way of cutting. Without a pattern the words are GPT-2's own."""

    pattern: str | None = None
    digits_singly: bool = False  # only without a pattern: cut every digit off first
    nfc: bool = False  # the original normalises text before cutting
    ignore_merges: bool = False  # a word that is a token needs no merges to become it

    def build(self) -> pre_tokenizers.PreTokenizer:
        if self.pattern is not None:
            words = pre_tokenizers.Split(Regex(self.pattern), "isolated")
            return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if self.digits_singly:
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
        return gpt2


_GPT2 = PreTokenizer()
_LLAMA = PreTokenizer(_LLAMA3, ignore_merges=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "qwen2": PreTokenizer(_QWEN2, nfc=True),
    "qwen35": PreTokenizer(_QWEN35, nfc=True),
    "smollm": PreTokenizer(digits_singly=True),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The entry of that name."""
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise BadModelFile(f"tokenizer.ggml.pre is {name!r}; this version knows {known}")
    return PRE_TOKENIZERS[name]

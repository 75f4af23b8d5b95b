"""Text ↔ token ids for byte-level BPE vocabularies, from GGUF metadata or a Hugging Face folder.

Added tokens come in two kinds, and neither is ever made from plain text by `encode`:

- control (`<|im_start|>`, `<|im_end|>`, …): structure. Only a template writes them; they are dropped from decoded text.
- markup (`<think>`, `<tool_call>`, …; GGUF type 4): written by templates and by the model, readable in decoded text.
  Of all messages only the assistant's may carry them, because there the model itself wrote them.

A file may flag a token wrongly, so its shape decides in two cases: `<|…|>` is always control, and the names in
`MARKUP_NAMES` are always markup.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Encoding, models, normalizers
from tokenizers import Tokenizer as Backend

from rekindle.errors import BadModelFile, BadRequest
from rekindle.text.pieces import UNLIMITED, TooManyTokens, batched_pieces
from rekindle.text.pretokenizers import pre_tokenizer

MARKUP_NAMES = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"})

# Control tokens with which known families end a turn or a text, besides the eos and eot the file names.
TURN_ENDS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "</s>",
)

_CONTROL_SHAPE = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")


MOST_TOKENS = 1 << 24  # ids of any vocabulary are lower
T = TypeVar("T")


class TokenKind(IntEnum):
    NORMAL = 0
    CONTROL = 1
    MARKUP = 2
    UNUSED = 3  # a padding row of the embedding; has no text


_GGUF_KINDS = {
    1: TokenKind.NORMAL,
    2: TokenKind.CONTROL,  # the unknown token
    3: TokenKind.CONTROL,
    4: TokenKind.MARKUP,
    5: TokenKind.UNUSED,
    6: TokenKind.NORMAL,  # a single byte
}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where it prints, else the next free letter from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTE_OF = {ord(letter): byte for letter, byte in _byte_alphabet().items()}


def well_formed(text: str) -> str:
    """Surrogate pairs joined; a lone surrogate, which UTF-8 cannot carry, becomes U+FFFD."""
    if not _SURROGATE.search(text):
        return text
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return _SURROGATE.sub("\ufffd", joined)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    texts: list[str]  # by id; bytes of normal tokens in the byte alphabet; "" where the id has no token
    kinds: list[TokenKind]
    merges: list[tuple[str, str]]

    def plain(self) -> dict[str, int]:
        """What merging may produce: neither control nor markup."""
        return {text: i for i, (text, kind) in enumerate(zip(self.texts, self.kinds, strict=True)) if not kind and text}

    def identity(self) -> str:
        texts = ["" if kind is TokenKind.UNUSED else t for t, kind in zip(self.texts, self.kinds, strict=True)]
        while texts and not texts[-1]:  # padding rows are no part of a vocabulary
            texts.pop()
        digest = hashlib.sha256("\0".join(texts).encode())
        digest.update(b"\1" + "\0".join(f"{a} {b}" for a, b in self.merges).encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Ends:
    """Which tokens begin and end texts."""

    bos_id: int | None = None
    eos_ids: frozenset[int] = field(default_factory=frozenset)  # the first named one is `eos_id`
    eos_id: int | None = None
    add_bos: bool = False


class Tokenizer:
    """A byte-level BPE vocabulary. Immutable; safe to share between threads."""

    def __init__(self, backend: Backend, vocabulary: _Vocabulary, ends: _Ends) -> None:
        self._backend = backend  # knows no added tokens, so plain text cannot become one
        self._texts = vocabulary.texts
        self._kinds = vocabulary.kinds
        self._identity = vocabulary.identity()
        self._ids = {text: i for i, text in enumerate(self._texts) if text and self._kinds[i] != TokenKind.UNUSED}
        self.control_ids = self._of_kind(TokenKind.CONTROL)
        self.markup_ids = self._of_kind(TokenKind.MARKUP)
        self.special_ids = self.control_ids | self.markup_ids
        self.bos_id = ends.bos_id
        self.eos_id = ends.eos_id
        self.add_bos = ends.add_bos and ends.bos_id is not None
        named = (self._ids.get(name) for name in TURN_ENDS)
        self.stop_ids = ends.eos_ids | {i for i in named if i in self.control_ids and i is not None}
        # Alternatives in order of length: at one place the longest token wins.
        longest_first = sorted((self._texts[i] for i in self.special_ids), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the `tokenizer.ggml.*` keys of a GGUF file."""
        vocabulary = _gguf_vocabulary(metadata)
        pre = pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "default")))
        try:
            bpe = models.BPE(vocabulary.plain(), vocabulary.merges, ignore_merges=pre.ignore_merges)
        except Exception as error:  # the library has no type of its own; it names the merge that is out of vocabulary
            raise BadModelFile(f"tokenizer.ggml.merges and tokenizer.ggml.tokens disagree: {error}") from error
        backend = Backend(bpe)
        backend.pre_tokenizer = pre.build()
        if pre.nfc:
            backend.normalizer = normalizers.NFC()
        return cls(backend, vocabulary, _gguf_ends(metadata, len(vocabulary.texts)))

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """From `tokenizer.json` and `tokenizer_config.json` of a Hugging Face folder."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        content = read_json(file)
        vocabulary = _folder_vocabulary(content, file)
        config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
        ends = _folder_ends(folder, content, config, vocabulary)
        stripped = content | {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        stripped["model"] = content["model"] | {"vocab": vocabulary.plain()}
        try:
            backend = Backend.from_str(json.dumps(stripped))
        except Exception as error:  # the library has no type of its own
            raise BadModelFile(f"{file}: {error}") from error
        return cls(backend, vocabulary, ends)

    def _of_kind(self, wanted: TokenKind) -> frozenset[int]:
        return frozenset(i for i, kind in enumerate(self._kinds) if kind == wanted and self._texts[i])

    @property
    def vocab_size(self) -> int:
        return len(self._texts)

    def identity(self) -> str:
        """The same for two files exactly when tokens, ids and merges are the same."""
        return self._identity

    def id_of(self, token: str) -> int | None:
        """The id of a special token's text, or of a normal token in the vocabulary's own spelling."""
        return self._ids.get(token)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text of more than n times that has more than n tokens."""
        return max((len(text.encode()) for text in self._texts), default=1)

    def encode(self, text: str, limit: int = UNLIMITED) -> list[int]:
        """Plain text to ids. No text becomes a control or markup token. Raises TooManyTokens beyond `limit`."""
        ids: list[int] = []
        for pieces in self._batches(well_formed(text), limit):
            ids += chain.from_iterable(encoding.ids for encoding in self._run(self._backend.encode_batch_fast, pieces))
            if len(ids) > limit:
                raise TooManyTokens(limit)
        return ids

    def encode_with_ends(self, text: str, limit: int = UNLIMITED) -> tuple[list[int], list[int]]:
        """As `encode`, with the character position where each token ends."""
        ids: list[int] = []
        ends: list[int] = []
        start = 0
        for pieces in self._batches(well_formed(text), limit):
            for piece, encoding in zip(pieces, self._run(self._backend.encode_batch, pieces), strict=True):
                ids += encoding.ids
                ends += (start + end for _, end in encoding.offsets)
                start += len(piece)
            if len(ids) > limit:
                raise TooManyTokens(limit)
        return ids, ends

    def _batches(self, text: str, limit: int) -> Iterator[list[str]]:
        """The text in pieces, a few at a time, so that encoding can stop at the limit."""
        if len(text) > limit * self.longest_token:  # each character is at least a byte
            raise TooManyTokens(limit)
        return batched_pieces(text)

    def _run(self, encode: Callable[..., list[Encoding]], pieces: list[str]) -> list[Encoding]:
        """A batch call lets other threads run meanwhile. A panic of the library is no `Exception`; here it is one."""
        try:
            return encode(pieces, add_special_tokens=False)
        except BaseException as error:
            if type(error).__name__ == "PanicException":
                raise BadRequest(f"the tokenizer cannot encode this text: {error}") from error
            raise

    def encode_template(self, text: str, limit: int = UNLIMITED) -> list[int]:
        """A rendered template to ids: every special token's text becomes its id. Never for text from a client."""
        ids: list[int] = []
        for stretch, special in self.split_special(text):
            ids += self.encode(stretch, limit - len(ids))
            if special is not None:
                ids.append(special)
        return ids

    def encode_markup(self, text: str) -> list[int]:
        """Text as a model writes it: markup becomes its token, the names of control tokens stay text."""
        ids: list[int] = []
        for stretch, special in self.split_special(text):
            ids += self.encode(stretch)
            if special is not None:
                ids += [special] if special in self.markup_ids else self.encode(self._texts[special])
        return ids

    def split_special(self, text: str) -> Iterator[tuple[str, int | None]]:
        """(plain stretch, the special token after it) in order; the last stretch has none."""
        start = 0
        for match in self._special.finditer(text):
            yield text[start : match.start()], self._ids[match.group()]
            start = match.end()
        yield text[start:], None

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; a special token's are its name. An id without a token has none."""
        if not 0 <= token < len(self._texts) or self._kinds[token] is TokenKind.UNUSED:
            return b""
        text = self._texts[token]
        if self._kinds[token] is not TokenKind.NORMAL:
            return text.encode()
        try:
            return codecs.charmap_encode(text, "strict", _BYTE_OF)[0]
        except UnicodeEncodeError:  # a file may call text normal that is not in the byte alphabet
            return text.encode()

    def token_text(self, token: int) -> str:
        """A token for people's eyes; half a character shows as U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")

    def decode(self, tokens: Iterable[int], skip_control: bool = True) -> str:
        """Ids to text. Control tokens leave no text unless asked for; broken UTF-8 becomes U+FFFD."""
        kept = (t for t in tokens if not (skip_control and t in self.control_ids))
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")


def read_text(file: Path) -> str:
    """A text from a model folder."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadModelFile(f"{file}: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a model folder."""
    try:
        content = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise BadModelFile(f"{file}: {error}") from error
    if not isinstance(content, dict):
        raise BadModelFile(f"{file}: holds a {type(content).__name__}, not an object")
    return content


def _kind(text: str, kind: TokenKind) -> TokenKind:
    """The file's flag, corrected by the shape of the text (module docstring)."""
    if kind not in (TokenKind.CONTROL, TokenKind.MARKUP):
        return kind
    if text in MARKUP_NAMES:
        return TokenKind.MARKUP
    return TokenKind.CONTROL if _CONTROL_SHAPE.fullmatch(text) else kind


def _gguf_vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise BadModelFile(f"tokenizer.ggml.model is {model!r}; only byte-level BPE ('gpt2') is supported")
    for key in ("tokens", "merges", "token_type"):
        if f"tokenizer.ggml.{key}" not in metadata:
            raise BadModelFile(f"the file has no tokenizer.ggml.{key}")
    texts = list_of(str, metadata["tokenizer.ggml.tokens"], "tokenizer.ggml.tokens")
    types = list_of(int, metadata["tokenizer.ggml.token_type"], "tokenizer.ggml.token_type")
    if len(texts) != len(types):
        raise BadModelFile(f"tokenizer.ggml.tokens has {len(texts)} entries, tokenizer.ggml.token_type {len(types)}")
    if unknown := set(types) - set(_GGUF_KINDS):
        raise BadModelFile(f"tokenizer.ggml.token_type has {sorted(unknown)}; known are {sorted(_GGUF_KINDS)}")
    kinds = [_GGUF_KINDS[t] if t == 1 else _kind(text, _GGUF_KINDS[t]) for text, t in zip(texts, types, strict=True)]
    return _Vocabulary(texts, kinds, _merge_pairs(metadata["tokenizer.ggml.merges"], "tokenizer.ggml.merges"))


def list_of(kind: type[T], value: Any, where: str) -> list[T]:
    """The value, if it is such a list or reads like one."""
    found = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else None
    if found is None or not all(isinstance(item, kind) for item in found):
        raise BadModelFile(f"{where} is no list of {kind.__name__}")
    return found


def _merge_pairs(merges: Any, where: str) -> list[tuple[str, str]]:
    """Both spellings: "a b" and ["a", "b"]."""
    if not isinstance(merges, Sequence) or isinstance(merges, str):
        raise BadModelFile(f"{where} is no list of merges")
    pairs = list[tuple[str, str]]()
    for merge in merges:  # as many as tokens, so that a generator for each would take longer than all the rest
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], str)):
            raise BadModelFile(f"{where}: {pair!r} is not a pair")
        pairs.append((pair[0], pair[1]))
    return pairs


def _gguf_ends(metadata: Mapping[str, Any], size: int) -> _Ends:
    def named(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and not (isinstance(value, int) and 0 <= value < size):
            raise BadModelFile(f"tokenizer.ggml.{name}_token_id is {value!r}, the vocabulary has {size} tokens")
        return value

    eos = named("eos")
    ends = frozenset(i for i in (eos, named("eot")) if i is not None)
    return _Ends(named("bos"), ends, eos, bool(metadata.get("tokenizer.ggml.add_bos_token", False)))


def _folder_vocabulary(content: dict[str, Any], file: Path) -> _Vocabulary:
    model = content.get("model")
    if not isinstance(model, dict):
        raise BadModelFile(f"{file}: has no model")
    if model.get("type") != "BPE" or "ByteLevel" not in json.dumps(content.get("pre_tokenizer")):
        raise BadModelFile(f"{file}: model {model.get('type')!r} is not byte-level BPE, the only kind supported")
    vocab = model.get("vocab")
    if not isinstance(vocab, dict):
        raise BadModelFile(f"{file}: its model has no vocab from texts to ids")
    added = list_of(dict, content.get("added_tokens") or [], f"{file}: added_tokens")
    size = max([-1, *(_id(i, file) for i in vocab.values()), *(_id(token.get("id"), file) for token in added)]) + 1
    texts, kinds = [""] * size, [TokenKind.UNUSED] * size
    for text, i in vocab.items():
        texts[i], kinds[i] = text, TokenKind.NORMAL
    for token in added:
        text, flag = token.get("content"), TokenKind.CONTROL if token.get("special") else TokenKind.MARKUP
        if not isinstance(text, str):
            raise BadModelFile(f"{file}: the added token {token['id']} has the content {text!r}, expected a text")
        texts[token["id"]], kinds[token["id"]] = text, _kind(text, flag)
    return _Vocabulary(texts, kinds, _merge_pairs(model.get("merges"), f"{file}: merges"))


def _id(value: Any, file: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MOST_TOKENS:
        raise BadModelFile(f"{file}: the id {value!r} is no whole number from 0 to {MOST_TOKENS - 1}")
    return value


def _folder_ends(folder: Path, content: dict[str, Any], config: dict[str, Any], vocabulary: _Vocabulary) -> _Ends:
    ids = {text: i for i, text in enumerate(vocabulary.texts) if text}

    def named(name: str) -> int | None:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        return ids.get(text) if isinstance(text, str) else None

    bos, eos = named("bos_token"), named("eos_token")
    ends = {eos} if eos is not None else set()
    if (folder / "generation_config.json").exists():
        file = folder / "generation_config.json"
        listed = read_json(file).get("eos_token_id")
        ends |= {_id(i, file) for i in (listed if isinstance(listed, list) else [] if listed is None else [listed])}
    adds = config.get("add_bos_token")
    if adds is None:
        adds = bos is not None and _writes_first(content.get("post_processor"), vocabulary.texts[bos])
    return _Ends(bos, frozenset(ends), eos, bool(adds))


def _writes_first(post_processor: Any, token: str) -> bool:
    """Whether the folder's own post-processor puts `token` in front of every text."""
    match post_processor:
        case {"type": "Sequence", "processors": [*each]}:
            return any(_writes_first(one, token) for one in each)
        case {"single": [{"SpecialToken": {"id": first}}, *_]}:
            return bool(first == token)
    return False

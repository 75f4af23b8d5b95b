"""Turns that the model wrote stay the tokens it wrote.

A client sends an answer back as text, and encoding that text again may give other ids than were sampled: other merges
at the edges of tokens, another order of a call's arguments. The text is the same, the state is lost. So what was
sampled is remembered under the tokens that stood before it, and used again for as much of the turn as it spells:

    rendered    <|im_start|> assistant \\n <think> \\n I see. \\n </think> \\n\\n It  is   red.  <|im_end|>
    remembered               assistant \\n <think> \\n I se e. \\n </think> \\n\\n It  is   r ed . <|im_end|>
    used                     ^ all of it: the prompt extends the sampled ids, whose state is known

    rendered    <|im_start|> assistant \\n It is blue. <|im_end|>         the client edited; thinking was dropped
    used                     assistant \\n It is | and nothing behind the edit

Ids are only ever used for text they spell, and special tokens only where the template wrote the same ones. So nothing
that is remembered can change what the model reads, and no client can make a control token of its text.
"""

from __future__ import annotations

import codecs
import json
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from rekindle.prompt import ids_of
from rekindle.text.encoded import EncodedTexts
from rekindle.text.lru import Lru
from rekindle.text.parsing.jsonish import object_in
from rekindle.text.sentinels import is_deep
from rekindle.text.tokenizer import Tokenizer

TURN_BUDGET = 64 << 20  # bytes of remembered turns
NUMBER = 36  # bytes of a number in a tuple
PER_PREFIX = 8  # turns remembered behind the same tokens: several answers to one prompt, or retries

# (tokens, longest) -> runs of at most `longest` tokens that are known to have followed exactly these, newest first.
Continuations = Callable[[Sequence[int], int], Sequence[Sequence[int]]]

Stretch = tuple[str, int | None]  # a plain stretch of a rendered turn and the special token behind it


@dataclass(frozen=True, slots=True)
class Recalled:
    """How a stretch begins in remembered ids: the first `ends[-1]` characters of it."""

    ids: tuple[int, ...]
    ends: tuple[int, ...]  # the character position where each id ends


class Trail:
    """A growing prompt, and a name for each of its prefixes."""

    def __init__(self) -> None:
        self._hash = blake3()
        self._length = 0

    def name(self, tokens: Sequence[int]) -> bytes:
        """The name of these tokens, which extend those of the call before."""
        self._hash.update(ids_of(tokens[self._length :]).tobytes())
        self._length = len(tokens)
        return self._hash.digest(16)


@dataclass(frozen=True, slots=True)
class _Message:
    """What a turn with tool calls said besides its calls."""

    content: str
    reasoning: str | None


@dataclass(frozen=True, slots=True)
class _Call:
    arguments: dict[str, Any]  # in the order the model wrote them
    message: _Message


class TurnMemory:
    """What the model wrote, turn by turn, and how texts of its prompts were encoded. Bounded; safe to share between
    threads.

    `seen` is asked where nothing is remembered, after a restart for instance: the prefix cache has the tokens that its
    states were computed from.
    """

    OVERHEAD = 200  # bytes of bookkeeping per remembered turn, roughly

    def __init__(self, budget: int = TURN_BUDGET, seen: Continuations | None = None) -> None:
        self._lock = threading.Lock()
        self._turns: Lru[bytes, tuple[array[int], ...]] = Lru(budget)
        self._calls: Lru[str, _Call] = Lru(budget // 4)
        self._aligned: Lru[bytes, list[Recalled]] = Lru(budget // 4)
        self.texts = EncodedTexts(budget // 4)
        self._seen = seen

    @property
    def size(self) -> int:
        """Bytes held."""
        with self._lock:
            return self._turns.size + self._calls.size + self._aligned.size + self.texts.size

    # Tokens

    def remember(self, before: Sequence[int], turn: Sequence[int]) -> None:
        """After the tokens `before`, which end with a role start, came `turn`: the template's opening, then the
        sampled ids, then the stop token."""
        self.keep(Trail().name(before), turn)

    def keep(self, name: bytes, turn: Sequence[int]) -> None:
        """As `remember`, for the tokens of that name."""
        written = array("i", turn)
        with self._lock:
            known = tuple(each for each in self._turns.get(name) or () if each != written)
            turns = (written, *known)[:PER_PREFIX]
            self._turns.put(name, turns, sum(len(each) * each.itemsize + self.OVERHEAD for each in turns))

    def recall(self, name: bytes) -> Sequence[Sequence[int]]:
        """The turns that came after the tokens of that name, newest first."""
        with self._lock:
            return self._turns.get(name) or ()

    def aligned(self, case: bytes) -> list[Recalled] | None:
        """What was found when these turns and these stretches were compared before: one and the same turn comes back
        with every request, and its comparison takes a microsecond a token."""
        with self._lock:
            return self._aligned.get(case)

    def keep_aligned(self, case: bytes, found: list[Recalled]) -> None:
        size = sum(len(each.ids) + len(each.ends) for each in found) * NUMBER + self.OVERHEAD
        with self._lock:
            self._aligned.put(case, found, size)

    def seen(self, before: Sequence[int], longest: int) -> Sequence[Sequence[int]]:
        """What is known to have come after these tokens from elsewhere."""
        return self._seen(before, longest) if self._seen is not None else ()

    # Tool calls

    def remember_message(self, message: Mapping[str, Any]) -> None:
        """The message that a client was given; it will send its calls back under the ids they have in it."""
        said = _Message(_text(message.get("content")), message.get("reasoning_content") or None)
        for call in message.get("tool_calls") or ():
            arguments = _arguments(call)
            if isinstance(call.get("id"), str) and arguments is not None:
                size = len(json.dumps(arguments)) + len(said.content) + len(said.reasoning or "") + self.OVERHEAD
                with self._lock:
                    self._calls.put(call["id"], _Call(arguments, said), size)

    def restored(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages with what clients lose on the way put back: the order of a call's arguments, and the thinking
        before a call, for which many have no field. Only for calls that are otherwise as they were given."""
        return [self._restored(message) for message in messages]

    def _restored(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        calls = message.get("tool_calls")
        if message.get("role") != "assistant" or not isinstance(calls, list) or not calls:
            return message
        with self._lock:
            known = [self._calls.get(_id(call)) for call in calls]
        same = [
            was is not None and _canonical(was.arguments) == _canonical(_arguments(call))
            for was, call in zip(known, calls, strict=True)
        ]
        ordered = [
            _with_arguments(call, was.arguments) if was is not None and is_same else call
            for was, call, is_same in zip(known, calls, same, strict=True)
        ]
        restored: dict[str, Any] = {**message, "tool_calls": ordered}
        said = known[0].message if all(same) and known[0] is not None else None
        if said is not None and said.reasoning is not None and _left_out(message, said):
            restored["reasoning_content"] = said.reasoning
        return restored


def _left_out(message: Mapping[str, Any], said: _Message) -> bool:
    """Whether the message is the one that was said, but for its thinking."""
    carries = any(message.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
    return not carries and _text(message.get("content")).strip() == said.content.strip()


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""


def _id(call: Any) -> str:
    found = call.get("id") if isinstance(call, dict) else None
    return found if isinstance(found, str) else ""


def _arguments(call: Any) -> dict[str, Any] | None:
    """A call's arguments as an object; None where they are none, which is for the template to complain about."""
    function = call.get("function") if isinstance(call, dict) else None
    found = function.get("arguments") if isinstance(function, dict) else None
    if isinstance(found, str):
        found = object_in(found)
    return found if isinstance(found, dict) and not is_deep(found) else None


def _with_arguments(call: Mapping[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _canonical(arguments: dict[str, Any] | None) -> str | None:
    return None if arguments is None else json.dumps(arguments, sort_keys=True)


class Recollection:
    """Goes along one rendered prompt and says which of its turns begin with remembered ids."""

    def __init__(self, memory: TurnMemory, tokenizer: Tokenizer) -> None:
        self._memory = memory
        self._tokenizer = tokenizer
        self._trail = Trail()
        self._may_be_seen = True  # what was not seen up to here was not seen any further

    def turn(self, before: Sequence[int], stretches: Sequence[Stretch]) -> list[Recalled]:
        """For the first stretches of the turn that follows `before`, what is remembered of each."""
        name = self._trail.name(before)
        if turns := self._memory.recall(name):
            case = _case(turns, stretches)
            found = self._memory.aligned(case)
            if found is None:
                found = self._best(turns, stretches)[0]
                self._memory.keep_aligned(case, found)
            return found
        if not self._may_be_seen:
            return []
        longest = sum(len(text.encode()) + 1 for text, _ in stretches)  # a token spells at least a byte
        runs = self._memory.seen(before, longest)
        self._may_be_seen = bool(runs)
        best, run = self._best(runs, stretches)
        if best:
            self._memory.keep(name, run)  # sooner found the next time
        return best

    def _best(
        self, turns: Sequence[Sequence[int]], stretches: Sequence[Stretch]
    ) -> tuple[list[Recalled], Sequence[int]]:
        """What reaches furthest, and the turn it is from."""
        best: list[Recalled] = []
        chosen: Sequence[int] = ()
        for written in turns:
            for shape in _shapes(written, self._tokenizer):
                found = align(shape, stretches, self._tokenizer)
                if _extent(found) > _extent(best):
                    best, chosen = found, written
        return best, chosen


def _case(turns: Sequence[Sequence[int]], stretches: Sequence[Stretch]) -> bytes:
    """A name for these turns and this rendering of one: no two of them share it."""
    shape = ([len(turn) for turn in turns], [(len(text), special) for text, special in stretches])
    digest = blake3(repr(shape).encode())
    for turn in turns:
        digest.update(ids_of(turn).tobytes())
    for text, _ in stretches:
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.digest(16)


def _extent(recalled: Sequence[Recalled]) -> tuple[int, int]:
    return len(recalled), sum(each.ends[-1] for each in recalled if each.ends)


def _shapes(written: Sequence[int], tokenizer: Tokenizer) -> Iterator[Sequence[int]]:
    """A turn as it was written, and as templates show it later: without thinking, and without the blanks behind it."""
    yield written
    opening, closing = tokenizer.id_of("<think>"), tokenizer.id_of("</think>")
    if opening is None or opening not in written:
        return
    start = written.index(opening)
    stop = max((i for i, token in enumerate(written) if token == closing), default=start) + 1
    while True:
        yield [*written[:start], *written[stop:]]
        if stop == len(written) or tokenizer.token_text(written[stop]).strip():
            return
        stop += 1


def align(written: Sequence[int], stretches: Sequence[Stretch], tokenizer: Tokenizer) -> list[Recalled]:
    """How far a rendered turn and written ids go together, from their start; nothing behind their first difference."""
    recalled: list[Recalled] = []
    at = 0
    for text, special in stretches:
        found = _spelled(text, written, at, tokenizer)
        recalled.append(found)
        at += len(found.ids)
        whole = (found.ends[-1] if found.ends else 0) == len(text)
        if not whole or at == len(written) or written[at] != special:
            break
        at += 1
    return recalled


def _spelled(text: str, written: Sequence[int], at: int, tokenizer: Tokenizer) -> Recalled:
    """The ids from `written[at]` on that spell the text's beginning.

    They end where the text does or before a blank: an edit inside a word takes the word with it, since the model would
    not have cut it there. They never end inside a character.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    ends: list[int] = []
    end = good = 0

    def take(data: bytes, final: bool = False) -> bool:
        """Whether what these bytes complete is what the text goes on with; `end` is then behind it."""
        nonlocal end
        said = decoder.decode(data, final)
        if not text.startswith(said, end):
            return False
        end += len(said)
        return True

    def may_end() -> bool:
        return not decoder.getstate()[0] and (end == len(text) or text[end].isspace())

    for token in written[at:]:
        data = b"" if token in tokenizer.special_ids else tokenizer.token_bytes(token)
        if not data:
            break
        if not take(data):
            return Recalled(tuple(written[at : at + good]), tuple(ends[:good]))
        ends.append(end)
        if may_end():
            good = len(ends)
    if good < len(ends) and take(b"", final=True) and may_end():  # a character that never got all its bytes
        good, ends[-1] = len(ends), end
    return Recalled(tuple(written[at : at + good]), tuple(ends[:good]))

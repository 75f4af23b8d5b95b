"""Messages → prompt, by the model's own Jinja template."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.errors import BadModelFile, BadRequest
from rekindle.prompt import Prompt
from rekindle.text.boundaries import (
    ASSISTANT_ROLES,
    SYSTEM_ROLES,
    RoleStarts,
    Structure,
    tool_opener_ids,
    with_boundaries,
)
from rekindle.text.encoded import EncodedTexts
from rekindle.text.history import Recalled, Recollection, TurnMemory
from rekindle.text.late_system import LateSystem
from rekindle.text.messages import readable, with_joined_parts
from rekindle.text.normalise import LEAST_BEFORE_DATE, dated_line
from rekindle.text.pieces import UNLIMITED
from rekindle.text.sandbox import Template, TemplateRefuses, TemplateStopped
from rekindle.text.sentinels import (
    Escaper,
    Sentinels,
    plain,
    private_codes,
    strings_of,
    without_cache_control,
)
from rekindle.text.tokenizer import Tokenizer, read_json, read_text

# What a probe conversation says; words that no template writes by itself.
_PROBES = ("kwzsystem", "kwzfirst", "kwzsecond", "kwzthird")

_CLOSING = "\n</think>\n\n"

EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")  # of reasoning, rising


@dataclass(frozen=True, slots=True)
class ThinkingTokens:
    begin: int
    end: int
    close: tuple[int, ...]  # how thinking that is open is ended: `end` and the blanks around it


class ChatTemplate:
    """One model's template, with what was learnt about it from probe conversations."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self.source = source
        self.takes_tools = "tools" in source
        self._knows_developers = "developer" in source
        self._tokenizer = tokenizer
        self._template = Template(source)
        self._names = _names_in(source)
        special = [tokenizer.token_text(i) for i in sorted(tokenizer.special_ids)]
        self._reserved = private_codes([source, *special])
        self._special = special
        self._openers = tool_opener_ids(tokenizer)
        self._allowed = tokenizer.markup_ids - tokenizer.stop_ids
        self._late_system = LateSystem()
        try:
            self.role_starts = self._find_role_starts()
            self._takes_parts = self._renders_parts()
            self._late_system = self._probe_late_system()
            self.efforts = self._accepted_efforts()
            self.thinking_tokens = self._find_thinking_tokens()
        except TemplateStopped as error:
            raise BadModelFile(f"the chat template renders no conversation of a few words: {error}") from error
        self._allowed -= self.role_starts.ids

    def takes_option(self, name: str) -> bool:
        """Whether the template reads an option of this name."""
        return name in self._names

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate:
        source = metadata.get("tokenizer.chat_template")
        if not isinstance(source, str):
            raise BadModelFile("the file has no tokenizer.chat_template, so it cannot take messages")
        return cls(source, tokenizer)

    @classmethod
    def from_folder(cls, path: str | Path, tokenizer: Tokenizer) -> ChatTemplate:
        source = folder_template(Path(path))
        if source is None:
            raise BadModelFile(f"{path}: no chat_template.jinja and no chat_template in tokenizer_config.json")
        return cls(source, tokenizer)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> Prompt:
        """The prompt of a conversation; `kwargs` go to the template (`enable_thinking` and the like)."""
        return self.render_with(None, messages, tools, add_generation_prompt, kwargs)

    def render_with(
        self,
        memory: TurnMemory | None,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        options: Mapping[str, Any],
        limit: int = UNLIMITED,
    ) -> Prompt:
        """As `render`, with the assistant's turns in the ids that the memory has for them. The text is the same.
        Raises TooManyTokens as soon as there are more than `limit`."""
        request = self._prepare(messages, tools, options)
        text = self._run(request, request.messages, add_generation_prompt)
        stretches = self._stretches(text, request.sentinels)
        recollection = Recollection(memory, self._tokenizer) if memory is not None else None
        texts = memory.texts if memory is not None else EncodedTexts(0)
        assembly = self._assemble(stretches, request.sentinels, recollection, texts, add_generation_prompt, limit)
        structure = Structure(
            starts=tuple(assembly.starts),
            system=self._count_system_starts(request, text),
            tool_openers=tuple(assembly.openers),
            marks=tuple(assembly.marks),
            dated=tuple(assembly.dated),
        )
        return with_boundaries(assembly.tokens, structure, self.role_starts, self._tokenizer)

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The rendered text, for people. It cannot be encoded safely: a client's `<|im_start|>` looks real in it."""
        request = self._prepare(messages, tools, kwargs)
        text = self._run(request, request.messages, add_generation_prompt)
        return request.sentinels.pattern().sub("", text)

    # -- from request to text ------------------------------------------------------------------------------------------

    def _prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> _Request:
        if reserved := {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"} & options.keys():
            raise BadRequest(f"{sorted(reserved)} cannot be template options", field="chat_template_kwargs")
        said = [self._readable(message, i) for i, message in enumerate(plain(list(messages), "messages"))]
        shown = [without_cache_control(tool) for tool in plain(list(tools), "tools")] if tools else None
        chosen = plain(options, "chat_template_kwargs")
        marks = Sentinels.avoiding(self._reserved | private_codes(strings_of([said, shown, chosen])))
        escaper = Escaper(self._special, self._texts(self._allowed), self._texts(self._openers), marks)
        escaped = [escaper.message(message) for message in said]
        if not self._takes_parts:
            escaped = [with_joined_parts(message, i) for i, message in enumerate(escaped)]
        escaped = self._late_system.place(escaped, marks)
        return _Request(escaped, escaper.tool(shown), escaper.compared(chosen), marks)

    def _readable(self, message: Any, index: int) -> dict[str, Any]:
        """A developer is the system to a template that knows none."""
        found = readable(message, index)
        is_strange = found["role"] == "developer" and not self._knows_developers
        return found | {"role": "system"} if is_strange else found

    def _texts(self, ids: frozenset[int]) -> list[str]:
        return [self._tokenizer.token_text(i) for i in ids]

    def _run(self, request: _Request, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        tokenizer = self._tokenizer
        try:
            text = self._template.render(
                {
                    "messages": messages,
                    "tools": request.tools,
                    "add_generation_prompt": add_generation_prompt,
                    "bos_token": tokenizer.token_text(tokenizer.bos_id) if tokenizer.bos_id is not None else "",
                    "eos_token": tokenizer.token_text(tokenizer.eos_id) if tokenizer.eos_id is not None else "",
                    **request.options,
                }
            )
            return self._late_system.written(text, request.sentinels)
        except TemplateRefuses as error:
            reason = request.sentinels.pattern().sub("", str(error))
            said = f"the model's chat template refuses these messages: {reason}"
            raise type(error)(said, "messages") from error

    def _run_if_taken(self, request: _Request, messages: list[dict[str, Any]]) -> str | None:
        """The text of a conversation that need not be one for this template."""
        try:
            return self._run(request, messages, add_generation_prompt=False)
        except TemplateStopped:
            raise
        except TemplateRefuses:
            return None

    # -- from text to tokens -------------------------------------------------------------------------------------------

    def _stretches(self, text: str, sentinels: Sentinels) -> list[_Stretch]:
        """Special tokens in the rendered text are real: none can be read out of a client's string."""
        split, pattern = self._tokenizer.split_special(text), sentinels.pattern()
        return [_Stretch(*_take_out(plain_text, pattern, sentinels), special) for plain_text, special in split]

    def _assemble(
        self,
        stretches: Sequence[_Stretch],
        sentinels: Sentinels,
        recollection: Recollection | None,
        texts: EncodedTexts,
        is_asking: bool,
        limit: int,
    ) -> _Assembly:
        """The tokens. `is_asking`: the last turn is the generation prompt, for which no written ids exist."""
        assembly = _Assembly([], [], [], [], [])
        tokens = assembly.tokens
        if self._tokenizer.add_bos and (stretches[0].text or stretches[0].special != self._tokenizer.bos_id):
            assert self._tokenizer.bos_id is not None, "add_bos without a bos"
            tokens.append(self._tokenizer.bos_id)
        recalled: dict[int, Recalled] = {}
        mark_next = in_system = False
        for i, stretch in enumerate(stretches):
            marks = [at for at, mark in stretch.found if mark == sentinels.here]
            dated = dated_line(stretch.text) if in_system and not assembly.dated else []
            ids, places = self._encode_marked(
                stretch.text, [*marks, *dated], recalled.get(i), limit - len(tokens), texts
            )
            positions = [len(tokens) + place for place in places]
            assembly.marks.extend(positions[: len(marks)])
            assembly.dated.extend(at for at in positions[len(marks) :] if at >= LEAST_BEFORE_DATE)
            tokens += ids
            mark_next |= any(mark == sentinels.next for _, mark in stretch.found)
            if stretch.special is None:
                break
            is_start = stretch.special in self.role_starts.ids
            if is_start:
                if mark_next:
                    assembly.marks.append(self.role_starts.boundary_at(len(tokens)))
                mark_next = False
                in_system = not assembly.starts and stretches[i + 1].text.startswith(SYSTEM_ROLES)
                assembly.starts.append(len(tokens))
            elif stretch.special in self._openers and (len(stretch.text), sentinels.written) not in stretch.found:
                assembly.openers.append(len(tokens))
            tokens.append(stretch.special)
            if is_start and recollection is not None:
                turn = self._assistant_turn(stretches, i, is_asking)
                recalled.update(enumerate(recollection.turn(tokens, turn), start=i + 1) if turn else ())
        return assembly

    def _assistant_turn(
        self, stretches: Sequence[_Stretch], start: int, is_asking: bool
    ) -> list[tuple[str, int | None]]:
        """The stretches of the turn that begins after stretch `start`; none if the assistant did not write it."""
        speaker = self._tokenizer.token_text(stretches[start].special or 0)
        if self.role_starts.behind:
            is_assistant = stretches[start + 1].text.startswith(ASSISTANT_ROLES)
        else:
            is_assistant = any(word in speaker for word in ASSISTANT_ROLES)
        if not is_assistant:
            return []
        turn = []
        for stretch in stretches[start + 1 :]:
            turn.append((stretch.text, stretch.special))
            if stretch.special in self.role_starts.ids:
                return turn
        return [] if is_asking else turn

    def _encode_marked(
        self, text: str, marks: list[int], recalled: Recalled | None, limit: int, texts: EncodedTexts
    ) -> tuple[Sequence[int], list[int]]:
        """Ids of the text, and for each marked character position how many of them end before it or there."""
        if recalled is None and not marks:
            return texts.encode(text, self._tokenizer, limit), []
        ids, ends = (list(recalled.ids), list(recalled.ends)) if recalled is not None else ([], [])
        cut = ends[-1] if ends else 0
        rest, rest_ends = texts.encode_with_ends(text[cut:], self._tokenizer, limit - len(ids))
        ends += (cut + end for end in rest_ends)
        return [*ids, *rest], [bisect_right(ends, mark) for mark in marks]

    def _count_system_starts(self, request: _Request, text: str) -> int | None:
        """Which role start begins the first message behind system + tools.

        The same system messages and tools are rendered under another first message. Where both texts agree up to and
        with that message's role start, all before it is system + tools, whatever the template made of them.
        """
        count = next((i for i, m in enumerate(request.messages) if m.get("role") not in SYSTEM_ROLES), None)
        if count is None:
            return None
        other = self._run_if_taken(request, [*request.messages[:count], {"role": "user", "content": "x"}])
        if other is None:  # a template that accepts no such conversation has no shared opening to find
            return None
        ends = self._start_ends(other)
        shared = len(ends) > 1 and text[: ends[-1]] == other[: ends[-1]]
        return len(ends) - 1 if shared else None

    def _start_ends(self, text: str) -> list[int]:
        """Character positions just behind each role start."""
        ends, at = [], 0
        for stretch, special in self._tokenizer.split_special(text):
            if special is not None:
                at += len(stretch) + len(self._tokenizer.token_text(special))
                if special in self.role_starts.ids:
                    ends.append(at)
        return ends

    # -- probing -------------------------------------------------------------------------------------------------------

    def _find_role_starts(self) -> RoleStarts:
        """The special tokens with which this template begins messages, read off a probe conversation.

        Between two contents stands [end of the one] [start of the other]; behind the last content stands only its end.
        So a start is the first special token of a gap that is neither among those ends nor a stop token.
        """
        for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user")):
            gaps = self._probe(roles)
            if gaps is not None:
                break
        else:
            return RoleStarts(frozenset(), behind=True)
        ends: set[int | None] = {*self._tokenizer.stop_ids, *gaps[-1]}
        if not any(self._tokenizer.bos_id in gap for gap in gaps[1:-1]):  # in some ChatML files bos is the role start
            ends.add(self._tokenizer.bos_id)
        found = [next((i for i in gap if i not in ends), None) for gap in gaps[:-1]]
        ids = frozenset(i for i in found if i is not None)
        return RoleStarts(ids, behind=len(ids) == 1)

    def _probe(self, roles: Sequence[str]) -> list[list[int]] | None:
        """Special tokens before, between and behind the contents of a conversation; None if it is not accepted."""
        words = _PROBES[-len(roles) :]
        messages = [{"role": role, "content": word} for role, word in zip(roles, words, strict=True)]
        request = _Request(messages, None, {}, Sentinels.avoiding(self._reserved))
        rest = self._run_if_taken(request, messages)
        if rest is None:
            return None
        gaps = []
        for word in words:
            gap, found, rest = rest.partition(word)
            if not found:
                return None
            gaps.append(self._specials_in(gap))
        return [*gaps, self._specials_in(rest)]

    def _specials_in(self, text: str) -> list[int]:
        return [special for _, special in self._tokenizer.split_special(text) if special is not None]

    def _renders_parts(self) -> bool:
        """Whether a list of text parts renders like the text itself."""
        word = _PROBES[1]
        request = _Request([], None, {}, Sentinels.avoiding(self._reserved))
        as_text = self._run_if_taken(request, [{"role": "user", "content": word}])
        parts = [{"type": "text", "text": word}]
        as_parts = self._run_if_taken(request, [{"role": "user", "content": parts}])
        return as_text is not None and as_parts == as_text

    def _probe_late_system(self) -> LateSystem:
        marks = Sentinels.avoiding(self._reserved)
        request = _Request([], None, {}, marks)
        starts = self._texts(self.role_starts.ids)
        return LateSystem.probe(lambda messages: self._run_if_taken(request, messages), starts, marks)

    def _find_thinking_tokens(self) -> ThinkingTokens | None:
        """How thinking is opened and closed, by tokens; None where the tags are no tokens. The closing is what the
        template writes between an answer's thinking and its text, or, where it shows none, what models are taught."""
        begin, end = self._tokenizer.id_of("<think>"), self._tokenizer.id_of("</think>")
        if begin is None or end is None:
            return None
        _, question, thought, said = _PROBES
        answer = {"role": "assistant", "reasoning_content": thought, "content": said}
        request = _Request([], None, {}, Sentinels.avoiding(self._reserved))
        text = self._run_if_taken(request, [{"role": "user", "content": question}, answer]) or ""
        between = text.partition(thought)[2].partition(said)[0]
        ids = self._tokenizer.encode_template(between if said in text and "</think>" in between else _CLOSING)
        return ThinkingTokens(begin, end, tuple(ids)) if end in ids else None

    def _accepted_efforts(self) -> tuple[str, ...]:
        """Which words the template takes as `reasoning_effort`: some raise an error for all but a few."""
        if not self.takes_option("reasoning_effort"):
            return ()
        question = [{"role": "user", "content": _PROBES[1]}]
        sentinels = Sentinels.avoiding(self._reserved)
        requests = {word: _Request(question, None, {"reasoning_effort": word}, sentinels) for word in EFFORTS}
        return tuple(word for word, each in requests.items() if self._run_if_taken(each, question) is not None)


@dataclass(frozen=True, slots=True)
class _Request:
    """What the template gets: escaped."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    options: dict[str, Any]
    sentinels: Sentinels


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Plain text between two special tokens of a rendered conversation."""

    text: str  # plain, without sentinels
    found: list[tuple[int, str]]  # sentinels that stood in it, and where
    special: int | None  # the token after it; the last stretch has none


@dataclass(frozen=True, slots=True)
class _Assembly:
    tokens: list[int]
    starts: list[int]  # indices of role starts
    openers: list[int]  # indices of tool openers the template wrote
    marks: list[int]  # positions
    dated: list[int]  # of the line with a date in the system prompt: at most one


def _take_out(text: str, pattern: re.Pattern[str], sentinels: Sentinels) -> tuple[str, list[tuple[int, str]]]:
    """The text without sentinels, which the pattern finds, and where each of them stood in it."""
    kept, found, start, length = [], [], 0, 0
    for match in pattern.finditer(text):
        kept.append(text[start : match.start()])
        length += match.start() - start
        found.append((length, sentinels.meaning(match.group())))
        start = match.end()
    return "".join([*kept, text[start:]]), found


def _names_in(source: str) -> frozenset[str]:
    """Names in the template's code, not in its comments, strings or text."""
    code = " ".join(re.findall(r"\{[{%].*?[%}]\}", re.sub(r"\{#.*?#\}", "", source, flags=re.DOTALL), re.DOTALL))
    return frozenset(re.findall(r"\w+", re.sub(r"'[^']*'|\"[^\"]*\"", "", code)))


def folder_template(folder: Path) -> str | None:
    """The template of a Hugging Face folder, from the places where it may lie, newest first; None if it has none."""
    if (folder / "chat_template.jinja").exists():
        return read_text(folder / "chat_template.jinja")
    for name in ("chat_template.json", "tokenizer_config.json"):
        source = read_json(folder / name).get("chat_template") if (folder / name).exists() else None
        if isinstance(source, list):  # several, by name
            named = [each for each in source if isinstance(each, dict) and each.get("name") == "default"]
            source = named[0].get("template") if named else None
        if isinstance(source, str):
            return source
    return None

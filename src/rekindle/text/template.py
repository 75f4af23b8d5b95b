"""Messages → prompt, by the model's own Jinja template."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rekindle.errors import BadModelFile, BadRequest
from rekindle.prompt import Prompt
from rekindle.text.boundaries import (
    ASSISTANT_ROLES,
    LATTICE,
    SYSTEM_ROLES,
    RoleStarts,
    Structure,
    tool_opener_ids,
    with_boundaries,
)
from rekindle.text.history import Recalled, Recollection, TurnMemory
from rekindle.text.sentinels import Escaper, Sentinels, plain, private_codes, strings_of, without_cache_control
from rekindle.text.tokenizer import Tokenizer, read_json

# What a probe conversation says; words that no template writes by itself.
_PROBES = ("kwzsystem", "kwzfirst", "kwzsecond", "kwzthird")


class ChatTemplate:
    """One model's template, with what was learnt about it from probe conversations."""

    def __init__(self, source: str, tokenizer: Tokenizer, lattice: int = LATTICE) -> None:
        self._tokenizer = tokenizer
        self._lattice = lattice
        self._template = _compile(source)
        special = [tokenizer.token_text(i) for i in sorted(tokenizer.special_ids)]
        self._reserved = private_codes([source, *special])
        self._special = special
        self._openers = tool_opener_ids(tokenizer)
        self._allowed = tokenizer.markup_ids - tokenizer.stop_ids
        self.role_starts = self._find_role_starts()
        self._allowed -= self.role_starts.ids
        self._takes_parts = self._renders_parts()

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer, lattice: int = LATTICE) -> ChatTemplate:
        source = metadata.get("tokenizer.chat_template")
        if not source:
            raise BadModelFile("the file has no tokenizer.chat_template, so it cannot take messages")
        return cls(str(source), tokenizer, lattice)

    @classmethod
    def from_folder(cls, path: str | Path, tokenizer: Tokenizer, lattice: int = LATTICE) -> ChatTemplate:
        return cls(_folder_source(Path(path)), tokenizer, lattice)

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
    ) -> Prompt:
        """As `render`, with the assistant's turns in the ids that the memory has for them. The text is the same."""
        request = self._prepare(messages, tools, options)
        text = self._run(request, request.messages, add_generation_prompt)
        pieces = self._pieces(text, request.sentinels)
        recollection = Recollection(memory, self._tokenizer) if memory is not None else None
        assembly = self._assemble(pieces, request.sentinels, recollection, add_generation_prompt)
        structure = Structure(
            starts=tuple(assembly.starts),
            system=self._count_system_starts(request, text),
            tool_openers=tuple(assembly.openers),
            marks=tuple(assembly.marks),
        )
        return with_boundaries(assembly.tokens, structure, self.role_starts, self._tokenizer, self._lattice)

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
        said = [_readable(message, i) for i, message in enumerate(plain(list(messages), "messages"))]
        shown = [without_cache_control(tool) for tool in plain(list(tools), "tools")] if tools else None
        chosen = plain(options, "chat_template_kwargs")
        marks = Sentinels.avoiding(self._reserved | private_codes(strings_of([said, shown, chosen])))
        escaper = Escaper(self._special, self._texts(self._allowed), self._texts(self._openers), marks)
        escaped = [escaper.message(message) for message in said]
        if not self._takes_parts:
            escaped = [_joined(message, i) for i, message in enumerate(escaped)]
        return _Request(escaped, escaper.tool(shown), escaper.compared(chosen), marks)

    def _texts(self, ids: frozenset[int]) -> list[str]:
        return [self._tokenizer.token_text(i) for i in ids]

    def _run(self, request: _Request, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        tokenizer = self._tokenizer
        try:
            return self._template.render(
                messages=messages,
                tools=request.tools,
                add_generation_prompt=add_generation_prompt,
                bos_token=tokenizer.token_text(tokenizer.bos_id) if tokenizer.bos_id is not None else "",
                eos_token=tokenizer.token_text(tokenizer.eos_id) if tokenizer.eos_id is not None else "",
                **request.options,
            )
        except Exception as error:  # the model's own code met a request it was not written for: any type is possible
            reason = request.sentinels.pattern().sub("", str(error))
            raise BadRequest(f"the model's chat template refuses these messages: {reason}", "messages") from error

    # -- from text to tokens -------------------------------------------------------------------------------------------

    def _pieces(self, text: str, sentinels: Sentinels) -> list[_Piece]:
        """Special tokens in the rendered text are real: none can be read out of a client's string."""
        split = self._tokenizer.split_special(text)
        return [_Piece(*_take_out(stretch, sentinels), special) for stretch, special in split]

    def _assemble(
        self, pieces: Sequence[_Piece], sentinels: Sentinels, recollection: Recollection | None, is_asking: bool
    ) -> _Assembly:
        """The tokens. `is_asking`: the last turn is the generation prompt, which nobody has written yet."""
        assembly = _Assembly([], [], [], [])
        tokens = assembly.tokens
        if self._tokenizer.add_bos and (pieces[0].text or pieces[0].special != self._tokenizer.bos_id):
            assert self._tokenizer.bos_id is not None, "add_bos without a bos"
            tokens.append(self._tokenizer.bos_id)
        recalled: dict[int, Recalled] = {}
        mark_next = False
        for i, piece in enumerate(pieces):
            marks = [at for at, mark in piece.found if mark == sentinels.here]
            ids, positions = self._encode_marked(piece.text, marks, recalled.get(i))
            assembly.marks.extend(len(tokens) + position for position in positions)
            tokens += ids
            mark_next |= any(mark == sentinels.next for _, mark in piece.found)
            if piece.special is None:
                break
            is_start = piece.special in self.role_starts.ids
            if is_start:
                if mark_next:
                    assembly.marks.append(self.role_starts.boundary_at(len(tokens)))
                mark_next = False
                assembly.starts.append(len(tokens))
            elif piece.special in self._openers and (len(piece.text), sentinels.written) not in piece.found:
                assembly.openers.append(len(tokens))
            tokens.append(piece.special)
            if is_start and recollection is not None:
                turn = self._assistant_turn(pieces, i, is_asking)
                recalled.update(enumerate(recollection.turn(tokens, turn), start=i + 1) if turn else ())
        return assembly

    def _assistant_turn(self, pieces: Sequence[_Piece], start: int, is_asking: bool) -> list[tuple[str, int | None]]:
        """The pieces of the turn that begins behind piece `start`; none if the assistant did not write it."""
        speaker = self._tokenizer.token_text(pieces[start].special or 0)
        if self.role_starts.behind:
            is_assistant = pieces[start + 1].text.startswith(ASSISTANT_ROLES)
        else:
            is_assistant = any(word in speaker for word in ASSISTANT_ROLES)
        if not is_assistant:
            return []
        turn = []
        for piece in pieces[start + 1 :]:
            turn.append((piece.text, piece.special))
            if piece.special in self.role_starts.ids:
                return turn
        return [] if is_asking else turn

    def _encode_marked(self, text: str, marks: list[int], recalled: Recalled | None) -> tuple[list[int], list[int]]:
        """Ids of the text, and for each marked character position how many of them end before it or there."""
        if recalled is None and not marks:
            return self._tokenizer.encode(text), []
        ids, ends = (list(recalled.ids), list(recalled.ends)) if recalled is not None else ([], [])
        cut = ends[-1] if ends else 0
        rest, rest_ends = self._tokenizer.encode_with_ends(text[cut:])
        ends += (cut + end for end in rest_ends)
        return ids + rest, [bisect_right(ends, mark) for mark in marks]

    def _count_system_starts(self, request: _Request, text: str) -> int | None:
        """Which role start begins the first message behind system + tools.

        The same system messages and tools are rendered under another first message. Where both texts agree up to and
        with that message's role start, all before it is system + tools, whatever the template made of them.
        """
        count = next((i for i, m in enumerate(request.messages) if m.get("role") not in SYSTEM_ROLES), None)
        if count is None:
            return None
        try:
            other = self._run(request, [*request.messages[:count], {"role": "user", "content": "x"}], False)
        except BadRequest:  # a template that accepts no such conversation has no shared opening to find
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
        try:
            rest = self._run(request, messages, add_generation_prompt=False)
        except BadRequest:
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
        try:
            as_text = self._run(request, [{"role": "user", "content": word}], False)
            parts = [{"type": "text", "text": word}]
            return self._run(request, [{"role": "user", "content": parts}], False) == as_text
        except BadRequest:
            return False


@dataclass(frozen=True, slots=True)
class _Request:
    """What the template gets: escaped."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    options: dict[str, Any]
    sentinels: Sentinels


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str  # plain, without sentinels
    found: list[tuple[int, str]]  # sentinels that stood in it, and where
    special: int | None  # the token behind it; the last piece has none


@dataclass(frozen=True, slots=True)
class _Assembly:
    tokens: list[int]
    starts: list[int]  # indices of role starts
    openers: list[int]  # indices of tool openers the template wrote
    marks: list[int]  # positions


def _take_out(text: str, sentinels: Sentinels) -> tuple[str, list[tuple[int, str]]]:
    """The text without sentinels, and where each of them stood in it."""
    pieces, found, start, length = [], [], 0, 0
    for match in sentinels.pattern().finditer(text):
        pieces.append(text[start : match.start()])
        length += match.start() - start
        found.append((length, sentinels.meaning(match.group())))
        start = match.end()
    return "".join([*pieces, text[start:]]), found


def _readable(message: Any, index: int) -> dict[str, Any]:
    """A message as templates want it: an object with a role, tool-call arguments as objects."""
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{where} must be an object with a role", field=where)
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message | {"tool_calls": [_with_arguments(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]}


def _with_arguments(call: Any, where: str) -> Any:
    """The call with its arguments as an object; the OpenAI dialect sends them as a JSON string."""
    if not isinstance(call, dict):
        raise BadRequest(f"{where} must be an object", field=where)
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_arguments(call["function"], f"{where}.function")}
    if not isinstance(call.get("arguments"), str):
        return call
    try:
        arguments = json.loads(call["arguments"] or "{}")
    except ValueError as error:
        raise BadRequest(f"{where}.arguments is not JSON: {error}", field=f"{where}.arguments") from error
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where}.arguments must be an object", field=f"{where}.arguments")
    return call | {"arguments": plain(arguments, f"{where}.arguments")}


def _joined(message: dict[str, Any], index: int) -> dict[str, Any]:
    """For templates that take no parts: the text parts as lines of one text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    for i, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            where = f"messages[{index}].content[{i}]"
            raise BadRequest(f"{where} is not text, and this model's template takes only text", field=where)
    return message | {"content": "\n".join(part["text"] for part in content)}


def _folder_source(folder: Path) -> str:
    """The template of a Hugging Face folder, from the places where it may lie, newest first."""
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        source = read_json(folder / name).get("chat_template") if (folder / name).exists() else None
        if isinstance(source, list):  # several, by name
            source = {each["name"]: each["template"] for each in source}.get("default")
        if isinstance(source, str):
            return source
    raise BadModelFile(f"{folder}: no chat_template.jinja and no chat_template in tokenizer_config.json")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    """The template in a sandbox, with the blanks and helpers that templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise BadModelFile(f"the chat template does not compile: {error}") from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it; jinja2's own filter would escape `<` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

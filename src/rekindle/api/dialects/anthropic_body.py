"""The bodies of Anthropic's messages: their schema, and the way to a `Conversation`.

A block becomes what templates read (OpenAI's form): tool_use a call of the assistant's message, tool_result a message
of its own, thinking the message's `reasoning_content`. `cache_control` stays on texts, where it marks a boundary.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from rekindle.api.parsing import LARGEST, MAX_MESSAGES, MAX_TOOLS, Body, Stops, kind_of, refuse
from rekindle.api.request import ClientRequest, Conversation
from rekindle.api.thinking import Thinking
from rekindle.grammar import Grammar
from rekindle.text.sentinels import CACHE_CONTROL

Json = dict[str, Any]

# Known, and rightly without effect here: bookkeeping of a hosted service.
HARMLESS = frozenset({"metadata", "service_tier", "inference_geo", "speed", "user_profile_id", "workspace_id"})
SAMPLING_FIELDS = ("temperature", "top_p", "top_k")
SECONDS = {"5m": 300, "1h": 3600}  # by ttl
SIGNED, HIDDEN = "rk1.", "rk2."  # how our signatures begin: a digest of the thinking, or all of it


def signature_of(thinking: str, is_hidden: bool = False) -> str:
    """Comes back with the block. Of hidden thinking it carries the text, which the client has not seen."""
    if is_hidden:
        return HIDDEN + base64.b64encode(thinking.encode()).decode()
    return SIGNED + hashlib.blake2b(thinking.encode(), digest_size=24).hexdigest()


def hidden_in(signature: Any) -> str:
    """The thinking that a signature of ours carries; nothing for any other, which clients of other servers send too."""
    if not isinstance(signature, str) or not signature.startswith(HIDDEN):
        return ""
    try:
        return base64.b64decode(signature[len(HIDDEN) :], validate=True).decode()
    except ValueError:
        return ""


class ThinkingConfig(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=0, le=LARGEST)
    display: Literal["summarized", "omitted", "full"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = None
    format: OutputFormat | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class PromptBody(Body):
    """What the prompt is made of; all that count_tokens takes."""

    model: str | None = None
    messages: Annotated[list[Json], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Annotated[list[Json], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[Json], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: Json | None = None

    _conversation: Conversation = PrivateAttr()
    _skipped_tools: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="after")
    def _is_a_conversation(self) -> PromptBody:
        """Made here, on a worker thread; raises BadRequest for a block that is none."""
        tools = self._callable_tools()
        choice = self.tool_choice
        if choice is not None and choice.type == "tool" and choice.name not in [t["function"]["name"] for t in tools]:
            refuse("tool_choice", f"names the tool {(choice.name or '')[:80]!r}, which is not among tools")
        self._conversation = Conversation(
            messages=self._messages(),
            tools=tools or None,
            template_options={} if choice is None else {"tool_choice": _as_openai(choice)},
            thinking=self._thinking(),
            callable_tools=choice is None or choice.type != "none",
            must_call=choice is not None and choice.type in ("any", "tool"),
            only_tool=choice.name if choice is not None and choice.type == "tool" else None,
            parallel_calls=not (choice is not None and choice.disable_parallel_tool_use),
            keep_seconds=self._keep_seconds(),
        )
        return self

    @property
    def conversation(self) -> Conversation:
        return self._conversation

    @property
    def hides_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    @property
    def ignored_fields(self) -> list[str]:
        """Fields with no effect here that the client may believe to have one."""
        ignored = [name for name in self.model_extra or {} if name not in HARMLESS]
        if not self.conversation.parallel_calls and not self.conversation.must_call:
            ignored.append("tool_choice.disable_parallel_tool_use")
        return ignored + [f"tools: {name}" for name in self._skipped_tools]

    def _messages(self) -> list[Json]:
        said: list[Json] = []
        if self.system:
            said.append({"role": "system", "content": _parts(self.system, "system")})
        for i, message in enumerate(self.messages):
            said += _message(message, f"messages[{i}]")
        if not said or said[-1]["role"] == "assistant":
            refuse("messages", "the last one must not be the assistant's: its answers are not continued (prefill)")
        if self.cache_control is not None:
            said[-1] = said[-1] | {CACHE_CONTROL: self.cache_control}
        return said

    def _callable_tools(self) -> list[Json]:
        """Tools that the client runs, in OpenAI's form; those that Anthropic's servers would run are skipped."""
        tools = []
        for i, tool in enumerate(self.tools or ()):
            if tool.get("type") not in (None, "custom"):
                self._skipped_tools.append(str(tool.get("name") or tool["type"])[:80])
                continue
            name, schema = tool.get("name"), tool.get("input_schema")
            if not isinstance(name, str) or not name:
                refuse(f"tools[{i}].name", "must be a string that is not empty")
            if not isinstance(schema, dict):
                refuse(f"tools[{i}].input_schema", f"must be an object, got {kind_of(schema)}")
            about = {"description": tool["description"]} if isinstance(tool.get("description"), str) else {}
            if tool.get("strict") is True:
                about["strict"] = True
            tools.append({"type": "function", "function": {"name": name, **about, "parameters": schema}})
        return tools

    def _thinking(self) -> Thinking:
        """Without the field there is no thinking: clients take the first block for the text."""
        config = self.thinking
        on = {None: False, "disabled": False, "adaptive": None}.get(config.type if config else None, True)
        budget = config.budget_tokens if config is not None and config.type == "enabled" else None
        if budget == 0:
            on, budget = False, None
        thinking = Thinking(on, budget=budget, on_field="thinking", budget_field="thinking.budget_tokens")
        effort = self.output_config.effort if self.output_config else None
        return thinking.with_effort(effort, "output_config.effort")

    def _keep_seconds(self) -> int:
        """The longest ttl of all marks: 0 where nothing is marked."""
        marks = [(self.cache_control, "cache_control")] if self.cache_control is not None else []
        for name, value in (("system", self.system), ("tools", self.tools), ("messages", self.messages)):
            marks += _marks_in(value, name) if isinstance(value, list) else []
        return max((_seconds(mark, where) for mark, where in marks), default=0)


class MessagesBody(PromptBody):
    max_tokens: int = Field(ge=0, le=LARGEST)
    stream: bool | None = None
    return_token_ids: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=LARGEST)
    stop_sequences: Stops | None = None

    @property
    def client_request(self) -> ClientRequest:
        form = self.output_config.format if self.output_config else None
        return ClientRequest(
            source=self.conversation,
            prompt_field="messages",
            model=self.model,
            sampling={name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None},
            max_tokens=self.max_tokens,
            stop_strings=self.stop_sequences or (),
            grammar=Grammar.of_schema(form.schema_, "output_config.format") if form is not None else None,
            stream=bool(self.stream),
        )


def _as_openai(choice: ToolChoice) -> str | Json:
    """As templates know it."""
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"any": "required"}.get(choice.type, choice.type)


# Marks


def _marks_in(blocks: Sequence[Any], where: str) -> Iterator[tuple[Any, str]]:
    """The cache_control of these blocks, messages or tools and of the blocks inside them."""
    for i, block in enumerate(blocks):
        if isinstance(block, dict):
            if block.get(CACHE_CONTROL) is not None:
                yield block[CACHE_CONTROL], f"{where}[{i}].cache_control"
            if isinstance(block.get("content"), list):
                yield from _marks_in(block["content"], f"{where}[{i}].content")


def _seconds(mark: Any, where: str) -> int:
    if not isinstance(mark, dict) or mark.get("type") != "ephemeral":
        refuse(where, "must be an object of the type 'ephemeral'")
    ttl = mark.get("ttl") or "5m"
    if not isinstance(ttl, str) or ttl not in SECONDS:
        refuse(f"{where}.ttl", f"must be one of {', '.join(SECONDS)}, got {str(ttl)[:40]!r}")
    return SECONDS[ttl]


def _mark_of(block: Mapping[str, Any]) -> Json:
    return {CACHE_CONTROL: block[CACHE_CONTROL]} if block.get(CACHE_CONTROL) is not None else {}


# Blocks


def _blocks(content: Any, where: str) -> list[Json]:
    """The blocks of a content; a string is one of text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        refuse(where, f"must be a string or a list of blocks, got {kind_of(content)}")
    for i, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            refuse(f"{where}[{i}]", "a block must be an object with a type")
    return content


def _message(message: Json, where: str) -> list[Json]:
    role = message.get("role")
    content = message.get("content")
    match role:
        case "user":
            return _user(_blocks(content, f"{where}.content"), f"{where}.content")
        case "assistant":
            return [_assistant(_blocks(content, f"{where}.content"), f"{where}.content")]
        case "system":
            return [{"role": "system", "content": _parts(content, f"{where}.content")}]
    refuse(f"{where}.role", f"must be user, assistant or system, got {str(role)[:40]!r}")


def _user(blocks: list[Json], where: str) -> list[Json]:
    """One message for each result of a tool, and one for the blocks between them."""
    if not blocks:
        refuse(where, "must not be empty")
    said: list[Json] = []
    texts: list[Json] = []

    def end_text() -> None:
        if texts:
            said.append({"role": "user", "content": _one_or_many(texts)})
            texts.clear()

    for i, block in enumerate(blocks):
        if block["type"] == "tool_result":
            end_text()
            said.append(_tool_result(block, f"{where}[{i}]"))
        else:
            texts.append(_text_part(block, f"{where}[{i}]"))
    end_text()
    return said


def _tool_result(block: Json, where: str) -> Json:
    id = block.get("tool_use_id")
    if not isinstance(id, str):
        refuse(f"{where}.tool_use_id", f"must be a string, got {kind_of(id)}")
    inner = _blocks(block.get("content") or "", f"{where}.content")
    parts = [_text_part(each, f"{where}.content[{i}]") for i, each in enumerate(inner)]
    text = "\n".join(part["text"] for part in parts)
    if block.get("is_error"):
        text = f"Error: {text}"
    marks = next((mark for each in (block, *reversed(parts)) if (mark := _mark_of(each))), {})
    return {"role": "tool", "tool_call_id": id, "content": text, **marks}


def _assistant(blocks: list[Json], where: str) -> Json:
    texts, thoughts, calls = [], [], []
    marks: Json = {}
    for i, block in enumerate(blocks):
        match block["type"]:
            case "thinking":
                thoughts.append(_text_in(block, "thinking", f"{where}[{i}]") or hidden_in(block.get("signature")))
            case "redacted_thinking":
                thoughts.append(hidden_in(block.get("data")))
            case "tool_use":
                calls.append(_call(block, f"{where}[{i}]"))
            case _:
                texts.append(_text_part(block, f"{where}[{i}]")["text"])
        marks = _mark_of(block) or marks
    message: Json = {"role": "assistant", "content": "".join(texts), **marks}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Json, where: str) -> Json:
    id, name, arguments = block.get("id"), block.get("name"), block.get("input")
    if not isinstance(id, str) or not isinstance(name, str):
        refuse(where, "a tool_use block needs an id and a name")
    if not isinstance(arguments, dict):
        refuse(f"{where}.input", f"must be an object, got {kind_of(arguments)}")
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _parts(content: Any, where: str) -> str | list[Json]:
    """A content of nothing but text."""
    blocks = _blocks(content, where)
    return _one_or_many([_text_part(block, f"{where}[{i}]") for i, block in enumerate(blocks)])


def _one_or_many(parts: list[Json]) -> str | list[Json]:
    """Parts end their lines: templates write them one directly behind the other. Text alone is a string."""
    ended = [part | {"text": _ended(part["text"])} for part in parts[:-1]] + parts[-1:]
    is_plain = len(ended) == 1 and CACHE_CONTROL not in ended[0]
    return ended[0]["text"] if is_plain else list(ended)


def _ended(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def _text_part(block: Json, where: str) -> Json:
    match block["type"]:
        case "text":
            text = _text_in(block, "text", where)
        case "document":
            text = _document(block, where)
        case "image":
            refuse(where, "images are not supported: this model reads text only")
        case other:
            refuse(where, f"blocks of type {other[:40]!r} are not supported here")
    return {"type": "text", "text": text, **_mark_of(block)}


def _text_in(block: Json, name: str, where: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        refuse(f"{where}.{name}", f"must be a string, got {kind_of(text)}")
    return text


def _document(block: Json, where: str) -> str:
    """A document of text, under its title."""
    source = block["source"] if isinstance(block.get("source"), dict) else {}
    kind = source.get("type")
    if kind == "text":
        text = _text_in(source, "data", f"{where}.source")
    elif kind == "content":
        inner = _blocks(source.get("content"), f"{where}.source.content")
        text = "\n".join(_text_in(each, "text", f"{where}.source.content[{i}]") for i, each in enumerate(inner))
    else:
        refuse(f"{where}.source", f"only documents of text are supported, got {str(kind)[:40]!r}")
    heads = [block[name] for name in ("title", "context") if isinstance(block.get(name), str)]
    return "\n".join(["<document>", *heads, text, "</document>"])

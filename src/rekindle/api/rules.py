"""What the answers of a request have to be, as rules for the engine: its grammar, its tools, its demand for a call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rekindle.api.choice import tail_of
from rekindle.api.ports import TextPort
from rekindle.api.request import ClientRequest, Conversation
from rekindle.errors import BadRequest
from rekindle.grammar.calls import CallableTool, CallFormat, calls_amid_text, calls_only
from rekindle.grammar.frame import ThinkingFrame, in_library_form, whole
from rekindle.grammar.guide import Rules
from rekindle.grammar.types import check_size
from rekindle.prompt import Prompt
from rekindle.text.parsing.parser import END_THINK, THINK


def is_constrained(request: ClientRequest) -> bool:
    source = request.source
    must_call = isinstance(source, Conversation) and source.must_call
    return request.grammar is not None or must_call or constrains_calls(request)


def rules_of(request: ClientRequest, prompt: Prompt, text: TextPort) -> Rules | None:
    """None: the answers may be anything. Runs on a worker thread; raises BadRequest, naming the field at fault.

    prompt: the request's first; those of a conversation have no other.
    """
    answers, field = _answers(request, text)
    if not answers:  # strict tools, which the model's template does not show it
        return None
    if request.ignore_stop_tokens:
        raise BadRequest(f"ignore_eos: does not go with {field}: the answer ends where its grammar does", "ignore_eos")
    thinking = thinking_of(prompt, text) if isinstance(request.source, Conversation) else ThinkingFrame.NONE
    try:
        return text.compile(whole(thinking, *answers), field)
    except BadRequest as error:  # it may quote the grammar, of which the log has only the words before the colon
        why = str(error).removeprefix(f"{field}: ")
        raise BadRequest(f"{field} cannot be kept: {why}", field) from error


def constrains_calls(request: ClientRequest) -> bool:
    """Whether calls in the answers keep to a grammar, so that they are in the model's own format."""
    source = request.source
    if not isinstance(source, Conversation) or not source.callable_tools or not source.tools:
        return False
    return source.must_call or request.grammar is not None or any(map(_is_strict, source.tools))


def thinking_of(prompt: Prompt, text: TextPort) -> ThinkingFrame:
    """By how the prompt ends: the template has opened the thinking, has closed it, or leaves it to the model."""
    tail = tail_of(prompt, text).rstrip()
    if tail.endswith(THINK.encode()):
        return ThinkingFrame.OPEN
    return ThinkingFrame.FREE if text.may_think and not tail.endswith(END_THINK.encode()) else ThinkingFrame.NONE


def _answers(request: ClientRequest, text: TextPort) -> tuple[list[dict[str, Any]], str]:
    """The kinds of answer that are allowed, one of which it has to be, and the field that asks for it."""
    source, grammar = request.source, request.grammar
    answers = [in_library_form(grammar)] if grammar is not None else []
    field = grammar.field if grammar is not None else "tool_choice"
    if not constrains_calls(request) or not text.takes_tools:
        if isinstance(source, Conversation) and source.must_call:
            why = "the model's chat template shows it no tools" if source.tools else "the request has no tools"
            raise BadRequest(f"tool_choice: demands a call, and {why}", "tool_choice")
        return answers, field
    assert isinstance(source, Conversation), "only conversations have tools"
    form = text.call_format
    if form is None:
        raise BadRequest(_no_format(source, field), field if source.must_call or grammar else "tools")
    tools = _tools(source)
    if source.must_call:
        return [calls_only(tools, form, source.parallel_calls)], "tool_choice"
    if grammar is not None:
        return [*answers, calls_only(tools, form, source.parallel_calls)], field
    return [calls_amid_text(tools, form)], "tools"


def _no_format(source: Conversation, field: str) -> str:
    what = field if source.must_call else f"{field} beside tools" if field != "tool_choice" else "tools: strict"
    known = " and ".join(form.value for form in CallFormat)
    return (
        f"{what}: calls in this model's format have no grammar yet, only those in the formats {known} have; "
        "the model may still call tools with tool_choice auto and without strict"
    )


def _tools(source: Conversation) -> list[CallableTool]:
    functions = [(number, tool.get("function")) for number, tool in enumerate(source.tools or ())]
    tools = [_tool(function, number) for number, function in functions if _is_named(function)]
    if source.only_tool is not None:
        tools = [tool for tool in tools if tool.name == source.only_tool]
        if not tools:
            raise BadRequest(f"tool_choice: there is no tool called {source.only_tool[:80]!r}", "tool_choice")
    if not tools:
        raise BadRequest("tools: none of them has a name", "tools")
    _check_sizes(tools)
    return tools


def _check_sizes(tools: list[CallableTool]) -> None:
    size = 0
    for tool in tools:
        size += len(json.dumps(tool.schema))
        check_size(size, tool.field)


def _tool(function: Any, number: int) -> CallableTool:
    schema = function.get("parameters")
    return CallableTool(
        function["name"],
        schema if isinstance(schema, Mapping) else {},
        strict=function.get("strict") is True,
        field=f"tools[{number}].function.parameters",
    )


def _is_named(function: Any) -> bool:
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _is_strict(tool: Mapping[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, Mapping) and function.get("strict") is True

"""The APIs that clients speak; one file each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Scope

from rekindle.api.dialects.anthropic import AnthropicMessages
from rekindle.api.dialects.base import Dialect
from rekindle.api.dialects.ollama import OllamaChat, OllamaGenerate
from rekindle.api.dialects.openai_chat import OpenAIChat
from rekindle.api.dialects.openai_completions import OpenAICompletions
from rekindle.api.dialects.openai_responses import OpenAIResponses
from rekindle.api.errors import fault_of, reason_of

DIALECTS: tuple[Dialect[Any], ...] = (
    OpenAIChat(),
    OpenAICompletions(),
    OpenAIResponses(),
    AnthropicMessages(),
    OllamaChat(),
    OllamaGenerate(),
)


def error_response(error: BaseException, scope: Scope, dialects: Sequence[Dialect[Any]]) -> JSONResponse:
    """The error in the dialect of the path; in the first one's for paths that belong to none. The request's record
    learns why."""
    owners = [each for each in dialects if f"{scope['path']}/".startswith(f"{each.base_path}/")]
    dialect = max(owners, key=lambda each: len(each.base_path), default=dialects[0])
    fault = fault_of(error)
    scope["state"]["record"].reason = reason_of(error, fault)
    status = dialect.error_status(fault)
    return JSONResponse(dialect.error_body(fault), status_code=status, headers=fault.headers)

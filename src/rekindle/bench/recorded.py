"""Sessions of real clients, played back as they were recorded: what the server answers is not put into them.

A session is JSON lines, one per request in the order in which they were sent (sessions/README.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from rekindle.bench.conversations import ConversationSizes, Message, Posted, Script, ScriptedConversation
from rekindle.errors import BadConfig

CHAT = "/v1/chat/completions"
HISTORY = {CHAT: "messages", "/v1/messages": "messages", "/v1/responses": "input"}  # what was said: a field, by path
GOAL = 1.05
OWN = "fix_a_test"
AGENTS = {"claude": "claude_code", "codex": "codex", "opencode": "opencode"}  # files by conversation


def read_session(path: Path) -> list[Posted]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"the session {path} cannot be read: {error}") from error
    requests: list[Posted] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            requests.append(_request(json.loads(line), requests[-1] if requests else None))
        except (ValueError, LookupError, TypeError) as error:
            raise BadConfig(f"{path.name} line {number}: not a recorded request: {error!r}") from error
    if not requests:
        raise BadConfig(f"{path.name} holds no request")
    return requests


def _request(line: dict[str, Any], before: Posted | None) -> Posted:
    """A path and a body, or the body of a chat, of which the messages are taken."""
    path = line.get("path", CHAT)
    body = dict(line["body"] if "path" in line else {"messages": line["messages"]})
    name = HISTORY[path]
    if line.get("as_before"):
        body = _before(before, path).body | body
    if isinstance(body[name], list) and isinstance(body[name][0], int):
        count, *new = body[name]
        body[name] = [*_before(before, path).body[name][:count], *new]
    if not isinstance(body[name], list) or not all(isinstance(each, dict) for each in body[name]):
        raise ValueError(f"{name} must be a list of objects")
    return Posted(path, body)


def _before(before: Posted | None, path: str) -> Posted:
    if before is None or before.path != path:
        raise ValueError(f"the line before is not of {path}")
    return before


def session_file(name: str) -> Path:
    """Of a session that comes with the package."""
    return Path(str(files("rekindle") / "bench" / "sessions" / f"{name}.jsonl"))


def conversation_of(requests: Sequence[Posted]) -> ScriptedConversation:
    return ScriptedConversation(recorded(requests), GOAL, len(requests))


def recorded(requests: Sequence[Posted]) -> Callable[[ConversationSizes, str], Script]:
    def script(sizes: ConversationSizes, seed: str) -> Script:
        for posted in requests:
            yield _set_apart(posted, f"[{seed}]")

    return script


def _set_apart(posted: Posted, seed: str) -> Posted:
    """The seed opens the prompt, or the next replay would find all of it. Templates begin with the tools or with what
    is said first, and a server may sort the tools by name."""
    body = dict(posted.body)
    if posted.path == "/v1/messages" and body.get("system"):
        body["system"] = _opened(body["system"], seed, "text")
    elif body.get("instructions"):
        body["instructions"] = _opened(body["instructions"], seed, "")
    else:
        name = HISTORY[posted.path]
        first, *rest = body[name]
        kind = "input_text" if posted.path == "/v1/responses" else "text"
        body[name] = [first | {"content": _opened(first["content"], seed, kind)}, *rest]
    if body.get("tools"):
        first_name = min(map(_name, body["tools"]))
        body["tools"] = [_described(tool, seed) if _name(tool) == first_name else tool for tool in body["tools"]]
    return Posted(posted.path, body)


def _opened(content: Any, seed: str, kind: str) -> Any:
    """A text, or a list of parts."""
    return f"{seed}\n{content}" if isinstance(content, str) else [{"type": kind, "text": f"{seed}\n"}, *content]


def _name(tool: Message) -> str:
    return str(tool.get("function", tool).get("name", "\U0010ffff"))


def _described(tool: Message, seed: str) -> Message:
    inner = tool.get("function", tool)
    inner = inner | {"description": f"{seed} {inner.get('description', '')}"}
    return tool | {"function": inner} if "function" in tool else inner

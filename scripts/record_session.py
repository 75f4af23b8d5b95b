"""Stands between a client and a server, passes everything on, and writes down the session for `rekindle replay`.

    scripts/record_session.py --url http://127.0.0.1:8080 --port 8090 --out session.jsonl

Point the client to the port and end this with Ctrl-C. Of what was said only the form stays: every word becomes another
one, always the same; numbers, punctuation and tags stand as they were. So two prompts part where they parted, and a
session in which something was computed twice can be shown to others. What all requests share is shortened, unless
--whole. Only the fields that prompts are made of are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import re
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rekindle.api.dialects.anthropic_body import hidden_in, signature_of
from rekindle.api.dialects.responses_output import seal, unseal
from rekindle.bench.conversations import TEXT
from rekindle.bench.recorded import HISTORY

WORDS = sorted(set(TEXT.split()))
TAGS = r"</?(?:system-reminder|total_tokens|environment_context|current_date|cwd)>|x-anthropic-billing-header"
WORD = re.compile(rf"(?P<kept>{TAGS})|[^\W\d_]{{2,}}")
KEPT = ("system", "instructions", "messages", "input", "tools", "tool_choice", "thinking", "output_config", "reasoning",
        "reasoning_effort", "parallel_tool_calls", "text", "include")  # fmt: skip
AS_THEY_ARE = frozenset({"type", "role", "name", "id", "call_id", "tool_use_id", "tool_call_id", "status", "effort",
                         "tool_choice", "display", "include", "summary"})  # fmt: skip
# Of what is shortened: words of a long text or line; one in so many lines is kept, with so many words; words of a
# tool's description; tools.
LONG, KEEPS, LINE, DESCRIPTION, TOOLS = 60, 4, 8, 8, 6
HOP = frozenset({"host", "connection", "content-length", "transfer-encoding", "accept-encoding", "date", "server"})


# -- masks ----------------------------------------------------------------------------------------------------------


def mask(text: str) -> str:
    """The same words for the same words; known tags and what is no letter stay."""
    return WORD.sub(lambda found: found["kept"] or _word(found[0]), text)


def _word(word: str) -> str:
    digest = hashlib.blake2b(word.lower().encode(), digest_size=4).digest()
    return WORDS[int.from_bytes(digest, "big") % len(WORDS)]


def shorten(text: str) -> str:
    """Of long texts some of the lines, and their beginnings. A short line with a number may change: it stays."""
    if len(text.split()) < LONG:
        return text
    return "\n".join(_cut(line) for line in text.split("\n") if _may_change(line) or _keeps(line))


def _may_change(line: str) -> bool:
    return len(line.split()) < LONG and re.search(r"\d|<", line) is not None


def _keeps(line: str) -> bool:
    return hashlib.blake2b(line.encode(), digest_size=1).digest()[0] % KEEPS == 0


def _cut(line: str) -> str:
    return line if _may_change(line) else " ".join(line.split(" ")[:LINE])


def masked(value: Any, whole: bool, name: str = "", said: bool = False) -> Any:
    """A body's value under this name. said: everything inside is someone's words, whatever it is called."""
    if isinstance(value, str):
        return _masked_text(value, whole, name, said)
    if isinstance(value, list):
        return [masked(each, whole, "" if name == "input" else name, said) for each in value]  # items are no input
    if isinstance(value, dict):
        return {key: masked(each, whole, key, said or name == "input") for key, each in value.items()}
    return value


def _masked_text(text: str, whole: bool, name: str, said: bool) -> str:
    if name in AS_THEY_ARE and not said:
        return text
    if name == "arguments":
        try:
            return json.dumps(masked(json.loads(text), True, "", True), ensure_ascii=False)
        except ValueError:
            return mask(text)
    if hidden := hidden_in(text) if name == "signature" else "":
        return signature_of(mask(hidden), is_hidden=True)
    if (sealed := unseal(text) if name == "encrypted_content" else None) is not None:
        return seal(mask(sealed))
    return mask(text if whole or said else shorten(text))


def masked_tools(tools: list[dict[str, Any]], whole: bool) -> list[dict[str, Any]]:
    """Names and types of parameters stay; of a short list the first tools by name, in the client's order."""
    kept = sorted(tools, key=_tool_name)[: None if whole else TOOLS]
    return [_masked_tool(tool) for tool in tools if tool in kept]


def _tool_name(tool: dict[str, Any]) -> str:
    return str(tool.get("function", tool).get("name"))


def _masked_tool(tool: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in tool.items():
        if key == "description":
            made[key] = mask(" ".join(value.split()[:DESCRIPTION]))
        elif key == "function":
            made[key] = _masked_tool(value)
        elif key in ("parameters", "input_schema"):
            made[key] = _parameters(value)
        elif key in ("type", "name", "strict", "cache_control"):
            made[key] = value
    return made


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """Its shape, without words."""
    properties = {name: {"type": about.get("type", "string")} for name, about in schema.get("properties", {}).items()}
    return {"type": "object", "properties": properties, "required": schema.get("required", [])}


def as_session(requests: list[tuple[str, dict[str, Any]]], whole: bool) -> list[dict[str, Any]]:
    """Lines of a session. A line has what is other than in the line before; a number stands for so many messages."""
    lines: list[dict[str, Any]] = []
    before: tuple[str, dict[str, Any]] | None = None
    for path, body in requests:
        made = {name: masked(body[name], whole, name) for name in KEPT if name in body and name != "tools"}
        if body.get("tools"):
            made["tools"] = masked_tools(body["tools"], whole)
        goes_on = before is not None and before[0] == path and set(before[1]) <= set(made)
        lines.append({"path": path, **_changes(before[1] if goes_on and before else None, made, HISTORY[path])})
        before = path, made
    return lines


def _changes(before: dict[str, Any] | None, body: dict[str, Any], history: str) -> dict[str, Any]:
    if before is None:
        return {"body": body}
    said, now = before[history], body[history]
    same = next(
        (i for i, pair in enumerate(zip(said, now, strict=False)) if pair[0] != pair[1]), min(len(said), len(now))
    )
    other = {name: value for name, value in body.items() if name != history and value != before.get(name)}
    return {"as_before": True, "body": {**other, history: [same, *now[same:]]}}


# -- between client and server --------------------------------------------------------------------------------------


class Proxy(ThreadingHTTPServer):
    def __init__(self, port: int, url: str) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.target = urlsplit(url).netloc
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_POST(self) -> None:
        self._pass_on()

    def do_GET(self) -> None:
        self._pass_on()

    def do_HEAD(self) -> None:
        self._pass_on()

    def log_message(self, format: str, *arguments: Any) -> None:
        """The server logs."""

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = urlsplit(self.path).path
        if self.command == "POST" and path in HISTORY:
            with self.server.lock:
                self.server.requests.append((path, json.loads(body)))
        upstream = http.client.HTTPConnection(self.server.target, timeout=1800)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP}
        upstream.request(self.command, self.path, body or None, headers)
        answer = upstream.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP:
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        while data := answer.read1(1 << 16):
            self.wfile.write(data)
        upstream.close()
        self.close_connection = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the server")
    parser.add_argument("--port", type=int, default=8090, help="for the client; 0 takes a free one")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--whole", action="store_true", help="shorten nothing")
    options = parser.parse_args()
    proxy = Proxy(options.port, options.url)
    print(f"http://127.0.0.1:{proxy.server_port}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        proxy.serve_forever()
    except (KeyboardInterrupt, SystemExit):
        lines = as_session(proxy.requests, options.whole)
        options.out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        print(f"{len(lines)} requests in {options.out}")


if __name__ == "__main__":
    main()

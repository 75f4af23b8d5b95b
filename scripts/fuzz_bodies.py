"""Throw damaged bodies, headers and paths at every route of a server and see that each gets an answer or a 4xx.

    scripts/fuzz_bodies.py [--bodies 10000] [--seed 0] [--model FILE]

Every body starts as a good one and is then bent: fields take values of every kind and size, names are made up, JSON is
nested, cut, repeated or has bytes flipped; other routes get odd methods, paths and headers. Without --model a tiny
random model is written and served. The last line is JSON: answers by status, and what must not be there: 5xx, answers
that are no JSON, silence, tracebacks in the server's log, slots that stay taken. Exit status 1 if there is any.
"""

from __future__ import annotations

import argparse
import copy
import http.client
import json
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from rekindle.api.dialects.anthropic_body import MessagesBody, PromptBody
from rekindle.api.dialects.ollama import ShowBody
from rekindle.api.dialects.ollama_body import GenerateBody, OllamaChatBody
from rekindle.api.dialects.openai_chat import ChatBody
from rekindle.api.dialects.openai_completions import CompletionBody
from rekindle.api.dialects.openai_responses import ResponsesBody
from rekindle.api.parsing import Body
from rekindle.api.utilities import DetokenizeBody, TokenizeBody
from rekindle.bench.replay import OwnServer
from rekindle.bench.synth import write_synthetic

SERVE = ("--context", "128", "--sequences", "4", "--threads", "1", "--max-body", "1MiB")
CLIENTS = 4
PATIENCE = 60  # seconds without an answer are silence

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
SEALED = "rekindle-reasoning:SG0u"
MARK = {"type": "ephemeral", "ttl": "1h"}
PROMPT: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be brief.", "cache_control": MARK}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "rk2.eJw="},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "7", "is_error": True}]},
        {"role": "system", "content": "Go on."},
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {}}}}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1},
    "output_config": {"effort": "high"},
}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "7"},
            {"role": "user", "content": "Go on."},
        ],
        "tools": [TOOL],
        "max_tokens": 2,
        "temperature": 0.5,
    },
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 2, "temperature": 0.5},
    "/v1/messages": {**PROMPT, "max_tokens": 2, "temperature": 0.5, "stop_sequences": ["x"]},
    "/v1/messages/count_tokens": PROMPT,
    "/v1/responses": {
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": SEALED},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
            {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "x"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "7"}]},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "8"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {}}, {"type": "custom", "name": "g", "format": {}}],
        "tool_choice": "auto",
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}},
        "include": ["reasoning.encrypted_content"],
        "max_output_tokens": 2,
        "temperature": 0.5,
    },
    "/api/chat": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "thinking": "Hm.",
                "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
            },
            {"role": "tool", "tool_name": "f", "content": "7"},
        ],
        "tools": [TOOL],
        "think": True,
        "options": {"num_predict": 2, "temperature": 0.5, "top_k": 5, "stop": ["x"], "num_ctx": 64},
    },
    "/api/generate": {"prompt": "Hi", "system": "Be brief.", "stream": False, "options": {"num_predict": 2, "seed": 1}},
    "/api/show": {"model": "tiny"},
    "/tokenize": {"content": "Hi", "add_special": True, "with_pieces": True, "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
}
BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": PromptBody,
    "/v1/responses": ResponsesBody,
    "/api/chat": OllamaChatBody,
    "/api/generate": GenerateBody,
    "/api/show": ShowBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
FIELDS = {route: sorted(body.model_fields) for route, body in BODIES.items()}
NAMES = ("Accept", "Authorization", "Origin", "Cookie", "X-Api-Key", "Content-Type", "Host", "Anthropic-Version")
OTHER = (
    "/",
    "/health",
    "/ready",
    "/metrics",
    "/v1/models",
    "/v1/models/x",
    "/v1/embeddings",
    "/props",
    "/api/tags",
    "/api/ps",
    "/api/version",
    "/api/embed",
    "/nowhere",
)

NUMBERS = (
    0,
    1,
    -1,
    2,
    0.5,
    -0.0,
    127,
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63) - 1,
    10**30,
    1e308,
    5e-324,
)
STRINGS = (
    "",
    "x",
    "\x00",
    "\ud800",
    "a\udfff",
    "<|im_start|>",
    "</think>",
    "{{ 7 * 7 }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "../../etc/passwd",
    "[red]",
    "\x1b[31m",
    "text",
    "assistant",
    "json_object",
    "ﷺ" * 50,
    "e" + "\u0301" * 500,
    "\ue000\uf8ff",
    "z" * 5000,
    " " * 5000,
)


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, the odd ones more often than life has them."""
    kind = rng.randrange(9 if depth < 5 else 5)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(STRINGS)
    if kind in (2, 3):
        return rng.choice((None, True, False, rng.random(), rng.randrange(-5, 300)))
    if kind == 4:
        return "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x110000)))) for _ in range(rng.randrange(20)))
    if kind in (5, 6):
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    names = [rng.choice((*STRINGS, "role", "content", "type", "text", "0", "5")) for _ in range(rng.randrange(4))]
    return {name: value(rng, depth + 1) for name in names}


def deep(rng: random.Random) -> Any:
    made: Any = rng.choice(NUMBERS)
    for _ in range(rng.choice((10, 63, 64, 65, 200, 480))):
        made = [made] if rng.random() < 0.5 else {"a": made}
    return made


def places(made: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a value."""
    found: list[tuple[Any, Any]] = []
    if isinstance(made, dict | list):
        for key in made if isinstance(made, dict) else range(len(made)):
            found += [(made, key), *places(made[key])]
    return found


def bend(rng: random.Random, route: str) -> Any:
    body = copy.deepcopy(GOOD[route])
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        how = rng.randrange(6)
        container, key = rng.choice(places(body)) if body else (body.setdefault("x", 1) and body, "x")
        if how == 0:
            container[key] = value(rng)
        elif how == 1:
            body[rng.choice(FIELDS[route])] = value(rng)
        elif how == 2:
            body[rng.choice(FIELDS[route])] = rng.choice(NUMBERS)
        elif how == 3:
            del container[key]
        elif how == 4:
            container[key] = deep(rng) if rng.random() < 0.3 else [container[key]] * rng.randrange(3)
        else:
            body["".join(chr(rng.randrange(32, 0x3000)) for _ in range(5))] = value(rng)
    return body


def damaged(rng: random.Random, route: str) -> bytes:
    text = json.dumps(bend(rng, route)).encode("utf-8", "surrogatepass")
    if rng.random() < 0.7:
        return text
    at = rng.randrange(max(1, len(text)))
    how = rng.randrange(5)
    if how == 0:
        return text[:at]
    if how == 1:
        return text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
    if how == 2:
        return text[:at] + text[: rng.randrange(50)] + text[at:]
    if how == 3:
        return rng.choice((b"", b"null", b"NaN", b"[]", b'"x"', b"{" * 10**5, b"[" * 10**5, b"\xff\xfe{}", b"1e999"))
    return text.replace(b"0.5", rng.choice((b"NaN", b"1e999", b"-Infinity", b"0x10", b"1" + b"0" * 5000)))


@dataclass
class Tally:
    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, route: str, status: int, body: bytes, sent: bytes) -> None:
        with self.lock:
            self.statuses.setdefault(route, Counter())[status] += 1
            if status >= 500:
                self.faults.append(f"{route} {status}: {sent[:300]!r} -> {body[:300]!r}")
            elif status >= 400 and not _is_error(body):
                self.faults.append(f"{route} {status} without an error: {sent[:200]!r} -> {body[:200]!r}")

    def fault(self, what: str) -> None:
        with self.lock:
            self.faults.append(what)


def _is_error(body: bytes) -> bool:
    try:
        error = json.loads(body)["error"]
        return bool(error if isinstance(error, str) else error["message"])  # a string where the path is Ollama's
    except (ValueError, KeyError, TypeError):
        return False


Errand = tuple[str, str, str, dict[str, str], bytes]  # route (for the tally), method, path, headers, body


def errands(rng: random.Random, bodies: int) -> Iterator[Errand]:
    for route in GOOD:
        for _ in range(bodies):
            yield route, "POST", route, {"Content-Type": "application/json"}, damaged(rng, route)
    for _ in range(bodies // 10):
        path = rng.choice(OTHER) + rng.choice(
            ("", "", "?" + "q" * rng.randrange(100), "/" + quote(rng.choice(STRINGS[5:17])))
        )
        method = rng.choice(("GET", "GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"))
        name = rng.choice(NAMES)
        said = "".join(chr(rng.randrange(33, 127)) for _ in range(rng.randrange(1, 200)))
        yield "other routes", method, path, {name: said}, b""


def work(address: tuple[str, int], todo: Iterator[Errand], lock: threading.Lock, tally: Tally) -> None:
    connection = http.client.HTTPConnection(*address, timeout=PATIENCE)
    while True:
        try:
            with lock:
                errand = next(todo, None)
        except Exception as error:
            tally.fault(f"no more bodies could be made: {error!r}")
            raise
        if errand is None:
            return
        route, method, path, headers, body = errand
        try:
            connection.request(method, path, body=body or None, headers=headers)
            response = connection.getresponse()
            tally.count(route, response.status, response.read() or b'{"error": {"message": "HEAD"}}', body)
        except (OSError, http.client.HTTPException) as error:
            tally.fault(f"{route} {method} {path}: no answer ({error!r}) to {headers} {body[:300]!r}")
            connection.close()


def after(server: OwnServer, tally: Tally) -> int:
    """What must be true when all is done; the most memory the server took, in bytes."""
    try:
        health = json.loads(server.read("/health"))
        if (health["running"], health["waiting"]) != (0, 0):
            tally.fault(f"slots stay taken: {health}")
    except OSError as error:
        tally.fault(f"the server is gone: {error!r}")
        return 0
    peak = next(
        line for line in Path(f"/proc/{server.pid}/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    server.stop()
    for line in server.said:
        if "Traceback" in line or "internal error" in line:
            tally.fault(f"the log: {line.strip()}")
    return int(peak.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bodies", type=int, default=10_000, help="for every route that takes one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or write_synthetic(Path(folder) / "tiny.gguf", "tiny")
        server = OwnServer([str(model), *SERVE, "--no-cache-dir"])
        url, tally, lock = urlsplit(server.url), Tally(), threading.Lock()
        todo = errands(random.Random(given.seed), given.bodies)
        address = (str(url.hostname), int(url.port or 80))
        threads = [threading.Thread(target=work, args=(address, todo, lock, tally)) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        peak = after(server, tally)
    for fault in tally.faults[:20]:
        print(fault, file=sys.stderr)
    answers = {route: dict(sorted(counts.items())) for route, counts in tally.statuses.items()}
    print(json.dumps({"answers": answers, "faults": len(tally.faults), "peak_mb": peak >> 20}))
    sys.exit(1 if tally.faults else 0)


if __name__ == "__main__":
    main()

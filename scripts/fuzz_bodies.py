"""Throw damaged bodies, headers and paths at every route of a server and see that each gets an answer or a 4xx.

    scripts/fuzz_bodies.py [--bodies 10000] [--seed 0] [--model FILE] [--only PATH ...]

The routes are the app's own: every one that takes a POST. A body starts as a good one and is then bent: fields take
values of every kind and size, schemas that are hard to compile, names are made up, JSON is nested, cut, repeated, has
two values for a name or bytes flipped; other routes get odd methods, paths and headers. Without --model a tiny random
model with tools and thinking is written and served. The last line is JSON: answers by status, the most memory that the
server took, alone and with its worker processes, and what must not be there: 5xx, answers that are no JSON, silence,
tracebacks in the server's log, slots that stay taken, routes that took no body at all. Exit status 1 if there is any.
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
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from starlette.routing import Route

from rekindle.api import Guard, ModelHost, create_app
from rekindle.api.parsing import Body
from rekindle.bench.replay import OwnServer
from rekindle.bench.synth import write_synthetic

TEMPLATE = Path(__file__).parents[1] / "tests" / "support" / "qwen.jinja"
SERVE = ("--context", "896", "--sequences", "4", "--threads", "1", "--max-body", "1MiB", "--cache-ram", "64MiB")
PRESETS = "[models.tiny]\nfile = {}\nmax-tokens = 4\n"  # a body that names no limit must not take seconds
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


def routes() -> tuple[list[str], list[str]]:
    """Those that take a body and the others, as the app has them: a dialect is tried from its first day."""
    found = [route for route in create_app(ModelHost([]), Guard()).routes if isinstance(route, Route)]
    taking = {route.path for route in found if "POST" in (route.methods or ())}
    others = {route.path.replace("{", "").replace("}", "") for route in found} - taking
    return sorted(taking), sorted(others | {"/nowhere", "/v1/models/x"})


def kinds_of(base: type[Body]) -> Iterator[type[Body]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds_of(kind)


# Every name that any schema has, at any depth: a route ignores the others' names, or is wrong not to.
FIELDS = sorted({field.alias or name for kind in kinds_of(Body) for name, field in kind.model_fields.items()})
NAMES = ("Accept", "Authorization", "Origin", "Cookie", "X-Api-Key", "Content-Type", "Host", "Anthropic-Version")
POWERS = (2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400)
NUMBERS = (0, 1, -1, 2, 0.5, -0.0, 127, *POWERS, 1e308, -1e308, 5e-324)
# Stand in a body until it is text: what Python's encoder does not write.
ODD_NUMBER, ODD_STRING = 0.987654321, "\ue123odd"
LITERALS = (b"NaN", b"1e999", b"-1e999", b"-Infinity", b"-0", b"1E400", b"0x10", b"1" + b"0" * 5000, b"01", b"+1")
RAW = (
    b"\xed\xa0\x80",
    b"\xed\xb0\x80",
    b"\xff",
    b"\xc0\x80",
    b"\xf5\x80\x80\x80",
    b"\x00",
    b"\x7f",
    b"\\ud800",
    b"\\ud83d\\ud83d",
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
    '{"a": "\\ud800"}',
    '{"a": NaN, "b": 1e999}',
    '{"a": ' + "[" * 900 + "]" * 900 + "}",
    "https://example.org/x.json",
    "rk2.////",
    "rekindle-reasoning:////",
)
HARD: tuple[Any, ...] = (  # schemas, and what is found where one is looked for
    {"$ref": "#"},
    {"$ref": "https://example.org/x.json"},
    {"$ref": "file:///etc/passwd"},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 5}}, "$ref": "#/$defs/a"},
    {"enum": [f"value {i}" for i in range(3000)]},
    {"type": "string", "pattern": "^(a+)+$"},
    {"type": "string", "pattern": "(x{1,500}){1,500}"},
    {"type": "string", "pattern": "(?=a)b\\1"},
    {"type": "string", "minLength": 2**40, "maxLength": 2**50},
    {"type": "array", "items": {}, "minItems": 10**6},
    {"type": "integer", "minimum": -(10**30), "maximum": 10**30, "multipleOf": 7},
    {"type": "number", "minimum": 1e308, "maximum": -1e308},
    {"allOf": [{"anyOf": [{"type": "object", "properties": {f"{i}{j}": {}}} for j in range(8)]} for i in range(8)]},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}, "additionalProperties": False},
    {"oneOf": [{"const": i} for i in range(300)]},
    {"type": ["string", "null", "nothing"]},
    {"not": {}},
)


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, the odd ones more often than life has them."""
    if depth == 0 and rng.random() < 0.05:
        return copy.deepcopy(rng.choice(HARD))
    kind = rng.randrange(9 if depth < 5 else 5)
    if kind == 0:
        return rng.choice((*NUMBERS, ODD_NUMBER))
    if kind == 1:
        return rng.choice((*STRINGS, ODD_STRING))
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


def seed_of(rng: random.Random, route: str) -> dict[str, Any]:
    """A good body; for a route that has none here, one of a route above it, or of any."""
    above = [path for path in GOOD if f"{route}/".startswith(f"{path}/")]
    return copy.deepcopy(GOOD[max(above, key=len) if above else rng.choice(sorted(GOOD))])


def bend(rng: random.Random, route: str) -> Any:
    body = seed_of(rng, route)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        how = rng.randrange(8)
        container, key = rng.choice(places(body)) if body else (body.setdefault("x", 1) and body, "x")
        if how == 0:
            container[key] = value(rng)
        elif how in (1, 2):
            body[rng.choice(FIELDS)] = value(rng) if how == 1 else rng.choice((*NUMBERS, ODD_NUMBER))
        elif how == 3:
            del container[key]
        elif how == 4:
            container[key] = deep(rng) if rng.random() < 0.3 else [container[key]] * rng.randrange(3)
        elif how == 5:
            body["".join(chr(rng.randrange(32, 0x3000)) for _ in range(5))] = value(rng)
        elif how == 6 and isinstance(container, dict):
            container[rng.choice(FIELDS)] = value(rng)
        else:
            body |= constrained(rng)
    return body


def constrained(rng: random.Random) -> dict[str, Any]:
    """The fields by which some dialect asks for an answer of a form, with a schema that may be hard."""
    schema = copy.deepcopy(rng.choice((*HARD, {"type": "object", "properties": {"a": {"type": "integer"}}})))
    tool = {"name": "f", "strict": True, "parameters": schema, "input_schema": schema}
    nested = {**tool, "type": "function", "function": tool}
    of_schema = {
        "type": "json_schema",
        "name": "x",
        "schema": schema,
        "json_schema": {"schema": schema, "strict": True},
    }
    regex = schema.get("pattern", "(a|aa)+b") if isinstance(schema, dict) else "x"
    return rng.choice(
        (
            {"tools": [rng.choice((tool, nested))]},
            {"tools": [rng.choice((tool, nested))], "tool_choice": rng.choice(("required", {"type": "any"}))},
            {"response_format": of_schema},
            {"text": {"format": of_schema}, "output_config": {"format": of_schema}, "format": schema},
            {"structured_outputs": {"json": schema}},
            {"structured_outputs": {"regex": regex}},
            {"structured_outputs": {"grammar": rng.choice(("start: /(a+)+/ start*", 'root ::= root root | "a"'))}},
            {"structured_outputs": {"choice": [rng.choice(STRINGS) for _ in range(rng.randrange(1, 9))]}},
        )
    )


def written(rng: random.Random, body: Any) -> bytes:
    """As JSON, with what no encoder writes."""
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    text = text.replace(str(ODD_NUMBER).encode(), rng.choice(LITERALS))
    for spelling in (ODD_STRING.encode(), json.dumps(ODD_STRING)[1:-1].encode()):
        text = text.replace(spelling, rng.choice(RAW))
    return text


def damaged(rng: random.Random, route: str) -> bytes:
    text = written(rng, bend(rng, route))
    if rng.random() < 0.8:
        return text
    at = rng.randrange(max(1, len(text)))
    how = rng.randrange(6)
    if how == 0:
        return text[:at]
    if how == 1:
        return text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
    if how == 2:
        return text[:at] + text[: rng.randrange(50)] + text[at:]
    if how == 3:
        return rng.choice((b"", b"null", b"NaN", b"[]", b'"x"', b"{" * 10**5, b"[" * 10**5, b"\xff\xfe{}", b"1e999"))
    if how == 4:  # a name twice
        twice = json.dumps({rng.choice(FIELDS): value(rng)}).encode()[:-1]
        return twice + b"," + text[1:]
    return text.replace(b"0.5", rng.choice(LITERALS))


@dataclass
class Tally:
    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    unsupported: set[str] = field(default_factory=set)  # routes that say so
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, route: str, status: int, body: bytes, sent: bytes) -> None:
        with self.lock:
            self.statuses.setdefault(route, Counter())[status] += 1
            if b"makes no embeddings" in body:
                self.unsupported.add(route)
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


def errands(rng: random.Random, bodies: int, only: Sequence[str]) -> Iterator[Errand]:
    taking, others = routes()
    for route in only or taking:
        for _ in range(bodies):
            yield route, "POST", route, {"Content-Type": "application/json"}, damaged(rng, route)
    for _ in range(bodies // 10):
        path = rng.choice((*taking, *others)) + rng.choice(
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
        if health := _busy(server):
            tally.fault(f"slots stay taken: {health}")
    except OSError as error:
        tally.fault(f"the server is gone: {error!r}")
        return 0
    peak = _kib(server.pid, "VmHWM")
    server.stop()
    for line in server.said:
        if "Traceback" in line or "internal error" in line:
            tally.fault(f"the log: {line.strip()}")
    for route, counts in tally.statuses.items():
        if set(counts) == {400} and route not in tally.unsupported:
            tally.fault(f"{route} took no body at all: it needs a good one here")
    return peak * 1024


def _busy(server: OwnServer) -> dict[str, Any] | None:
    """What the server says of itself if it has work for long; the last clients' next prompts are still prepared."""
    until = time.monotonic() + PATIENCE
    while (health := json.loads(server.read("/health")))["running"] or health["waiting"]:
        if time.monotonic() > until:
            return dict(health)
        time.sleep(0.1)
    return None


def _kib(pid: int, name: str) -> int:
    """A line of a process's status; 0 where it is gone."""
    lines = _read(Path(f"/proc/{pid}/status")).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


class Watch(threading.Thread):
    """The most memory of a server and its worker processes together, looked at ten times a second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._over = threading.Event()
        self.peak = 0  # bytes

    def run(self) -> None:
        while not self._over.wait(0.1):
            self.peak = max(self.peak, 1024 * sum(_kib(pid, "VmRSS") for pid in (self._pid, *self._children())))

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _children(self) -> list[int]:
        """A child that does not run its script yet still shows the memory of the server."""
        listed = (_read(file).split() for file in Path(f"/proc/{self._pid}/task").glob("*/children"))
        return [int(pid) for pids in listed for pid in pids if "_worker.py" in _read(Path(f"/proc/{pid}/cmdline"))]


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # a thread or a process that has ended meanwhile
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bodies", type=int, default=10_000, help="for every route that takes one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--only", action="append", default=[], help="a route; may come several times")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny = Path(folder) / "tiny.gguf"
        model = given.model or write_synthetic(tiny, "tiny", template=TEMPLATE.read_text())
        presets = Path(folder) / "presets.toml"
        presets.write_text(PRESETS.format(json.dumps(str(model.resolve()))))
        server = OwnServer(["--models", str(presets), *SERVE, "--no-cache-dir"])
        url, tally, lock = urlsplit(server.url), Tally(), threading.Lock()
        todo = errands(random.Random(given.seed), given.bodies, given.only)
        address = (str(url.hostname), int(url.port or 80))
        watch = Watch(server.pid)
        threads = [threading.Thread(target=work, args=(address, todo, lock, tally)) for _ in range(CLIENTS)]
        for thread in (watch, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        watch.stop()
        peak = after(server, tally)
    for fault in tally.faults[:20]:
        print(fault, file=sys.stderr)
    answers = {route: dict(sorted(counts.items())) for route, counts in tally.statuses.items()}
    peaks = {"peak_mb": peak >> 20, "peak_with_workers_mb": watch.peak >> 20}
    print(json.dumps({"answers": answers, "faults": len(tally.faults), **peaks}))
    sys.exit(1 if tally.faults else 0)


if __name__ == "__main__":
    main()

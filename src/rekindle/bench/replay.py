"""Agent-like conversations against a live server, and an account of every prompt token in them.

Per turn: tokens sent, restored from RAM and from disk, computed, and never seen before. The last number is the
client's own: a position of a prompt counts as seen if the same prefix was sent or generated before, so it is the least
that any server has to compute. What the server computed for the requests, divided by that, is the figure of merit.

A server may also prepare the next prompt while the client is busy. A request then finds computed what its client never
sent before, so the figure can fall below 1; the second figure counts that work too, used or not.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.errors import BadConfig, RekindleError

Message = dict[str, Any]
Script = Generator[list[Message], str, None]  # yields the messages of each request, is sent the answer's text

START_SECONDS = 600  # a large model takes minutes to load
ANSWER_SECONDS = 1800


# -- what is said ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sizes:
    """In words, which are tokens for most vocabularies. A server's fixed cost per turn is a token or two: against
    turns of a few words it would be all that is measured, so the default turn is a few hundred."""

    system: int = 300
    turn: int = 200
    turns: int = 6
    answer: int = 8  # tokens

    def scaled(self, scale: float) -> Sizes:
        return Sizes(round(self.system * scale), round(self.turn * scale), self.turns, self.answer)


TEXT = (
    "the value of each line in this file is read once and kept until a test asks for it again so that no work is done "
    "twice when a user changes one name or moves a block from here to there and then runs all checks on both sides "
    "with more time than before we look at what came back and write down where it went wrong first"
)


def prose(count: int, seed: str) -> str:
    """Words without sense, the same for the same seed."""
    chosen = random.Random(seed).choices(TEXT.split(), k=count)
    lines = [" ".join(chosen[i : i + 12]) for i in range(0, count, 12)]
    return "\n".join(lines)


def _system(sizes: Sizes, seed: str) -> Message:
    return {"role": "system", "content": prose(sizes.system, seed)}


def _result(sizes: Sizes, seed: str) -> Message:
    """A tool's result, as agents send it: long, and told in a user turn. No two begin alike: a common beginning would
    count as seen, and no server can tell before the second one comes that it is worth a snapshot."""
    return {"role": "user", "content": prose(sizes.turn, seed)}


def _said(answer: str) -> Message:
    return {"role": "assistant", "content": answer or "."}


def growing(sizes: Sizes, seed: str) -> Script:
    """Each turn appends the answer as it came and a new tool result."""
    messages = [_system(sizes, seed)]
    for turn in range(sizes.turns):
        messages.append(_result(sizes, f"{seed} {turn}"))
        messages.append(_said((yield messages)))


def thinking(sizes: Sizes, seed: str) -> Script:
    """The client sends answers back without what the model thought: all up to the end of the think block, or where
    a short answer has none, its first three quarters."""
    messages = [_system(sizes, seed)]
    for turn in range(sizes.turns):
        messages.append(_result(sizes, f"{seed} {turn}"))
        messages.append(_said(without_thinking((yield messages))))


def without_thinking(answer: str) -> str:
    _, found, rest = answer.partition("</think>")
    return rest.strip() if found else answer[3 * len(answer) // 4 :].strip()


def subagents(sizes: Sizes, seed: str) -> Script:
    """Three conversations in turns, under one system prompt."""
    system = _system(sizes, seed)
    each: list[list[Message]] = [[system], [system], [system]]
    for turn in range(sizes.turns):
        messages = each[turn % 3]
        messages.append(_result(sizes, f"{seed} {turn}"))
        messages.append(_said((yield messages)))


def edited(sizes: Sizes, seed: str) -> Script:
    """A growing conversation in which, past its middle, one line of an early tool result changes."""
    messages = [_system(sizes, seed)]
    for turn in range(sizes.turns):
        if turn == sizes.turns - 2:
            messages[3] = {"role": "user", "content": _with_an_edit(messages[3]["content"])}
        messages.append(_result(sizes, f"{seed} {turn}"))
        messages.append(_said((yield messages)))


def _with_an_edit(text: str) -> str:
    lines = text.split("\n")
    lines[len(lines) // 3] = "[this line was cleared]"
    return "\n".join(lines)


def recorded(requests: Sequence[list[Message]]) -> Callable[[Sizes, str], Script]:
    """A session as it was: what the server answers is not put into it."""

    def script(sizes: Sizes, seed: str) -> Script:
        for messages in requests:
            first, *rest = messages
            # The seed sets one replay apart from the next, which would otherwise find all of it.
            yield [{**first, "content": f"[{seed}]\n{first['content']}"}, *rest]

    return script


def read_session(path: Path) -> list[list[Message]]:
    """JSON lines, one per request in the order they were sent: {"messages": [...]} as in a chat request's body.

    Other fields of a line are ignored, so a log of request bodies can be given as it is.
    """
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            messages = json.loads(line)["messages"]
        except (ValueError, KeyError, TypeError) as error:
            raise BadConfig(f"{path.name} line {number}: not a JSON object with messages: {error}") from error
        if not isinstance(messages, list) or not messages or not isinstance(messages[0].get("content"), str):
            raise BadConfig(f"{path.name} line {number}: messages must be a list that begins with a text message")
        requests.append(messages)
    if not requests:
        raise BadConfig(f"{path.name} holds no request")
    return requests


def own_session() -> Path:
    """The session that comes with the package."""
    return Path(str(files("rekindle") / "bench" / "sessions" / "fix_a_test.jsonl"))


# -- the account ----------------------------------------------------------------------------------------------------


class Seen:
    """Everything that was sent or generated."""

    def __init__(self) -> None:
        self._sequences: list[np.ndarray] = []

    def length(self, tokens: Sequence[int]) -> int:
        """How much of it has been seen, from its beginning."""
        ours = np.asarray(tokens, dtype=np.int32)
        return max((_common(ours, other) for other in self._sequences), default=0)

    def add(self, tokens: Sequence[int]) -> None:
        new = np.asarray(tokens, dtype=np.int32)
        self._sequences = [old for old in self._sequences if _common(old, new) < len(old)]
        self._sequences.append(new)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for one request."""

    text: str
    prompt: list[int]
    answer: list[int]  # with the stop token
    ram: int
    disk: int
    computed: int
    miss: str | None
    first_token: float  # seconds


@dataclass(frozen=True, slots=True)
class Row:
    """One turn."""

    conversation: str
    turn: int
    restarted: bool  # the server was started again just before
    sent: int
    ram: int
    disk: int
    computed: int
    unseen: int
    first_token_ms: float
    miss: str | None


@dataclass(slots=True)
class Total:
    """One conversation."""

    conversation: str
    restart: bool
    goal: float
    rows: list[Row] = field(default_factory=list)
    engine_computed: int = 0  # the engine's own count, with what it ran in the background

    @property
    def computed(self) -> int:
        return sum(row.computed for row in self.rows)

    @property
    def unseen(self) -> int:
        return sum(row.unseen for row in self.rows)

    @property
    def ratio(self) -> float:
        return self.computed / max(1, self.unseen)

    @property
    def ratio_with_background(self) -> float:
        return self.engine_computed / max(1, self.unseen)

    @property
    def holds(self) -> bool:
        return self.ratio <= self.goal

    def as_dict(self) -> dict[str, Any]:
        sums = {name: sum(getattr(row, name) for row in self.rows) for name in ("sent", "ram", "disk", "unseen")}
        first = sorted(row.first_token_ms for row in self.rows)
        return {
            "conversation": self.conversation,
            "restart": self.restart,
            **sums,
            "computed": self.computed,
            "computed_with_background": self.engine_computed,
            "ratio": round(self.ratio, 4),
            "ratio_with_background": round(self.ratio_with_background, 4),
            "goal": self.goal,
            "median_first_token_ms": first[len(first) // 2] if first else 0.0,
            "turns": [asdict(row) for row in self.rows],
        }


# -- servers --------------------------------------------------------------------------------------------------------


class Server:
    """A server at an address."""

    can_restart = False

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def restart(self) -> None:
        raise AssertionError("only a server we started can be started again")

    def stop(self) -> None:
        """It is somebody else's."""

    def ask(self, messages: Sequence[Message], max_tokens: int) -> Reply:
        body = {
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), self._headers, method="POST"
        )
        began = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
                return _read_reply(_events(response), began)
        except (OSError, http.client.HTTPException) as error:
            raise ReplayFailed(f"{self.url} did not answer: {error}") from error

    def computed(self) -> int:
        """Prompt tokens run through a forward since the start, once the background work has come to rest."""
        while True:
            counts = self._metrics()
            if counts["rekindle_running"] == counts["rekindle_queue_length"] == 0:
                return int(counts['rekindle_engine_tokens_total{how="computed"}'])
            time.sleep(0.02)

    def _metrics(self) -> dict[str, float]:
        request = urllib.request.Request(f"{self.url}/metrics", headers=self._headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            lines = response.read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if name[:1] != "#"}


class ReplayFailed(RekindleError):
    """A server did not start, did not answer, or is not one that can be measured."""


class OwnServer(Server):
    """`rekindle serve` in a process of its own, on a free port; it can be stopped and started again."""

    can_restart = True

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-u", "-c", "from rekindle.cli import main; main()", "serve", "--port", "0"]
        self._process = subprocess.Popen(
            [*command, *self._arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        found: list[str] = []
        said: list[str] = []
        ready = threading.Event()
        assert self._process.stdout is not None
        threading.Thread(target=_listen, args=(self._process.stdout, found, said, ready), daemon=True).start()
        ready.wait(START_SECONDS)
        if not found:
            self._process.kill()
            raise ReplayFailed("rekindle serve did not start:\n" + "".join(said[-20:]))
        super().__init__(found[0])

    def restart(self) -> None:
        self.stop()
        self._start()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def kill(self) -> None:
        """As a crash would."""
        self._process.kill()
        self._process.wait()


def _listen(lines: Iterable[str], found: list[str], said: list[str], ready: threading.Event) -> None:
    """Read all the server says, or it would stand still once the pipe is full."""
    for line in lines:
        if not found:
            said.append(line)
            if match := re.search(r"chat in a browser\s+(http://\S+?)/?\s*$", line):
                found.append(match[1])
                ready.set()
    ready.set()


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        data = line.strip().removeprefix(b"data: ")
        if data.startswith(b"{"):
            yield json.loads(data)


def _read_reply(events: Iterable[dict[str, Any]], began: float) -> Reply:
    text, answer = "", list[int]()
    prompt: list[int] | None = None
    report: dict[str, Any] | None = None
    first_token = 0.0
    for event in events:
        if "error" in event:
            raise ReplayFailed(f"the server refused a request: {event['error'].get('message')}")
        report = event.get("rekindle", report)
        for choice in event["choices"]:
            prompt = choice.get("prompt_token_ids", prompt)
            answer += choice.get("token_ids") or []
            text += choice["delta"].get("content") or ""
        if answer and not first_token:
            first_token = time.monotonic() - began
    if prompt is None or report is None:
        raise ReplayFailed("the server does not say what it restored: no prompt_token_ids, or no rekindle object")
    restored = report["restored"]
    return Reply(
        text, prompt, answer, restored["ram"], restored["disk"], report["computed"], report["miss"], first_token
    )


# -- replaying ------------------------------------------------------------------------------------------------------

SCRIPTS: dict[str, tuple[Callable[[Sizes, str], Script], float]] = {  # with the ratio that must hold
    "growing": (growing, 1.01),
    "thinking": (thinking, 1.05),
    "subagents": (subagents, 1.01),
    "edited": (edited, 1.05),
}
RECORDED_GOAL = 1.05


def replay(
    server: Server,
    sizes: Sizes,
    session: Sequence[list[Message]],
    only: Sequence[str] = (),
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Total]:
    """Every conversation, and where the server can be restarted, every one again with a restart in its middle."""
    scripts = {**SCRIPTS, "recorded": (recorded(session), RECORDED_GOAL)}
    if unknown := set(only) - set(scripts):
        raise BadConfig(f"no conversation is called {', '.join(sorted(unknown))}; known are {', '.join(scripts)}")
    seen, totals = Seen(), list[Total]()
    run = f"{random.SystemRandom().getrandbits(32):08x}"  # a server that runs already may know an earlier replay
    for restart in (False, True) if server.can_restart else (False,):
        for name, (script, goal) in scripts.items():
            if not only or name in only:
                total = Total(name, restart, goal)
                turns = len(session) if name == "recorded" else sizes.turns
                player = script(sizes, f"{name} {run} {'restarted' if restart else 'whole'}")
                _play(server, player, turns // 2 if restart else None, sizes.answer, seen, total, on_row)
                totals.append(total)
    return totals


def _play(
    server: Server,
    script: Script,
    restart_at: int | None,
    answer: int,
    seen: Seen,
    total: Total,
    on_row: Callable[[Row], None],
) -> None:
    before = server.computed()
    messages = next(script)
    for turn in itertools.count():
        if turn == restart_at:
            total.engine_computed += server.computed() - before
            server.restart()
            before = server.computed()
        reply = server.ask(messages, answer)
        row = Row(
            total.conversation,
            turn,
            turn == restart_at,
            len(reply.prompt),
            reply.ram,
            reply.disk,
            reply.computed,
            len(reply.prompt) - seen.length(reply.prompt),
            round(reply.first_token * 1000, 1),
            reply.miss,
        )
        seen.add([*reply.prompt, *reply.answer])
        total.rows.append(row)
        on_row(row)
        try:
            messages = script.send(reply.text)
        except StopIteration:
            break
    total.engine_computed += server.computed() - before

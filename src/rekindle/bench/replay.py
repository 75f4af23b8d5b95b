"""Agent-like conversations against a live server, and an account of every prompt token in them.

Per turn: tokens sent, restored from each tier, computed, and never seen before. The last number is the client's own: a
position of a prompt counts as seen if the same prefix was sent or generated before, so it is the least that any server
has to compute. What the server computed for the requests, divided by that, is the figure of merit.

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
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rekindle.bench.client import address_of
from rekindle.bench.conversations import SCRIPTS, ConversationSizes, Message, Posted, Said, Script
from rekindle.bench.load import add_up
from rekindle.bench.recorded import AGENTS, CHAT, conversation_of, read_session, session_file
from rekindle.errors import BadConfig, RekindleError
from rekindle.prompt import common_length

START_SECONDS = 600  # a large model takes minutes to load
LOG_LINES = 10_000  # of a server of our own that are kept
ANSWER_SECONDS = 1800
FIRST_TOKENS = ("content_block_delta", "response.output_item.added")  # events that begin answers in other dialects


# -- the account ----------------------------------------------------------------------------------------------------


class Seen:
    """Everything that was sent or generated."""

    def __init__(self) -> None:
        self._sequences: list[np.ndarray] = []

    def length(self, tokens: Sequence[int]) -> int:
        """How much of it has been seen, from its beginning."""
        ours = np.asarray(tokens, dtype=np.int32)
        return max((common_length(ours, other) for other in self._sequences), default=0)

    def add(self, tokens: Sequence[int]) -> None:
        new = np.asarray(tokens, dtype=np.int32)
        self._sequences = [old for old in self._sequences if common_length(old, new) < len(old)]
        self._sequences.append(new)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for one request."""

    message: Message  # the assistant's, to be sent back
    prompt: list[int]
    answer: list[int]  # with the stop token
    restored: dict[str, int]  # by tier
    computed: int
    miss: str | None
    first_token: float  # seconds


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """One turn."""

    conversation: str
    turn: int
    restarted: bool  # the server was started again just before
    sent: int
    restored: dict[str, int]  # by tier
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
    rows: list[ReplayRow] = field(default_factory=list)
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
        first = sorted(row.first_token_ms for row in self.rows)
        return {
            "conversation": self.conversation,
            "restart": self.restart,
            "sent": sum(row.sent for row in self.rows),
            "restored": add_up([row.restored for row in self.rows]),
            "unseen": self.unseen,
            "computed": self.computed,
            "computed_with_background": self.engine_computed,
            "ratio": round(self.ratio, 4),
            "ratio_with_background": round(self.ratio_with_background, 4),
            "goal": self.goal,
            "median_first_token_ms": first[len(first) // 2] if first else 0.0,
            "turns": [asdict(row) for row in self.rows],
        }


# -- servers --------------------------------------------------------------------------------------------------------


class ReplayServer:
    """A server at an address."""

    can_restart = False

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = address_of(url).geturl().removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def restart(self) -> None:
        raise AssertionError("only a server we started can be started again")

    def stop(self) -> None:
        """It is another process's."""

    def ask(self, said: Said, max_tokens: int) -> Reply:
        posted = _posted(said)
        limit = "max_output_tokens" if posted.path == "/v1/responses" else "max_tokens"
        body = {**posted.body, limit: max_tokens, "temperature": 0, "stream": True, "return_token_ids": True}
        if posted.path.endswith("completions"):
            body["stream_options"] = {"include_usage": True}
        request = urllib.request.Request(
            f"{self.url}{posted.path}", json.dumps(body).encode(), self._headers, method="POST"
        )
        began = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
                return _read_reply(_events(response), began)
        except urllib.error.HTTPError as error:
            said_why = error.read().decode(errors="replace")[:500]
            raise ReplayFailed(f"{self.url} refused a request: {error} {said_why}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ReplayFailed(f"{self.url} did not answer: {error}") from error

    def computed(self) -> int:
        """Prompt tokens run through a forward since the start, once the background work has come to rest."""
        while True:
            counts = self._metrics()
            if counts["rekindle_running"] == counts["rekindle_queue_length"] == 0:
                return int(counts['rekindle_engine_tokens_total{how="computed"}'])
            time.sleep(0.02)

    def read(self, path: str) -> str:
        """What a GET of this path brings."""
        request = urllib.request.Request(f"{self.url}{path}", headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return str(response.read().decode())
        except (OSError, http.client.HTTPException) as error:
            raise ReplayFailed(f"{self.url}{path} does not answer: {error}") from error

    def _metrics(self) -> dict[str, float]:
        lines = self.read("/metrics").splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if name[:1] != "#"}


class ReplayFailed(RekindleError):
    """A server did not start, did not answer, or is not one that can be measured."""


class OwnServer(ReplayServer):
    """`rekindle serve` in a process of its own, on a free port; it can be stopped and started again."""

    can_restart = True

    def __init__(self, arguments: Sequence[str], key: str | None = None) -> None:
        self._arguments = list(arguments)
        self._key = key
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-u", "-c", "from rekindle.cli import main; main()", "serve", "--port", "0"]
        self._process = subprocess.Popen(
            [*command, *self._arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        found: list[str] = []
        self.said: deque[str] = deque(maxlen=LOG_LINES)
        ready = threading.Event()
        assert self._process.stdout is not None
        arguments = (self._process.stdout, found, self.said, ready)
        self._listener = threading.Thread(target=_listen, args=arguments, daemon=True)
        self._listener.start()
        ready.wait(START_SECONDS)
        if not found:
            self._process.kill()
            raise ReplayFailed("rekindle serve did not start:\n" + "".join(list(self.said)[-20:]))
        super().__init__(found[0], self._key)

    @property
    def pid(self) -> int:
        return self._process.pid

    def restart(self) -> None:
        self.stop()
        self._start()

    def stop(self) -> None:
        """In good order; all that it said is in `said` then."""
        self._process.terminate()
        self._process.wait()
        self._listener.join()

    def kill(self) -> None:
        """As a crash would."""
        self._process.kill()
        self._process.wait()


def _listen(lines: Iterable[str], found: list[str], said: deque[str], ready: threading.Event) -> None:
    """Read all the server says, or it would stand still once the pipe is full."""
    for line in lines:
        said.append(line)
        if not found and (match := re.search(r"chat in a browser\s+(http://\S+?)/?\s*$", line)):
            found.append(match[1])
            ready.set()
    ready.set()


def _posted(said: Said) -> Posted:
    if isinstance(said, Posted):
        return said
    return Posted("/v1/completions", {"prompt": said}) if isinstance(said, str) else Posted(CHAT, {"messages": said})


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        data = line.strip().removeprefix(b"data: ")
        if data.startswith(b"{"):
            yield json.loads(data)


def _read_reply(events: Iterable[dict[str, Any]], began: float) -> Reply:
    message: Message = {"role": "assistant", "content": ""}
    answer = list[int]()
    prompt: list[int] | None = None
    report: dict[str, Any] | None = None
    first_token = 0.0
    for event in events:
        _raise_error(event)
        report = event.get("rekindle", event.get("response", {}).get("rekindle", report))
        for choice in event.get("choices", ()):
            prompt = choice.get("prompt_token_ids", prompt)
            answer += choice.get("token_ids") or []
            for name in ("content", "reasoning_content"):
                if said := choice.get("delta", {}).get(name):
                    message[name] = message.get(name, "") + said
        if not first_token and (answer or event.get("type") in FIRST_TOKENS):
            first_token = time.monotonic() - began
    if report is not None and "prompt_token_ids" in report:  # where the dialect has no place of its own for them
        prompt, answer = report["prompt_token_ids"], report["token_ids"]
    if prompt is None or report is None:
        raise ReplayFailed("the server does not say what it restored: no prompt_token_ids, or no rekindle object")
    return Reply(message, prompt, answer, report["restored"], report["computed"], report["miss"], first_token)


def _raise_error(event: dict[str, Any]) -> None:
    error = event.get("error") or event.get("response", {}).get("error")
    if error:
        raise ReplayFailed(f"the server refused a request: {error.get('message')}")


# -- replaying ------------------------------------------------------------------------------------------------------


def replay(
    server: ReplayServer,
    sizes: ConversationSizes,
    session: Sequence[Posted],
    only: Sequence[str] = (),
    on_row: Callable[[ReplayRow], None] = lambda row: None,
) -> list[Total]:
    """Every conversation, and where the server can be restarted, every one again with a restart in its middle."""
    agents = {name: conversation_of(read_session(session_file(file))) for name, file in AGENTS.items()}
    scripts = {**SCRIPTS, "recorded": conversation_of(session), **agents}
    if unknown := set(only) - set(scripts):
        raise BadConfig(f"no conversation is called {', '.join(sorted(unknown))}; known are {', '.join(scripts)}")
    seen, totals = Seen(), list[Total]()
    run = f"{random.SystemRandom().getrandbits(32):08x}"  # a server that runs already may know an earlier replay
    for restart in (False, True) if server.can_restart else (False,):
        for name, conversation in scripts.items():
            if not only or name in only:
                total = Total(name, restart, conversation.goal)
                turns = conversation.turns or sizes.turns
                player = conversation.script(sizes, f"{name} {run} {'restarted' if restart else 'whole'}")
                _play(server, player, turns // 2 if restart else None, sizes.answer, seen, total, on_row)
                totals.append(total)
    return totals


def _play(
    server: ReplayServer,
    script: Script,
    restart_at: int | None,
    answer: int,
    seen: Seen,
    total: Total,
    on_row: Callable[[ReplayRow], None],
) -> None:
    before = server.computed()
    said = next(script)
    for turn in itertools.count():
        if turn == restart_at:
            total.engine_computed += server.computed() - before
            server.restart()
            before = server.computed()
        reply = server.ask(said, answer)
        row = ReplayRow(
            total.conversation,
            turn,
            turn == restart_at,
            len(reply.prompt),
            reply.restored,
            reply.computed,
            len(reply.prompt) - seen.length(reply.prompt),
            round(reply.first_token * 1000, 1),
            reply.miss,
        )
        seen.add([*reply.prompt, *reply.answer])
        total.rows.append(row)
        on_row(row)
        try:
            said = script.send(reply.message)
        except StopIteration:
            break
    total.engine_computed += server.computed() - before

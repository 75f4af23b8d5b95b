"""A client of an OpenAI-style server, and what it sees of one answer.

Connections are kept and used again, as agents' clients do. Clocks start when a request is sent over one that is open,
and stop when an event with tokens has come in.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import SplitResult, urlsplit

import h11

from rekindle.errors import BadConfig, RekindleError

Begun = Callable[[], None]  # called once, at the first token
Message = dict[str, str]
Prompt = list[int] | list[Message]  # token ids, or a conversation
LONGEST_WAIT = 1800.0  # seconds for one answer


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the body that asks for its answer. It is made before the clocks start: to write 32,768 ids takes
    milliseconds, in which this process would not read what others are answered."""

    prompt: Prompt
    path: str
    body: bytes


class LoadFailed(RekindleError):
    """A server did not answer, or refused a request."""


@dataclass(slots=True)
class ServedAnswer:
    """What came back for one request, and when. Times are seconds of one clock."""

    what: str  # requests of one name are reported together
    prompt: int  # tokens sent; of messages, as the server counts them
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of events with tokens
    ids: list[int] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    restored: dict[str, int] = field(default_factory=dict)  # tokens by tier, as the server names its tiers
    computed: int = 0
    failure: str | None = None

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.arrivals)]

    @property
    def seconds(self) -> float:
        """From the first token to the last."""
        return self.arrivals[-1] - self.arrivals[0]


class _Connection:
    """An open one to a server: one request at a time, and the next when that has been answered whole."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)
        self.is_used = False  # it has brought an answer before …
        self.is_silent = True  # … and nothing yet of the one that was asked for last

    @property
    def is_open(self) -> bool:
        """As far as is known here: a server may be about to end one that was idle."""
        return not (self._reader.at_eof() or self._writer.is_closing())

    async def send(self, head: h11.Request, body: bytes) -> None:
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self._writer.write(self._http.send(event) or b"")
        await self._writer.drain()

    async def data(self) -> AsyncIterator[tuple[float, bytes]]:
        """What is answered, with the moment at which it came."""
        came, refused = 0.0, b""
        status = 200
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                received = await self._reader.read(1 << 16)
                came = time.perf_counter()
                self.is_silent = self.is_silent and not received
                self._http.receive_data(received)
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                if status == 200:
                    yield came, bytes(event.data)
                else:
                    refused += event.data
            else:
                break
        if status != 200:
            raise LoadFailed(f"status {status}: {refused[:300].decode(errors='replace')}")
        if not isinstance(event, h11.EndOfMessage):
            raise LoadFailed("the server hung up amid an answer")

    def can_go_on(self) -> bool:
        """Whether it takes another request; the server may have said that this was the last."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        self.is_used = self.is_silent = True
        return True

    def close(self) -> None:
        self._writer.close()


class LoadClient:
    """Asks one server. All that is asked before `close` runs on one event loop."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        model: str | None = None,
        token_ids: bool = True,
        fields: dict[str, Any] | None = None,
    ) -> None:
        """token_ids: ask for the ids of the answer, which a conversation goes on from; fields: more of every body."""
        self._url = address_of(url)
        self._key = key
        self._body = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        self._body |= {"model": model} if model else {}
        self._body |= {"return_token_ids": True} if token_ids else {}
        self._body |= fields or {}
        self._kept = list[_Connection]()  # open, without a request

    def question(self, prompt: Prompt, tokens: int) -> Question:
        name, path = ("prompt", "completions") if isinstance(prompt[0], int) else ("messages", "chat/completions")
        return Question(prompt, path, json.dumps({**self._body, name: prompt, "max_tokens": tokens}).encode())

    async def ask(self, what: str, question: Question, begun: Begun | None = None) -> ServedAnswer:
        """Never raises for what a server does: a request that failed says why. `begun` hears of the first token."""
        answer = ServedAnswer(what, sum(isinstance(each, int) for each in question.prompt))
        try:
            async with asyncio.timeout(LONGEST_WAIT):
                await self._ask(answer, question, begun)
        except TimeoutError:
            answer.failure = f"no answer within {LONGEST_WAIT:g} s"
        except (OSError, h11.ProtocolError, LoadFailed) as error:
            answer.failure = str(error) or type(error).__name__
        if answer.failure is None and not answer.arrivals:
            answer.failure = "the answer has no tokens"
        if begun is not None and not answer.arrivals:
            begun()  # it never will
        return answer

    def close(self) -> None:
        for connection in self._kept:
            connection.close()
        self._kept.clear()

    async def _ask(self, answer: ServedAnswer, question: Question, begun: Begun | None) -> None:
        while True:
            connection = await self._connect()
            try:
                answer.sent = time.perf_counter()
                await connection.send(self._head(question), question.body)
                async for came, event in _events(connection.data()):
                    waiting = not answer.arrivals
                    _note(answer, event, came)
                    if waiting and answer.arrivals and begun is not None:
                        begun()
            except BaseException as error:
                connection.close()
                # The server ended it for being idle, just as it was used again.
                if isinstance(error, OSError | h11.ProtocolError) and connection.is_used and connection.is_silent:
                    continue
                raise
            if connection.can_go_on():
                self._kept.append(connection)
            else:
                connection.close()
            return

    async def _connect(self) -> _Connection:
        while self._kept:
            connection = self._kept.pop()
            if connection.is_open:
                return connection
            connection.close()
        secure = ssl.create_default_context() if self._url.scheme == "https" else None
        port = self._url.port or (443 if secure else 80)
        return _Connection(*await asyncio.open_connection(self._url.hostname, port, ssl=secure))

    def _head(self, question: Question) -> h11.Request:
        size = str(len(question.body))
        headers = {"host": self._url.netloc, "content-type": "application/json", "content-length": size}
        headers |= {"authorization": f"Bearer {self._key}"} if self._key else {}
        return h11.Request(method="POST", target=f"{self._url.path}/{question.path}", headers=list(headers.items()))


def address_of(url: str) -> SplitResult:
    """http://host:port, with or without /v1, as the base of an OpenAI-style client."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadConfig(f"{url} is no address of a server, such as http://127.0.0.1:8080")
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith("/v1") else f"{path}/v1")


async def _events(data: AsyncIterator[tuple[float, bytes]]) -> AsyncIterator[tuple[float, Any]]:
    """Every event of a stream with the moment at which its last byte came."""
    line = b""
    async for came, received in data:
        *lines, line = (line + received).split(b"\n")
        for each in lines:
            found = each.strip().removeprefix(b"data:").strip()
            if found.startswith(b"{"):
                try:
                    yield came, json.loads(found)
                except (ValueError, RecursionError) as error:
                    raise _unlike(found) from error


def _unlike(event: object) -> LoadFailed:
    shown = event.decode(errors="replace") if isinstance(event, bytes) else json.dumps(event)
    return LoadFailed(f"no event of an OpenAI-style stream: {shown[:300]}")


def _note(answer: ServedAnswer, event: Any, came: float) -> None:
    if error := event.get("error"):
        raise LoadFailed(str(error.get("message", error) if isinstance(error, dict) else error))
    try:
        _take(answer, event, came)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise _unlike(event) from error


def _take(answer: ServedAnswer, event: dict[str, Any], came: float) -> None:
    for choice in event.get("choices") or ():
        ids, delta = _listed(choice.get("token_ids")), choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        if ids or text or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls"):
            answer.arrivals.append(came)
            answer.ids += ids
            answer.text += text
            answer.tokens += len(ids) or 1
    usage = event.get("usage") or {}
    answer.prompt = _count(usage.get("prompt_tokens")) or answer.prompt
    answer.tokens = _count(usage.get("completion_tokens")) or answer.tokens
    cached = _count((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
    if usage:
        answer.restored, answer.computed = {"cache": cached}, answer.prompt - cached
    if (report := event.get("rekindle")) is not None:
        restored = {str(tier): _count(tokens) for tier, tokens in report["restored"].items()}
        answer.restored, answer.computed = restored, _count(report["computed"])


def _count(value: object) -> int:
    """Of tokens; 0 where a server leaves it out."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no number of tokens")
    return value


def _listed(ids: object) -> list[int]:
    if ids is None:
        return []
    if not isinstance(ids, list):
        raise TypeError(f"{ids!r} is no list of token ids")
    return [_count(each) for each in ids]

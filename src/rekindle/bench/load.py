"""A load generator: what clients of an OpenAI-style server see, in milliseconds and tokens per second.

Prompts are random token ids sent to /v1/completions, so that their lengths are exact; the same seed sends the same
prompts, also to a server that was started again in between. Connections are kept and used again, as agents' clients
do. Clocks start when a request is sent over one that is open, and stop when an event with tokens has come in. What was
restored and what was computed is the server's own word: its `rekindle` object, or the `cached_tokens` of others.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from urllib.parse import SplitResult, urlsplit

import h11

from rekindle.errors import BadConfig, RekindleError

Begun = Callable[[], None]  # called once, at the first token
LONGEST_WAIT = 1800.0  # seconds for one answer
INTRUDER = "intruder"


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent."""

    prompts: tuple[int, ...] = (512,)  # tokens of the first prompt; every length is measured by itself
    answer: int = 64  # tokens, stop tokens or not
    requests: int = 4  # conversations of every length
    concurrency: int = 1  # conversations at once …
    rate: float | None = None  # … or so many that begin per second, at random moments, however many run
    prefix: int = 0  # tokens that every prompt begins with
    turns: int = 1  # requests of a conversation: each sends all that was said, and `turn` tokens more
    turn: int = 200
    again: int = 0  # times that everything is sent once more afterwards
    intruder: int = 0  # tokens of one prompt that comes in while the first answers run; 0 for none
    seed: int = 0
    vocab: int = 32_000  # ids are drawn below it
    lowest: int | None = None  # and not below this; None: special tokens often come first, so 1,000 or half of vocab

    def __post_init__(self) -> None:
        _check("--vocab", self.vocab, self._first_id + 1)
        for name in ("answer", "requests", "concurrency", "turns", "turn"):
            _check(f"--{name}", getattr(self, name), 1)
        for name in ("prefix", "again", "intruder"):
            _check(f"--{name}", getattr(self, name), 0)
        for length in self.prompts:
            _check("--prompt", length, 1)
        if self.rate is not None and self.rate <= 0:
            raise BadConfig(f"--rate is {self.rate}, it must be more than 0")

    def tokens(self, count: int, *names: object) -> list[int]:
        """Random ones, the same for the same seed and names."""
        draws = random.Random(" ".join(map(str, (self.seed, *names))))
        return draws.choices(range(self._first_id, self.vocab), k=count)

    @property
    def _first_id(self) -> int:
        return min(1000, self.vocab // 2) if self.lowest is None else self.lowest

    def first_prompt(self, length: int, number: int) -> list[int]:
        shared = self.tokens(min(self.prefix, length), "prefix")
        return shared + self.tokens(length - len(shared), "prompt", length, number)


def _check(option: str, value: int, least: int) -> None:
    if value < least:
        raise BadConfig(f"{option} is {value}, it must be at least {least}")


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the body that asks for its answer. It is made before the clocks start: to write 32,768 ids takes
    milliseconds, in which this process would not read what others are answered."""

    prompt: list[int]
    body: bytes


class LoadFailed(RekindleError):
    """A server did not answer, or refused a request."""


# -- one request ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ServedAnswer:
    """What came back for one request, and when. Times are seconds of one clock."""

    what: str  # requests of one name are reported together
    prompt: int  # tokens sent
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of events with tokens
    ids: list[int] = field(default_factory=list)
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
        self._url = _parts_of(url)
        self._key = key
        self._body = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        self._body |= {"model": model} if model else {}
        self._body |= {"return_token_ids": True} if token_ids else {}
        self._body |= fields or {}
        self._kept = list[_Connection]()  # open, without a request

    def question(self, prompt: list[int], tokens: int) -> Question:
        return Question(prompt, json.dumps({**self._body, "prompt": prompt, "max_tokens": tokens}).encode())

    async def ask(self, what: str, question: Question, begun: Begun | None = None) -> ServedAnswer:
        """Never raises for what a server does: a request that failed says why. `begun` hears of the first token."""
        answer = ServedAnswer(what, len(question.prompt))
        try:
            async with asyncio.timeout(LONGEST_WAIT):
                await self._ask(answer, question.body, begun)
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

    async def _ask(self, answer: ServedAnswer, body: bytes, begun: Begun | None) -> None:
        while True:
            connection = await self._connect()
            try:
                answer.sent = time.perf_counter()
                await connection.send(self._head(len(body)), body)
                async for came, event in _events(connection.data()):
                    waiting = not answer.arrivals
                    _take(answer, event, came)
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

    def _head(self, size: int) -> h11.Request:
        headers = {"host": self._url.netloc, "content-type": "application/json", "content-length": str(size)}
        headers |= {"authorization": f"Bearer {self._key}"} if self._key else {}
        return h11.Request(method="POST", target=f"{self._url.path}/completions", headers=list(headers.items()))


def _parts_of(url: str) -> SplitResult:
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
                yield came, json.loads(found)


def _take(answer: ServedAnswer, event: dict[str, Any], came: float) -> None:
    if "error" in event:
        raise LoadFailed(str(event["error"].get("message", event["error"])))
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids") or []
        if ids or choice.get("text"):
            answer.arrivals.append(came)
            answer.ids += ids
            answer.tokens += len(ids) or 1
    usage = event.get("usage") or {}
    answer.tokens = usage.get("completion_tokens", answer.tokens)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if usage:
        answer.restored, answer.computed = {"cache": cached}, usage.get("prompt_tokens", answer.prompt) - cached
    if (report := event.get("rekindle")) is not None:
        answer.restored, answer.computed = report["restored"], report["computed"]


# -- many of them ---------------------------------------------------------------------------------------------------


async def run_load(client: LoadClient, load: Load) -> list[ServedAnswer]:
    """Everything that the load asks for: length by length, then all of it again."""
    answers = list[ServedAnswer]()
    try:
        for time_sent in range(load.again + 1):
            for length in load.prompts:
                answers += await _run_length(client, load, length, time_sent)
    finally:
        client.close()
    return answers


async def _run_length(client: LoadClient, load: Load, length: int, time_sent: int) -> list[ServedAnswer]:
    suffix = " again" if time_sent else ""
    begun, intruder = asyncio.Semaphore(0), None
    if load.intruder and not time_sent:
        question = client.question(load.tokens(load.intruder, INTRUDER, length), 1)
        intruder = asyncio.create_task(_intrude(client, load, question, begun))

    def opening(number: int) -> Question:
        return client.question(load.first_prompt(length, number), load.answer)

    together = 0 if load.rate is not None else min(load.concurrency, load.requests)
    openings = {number: opening(number) for number in range(together)}

    async def converse(number: int) -> list[ServedAnswer]:
        first = openings.pop(number, None) or opening(number)
        return await _converse(client, load, length, number, first, suffix, begun.release)

    run = _at_rate if load.rate is not None else _at_once
    answers = await run(load, length, converse)
    if intruder is not None:
        answers.append(await intruder)
    return answers


async def _intrude(client: LoadClient, load: Load, question: Question, begun: asyncio.Semaphore) -> ServedAnswer:
    """Once as many answers have begun as run at once."""
    for _ in range(min(load.requests, load.concurrency)):
        await begun.acquire()
    return await client.ask(f"{INTRUDER} {load.intruder}", question)


async def _at_once(
    load: Load, length: int, converse: Callable[[int], Awaitable[list[ServedAnswer]]]
) -> list[ServedAnswer]:
    """So many at a time; the next begins when one ends."""
    numbers = iter(range(load.requests))

    async def go_on() -> list[ServedAnswer]:
        return [answer for number in numbers for answer in await converse(number)]

    several = await asyncio.gather(*(go_on() for _ in range(min(load.concurrency, load.requests))))
    return [answer for answers in several for answer in answers]


async def _at_rate(
    load: Load, length: int, converse: Callable[[int], Awaitable[list[ServedAnswer]]]
) -> list[ServedAnswer]:
    """They begin at random moments, so many per second in the long run, whether or not others have ended."""
    assert load.rate is not None, "the load says how many"
    draws = random.Random(f"{load.seed} rate {length}")
    moments, at = list[float](), 0.0
    for _ in range(load.requests):
        moments.append(at)
        at += draws.expovariate(load.rate)

    async def later(number: int, moment: float) -> list[ServedAnswer]:
        await asyncio.sleep(moment)
        return await converse(number)

    several = await asyncio.gather(*(later(number, moment) for number, moment in enumerate(moments)))
    return [answer for answers in several for answer in answers]


async def _converse(
    client: LoadClient, load: Load, length: int, number: int, question: Question, suffix: str, begun: Begun
) -> list[ServedAnswer]:
    """Turn after turn, each on top of all that was said; it ends with the first turn that fails."""
    answers = list[ServedAnswer]()
    for turn in range(load.turns):
        what = f"prompt {length}" if turn == 0 else f"turn {turn + 1} on {length}"
        answer = await client.ask(what + suffix, question, begun)
        answers.append(answer)
        if answer.failure is not None or turn + 1 == load.turns:
            break
        # A server that keeps its ids to itself is sent others in their place: it can go on from the prompt's end only.
        said = answer.ids or load.tokens(load.answer, "said", length, number, turn)
        prompt = [*question.prompt, *said, *load.tokens(load.turn, "turn", length, number, turn)]
        question = client.question(prompt, load.answer)
    return answers


# -- the account ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadRow:
    """Requests of one name. Times are milliseconds."""

    what: str
    requests: int
    failed: int
    failure: str | None  # of the first that failed
    first_p50: float
    first_p99: float
    first_worst: float
    last_first: float  # from the first request sent to the last one's first token
    gap_p50: float
    gap_p99: float
    gap_worst: float
    decode: float  # tokens per second of one answer, behind its first; the median
    # Of all requests together, from the first one sent to the last token.
    output_tokens_per_second: float  # of answers
    prompt_tokens_per_second: float  # sent, restored or computed
    sent: int  # prompt tokens
    restored: dict[str, int]  # by tier
    computed: int
    answered: int

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def rows_of(answers: Sequence[ServedAnswer]) -> list[LoadRow]:
    """One for every name, in the order in which they first came; and what the others saw while an intruder came in."""
    rows = [_row(what, [answer for answer in answers if answer.what == what]) for what in _names(answers)]
    for intruder in (answer for answer in answers if answer.what.startswith(INTRUDER) and answer.failure is None):
        others = [answer for answer in answers if answer is not intruder and answer.failure is None]
        seen = [_within(answer, intruder.sent, intruder.arrivals[0]) for answer in others]
        rows.append(_row(f"beside {intruder.what}", [answer for answer in seen if answer.arrivals]))
    return rows


def _within(answer: ServedAnswer, began: float, ended: float) -> ServedAnswer:
    """What came of it meanwhile; nothing was sent."""
    arrivals = [came for came in answer.arrivals if began <= came <= ended]
    return ServedAnswer(answer.what, 0, began, arrivals, tokens=len(arrivals))


def _names(answers: Sequence[ServedAnswer]) -> Iterator[str]:
    yield from dict.fromkeys(answer.what for answer in answers)


def _row(what: str, answers: Sequence[ServedAnswer]) -> LoadRow:
    good = [answer for answer in answers if answer.failure is None]
    failures = [answer.failure for answer in answers if answer.failure is not None]
    firsts = [1000 * answer.first for answer in good]
    gaps = [1000 * gap for answer in good for gap in answer.gaps]
    began = min((answer.sent for answer in good), default=0.0)
    ended = max((answer.arrivals[-1] for answer in good), default=0.0)
    sent, answered = sum(answer.prompt for answer in good), sum(answer.tokens for answer in good)
    speeds = [(answer.tokens - 1) / answer.seconds for answer in good if answer.tokens > 1 and answer.seconds]
    return LoadRow(
        what=what,
        requests=len(answers),
        failed=len(failures),
        failure=failures[0] if failures else None,
        first_p50=share_below(firsts, 0.5),
        first_p99=share_below(firsts, 0.99),
        first_worst=share_below(firsts, 1.0),
        last_first=1000 * (max((answer.arrivals[0] for answer in good), default=began) - began),
        gap_p50=share_below(gaps, 0.5),
        gap_p99=share_below(gaps, 0.99),
        gap_worst=share_below(gaps, 1.0),
        decode=round(share_below(speeds, 0.5), 1),
        output_tokens_per_second=round(answered / (ended - began), 1) if ended > began else 0.0,
        prompt_tokens_per_second=round(sent / (ended - began), 1) if ended > began else 0.0,
        sent=sent,
        restored=add_up([answer.restored for answer in good]),
        computed=sum(answer.computed for answer in good),
        answered=answered,
    )


def add_up(each: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Sums by name."""
    names = dict.fromkeys(name for some in each for name in some)
    return {name: sum(some.get(name, 0) for some in each) for name in names}


def share_below(values: Sequence[float], share: float) -> float:
    """The smallest of the values that is not exceeded by this share of them; 0 where there are none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return round(ordered[max(0, -int(-share * len(ordered) // 1) - 1)], 3)

"""A load generator: what clients of an OpenAI-style server see, in milliseconds and tokens per second.

Prompts are random token ids sent to /v1/completions, so that their lengths are exact, or conversations of random words,
as agents send them: a server has to render and to encode those. The same seed sends the same prompts, also to a server
that was started again in between. What was restored and what was computed is the server's own word: its `rekindle`
object, or the `cached_tokens` of others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.bench.client import Begun, LoadClient, Message, Prompt, Question, ServedAnswer
from rekindle.bench.conversations import prose
from rekindle.errors import BadConfig

INTRUDER = "intruder"
BESIDE = "beside "


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
    chat: bool = False  # send messages; every number of tokens is one of words then

    def __post_init__(self) -> None:
        if self.lowest is not None and self.lowest >= self.vocab:
            raise BadConfig(f"--lowest is {self.lowest}, it must be less than --vocab, {self.vocab}")
        _check("--vocab", self.vocab, self._first_id + 1)
        for name in ("answer", "requests", "concurrency", "turns", "turn"):
            _check(f"--{name}", getattr(self, name), 1)
        for name in ("prefix", "again", "intruder"):
            _check(f"--{name}", getattr(self, name), 0)
        for length in self.prompts:
            _check("--prompt", length, 1)
            if self.prefix > length:
                raise BadConfig(f"--prefix is {self.prefix}, a --prompt of {length} cannot begin with so many")
        if self.rate is not None and self.rate <= 0:
            raise BadConfig(f"--rate is {self.rate}, it must be more than 0")

    def tokens(self, count: int, *names: object) -> list[int]:
        """Random ones, the same for the same seed and names."""
        draws = random.Random(" ".join(map(str, (self.seed, *names))))
        return draws.choices(range(self._first_id, self.vocab), k=count)

    @property
    def _first_id(self) -> int:
        return min(1000, self.vocab // 2) if self.lowest is None else self.lowest

    def opening(self, length: int, *names: object, prefix: int = 0) -> Prompt:
        """A first prompt of this length, which begins with `prefix` tokens that others begin with too."""
        shared = min(prefix, length)
        if not self.chat:
            return self.tokens(shared, "prefix") + self.tokens(length - shared, *names)
        system = [self._message("system", shared, "prefix")] if shared else []
        return [*system, self._message("user", max(1, length - shared), *names)]

    def next_turn(self, prompt: Prompt, answer: ServedAnswer, *names: object) -> Prompt:
        """What was said so far, and as much as a turn has. A server that keeps its ids to itself is sent others in
        their place: it can go on from the prompt's end only."""
        if self.chat:
            said: Message = {"role": "assistant", "content": answer.text}
            return [*prompt, said, self._message("user", self.turn, "turn", *names)]
        ids = answer.ids or self.tokens(self.answer, "said", *names)
        return [*prompt, *ids, *self.tokens(self.turn, "turn", *names)]

    def _message(self, role: str, words: int, *names: object) -> Message:
        return {"role": role, "content": prose(words, " ".join(map(str, (self.seed, *names))))}


def _check(option: str, value: int, least: int) -> None:
    if value < least:
        raise BadConfig(f"{option} is {value}, it must be at least {least}")


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
        question = client.question(load.opening(load.intruder, INTRUDER, length), 1)
        intruder = asyncio.create_task(_intrude(client, load, question, begun))

    def opening(number: int) -> Question:
        return client.question(load.opening(length, "prompt", length, number, prefix=load.prefix), load.answer)

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
        prompt = load.next_turn(question.prompt, answer, length, number, turn)
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

    @property
    def is_part(self) -> bool:
        """Of answers that had begun before."""
        return self.what.startswith(BESIDE)

    def as_dict(self) -> dict[str, Any]:
        """Of times and speeds None where no request was answered."""
        values = {name: getattr(self, name) for name in self.__slots__}
        if self.failed < self.requests or self.is_part:
            return values
        return {name: None if isinstance(value, float) else value for name, value in values.items()}


def rows_of(answers: Sequence[ServedAnswer]) -> list[LoadRow]:
    """One for every name, in the order in which they first came; and what the others saw while an intruder came in."""
    rows = [_row(what, [answer for answer in answers if answer.what == what]) for what in _names(answers)]
    for intruder in (answer for answer in answers if answer.what.startswith(INTRUDER) and answer.failure is None):
        others = [answer for answer in answers if answer is not intruder and answer.failure is None]
        seen = [_within(answer, intruder.sent, intruder.arrivals[0]) for answer in others]
        rows.append(_row(BESIDE + intruder.what, [answer for answer in seen if answer.arrivals]))
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
        last_first=round(1000 * (max((answer.arrivals[0] for answer in good), default=began) - began), 3),
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

"""One HTTP request's answers: submitted together, read as pieces of text, cancelled when nobody reads them."""

from __future__ import annotations

import logging
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rekindle.api.mailbox import Letter, Mailbox
from rekindle.api.metrics import Metrics
from rekindle.api.ports import EnginePort, TextPort
from rekindle.api.schema import GenerationBody
from rekindle.api.settings import Settings
from rekindle.engine.types import (
    CacheReport,
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    Request,
    Sampling,
    Timings,
    Token,
    TokenLogprob,
)
from rekindle.errors import BadRequest, PromptTooLong, Stopping
from rekindle.prompt import Prompt

log = logging.getLogger("rekindle.api")

SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Order:
    """What a dialect asks of the engine: n answers to each prompt."""

    prompts: Sequence[Prompt]
    n: int
    sampling: Sampling
    limits: Sequence[int]  # the longest answer to each prompt
    stops: Sequence[str]
    stop_tokens: frozenset[int]
    ignore_stop_tokens: bool
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of one answer: the tokens that came, and the text they made certain."""

    index: int
    text: str = ""
    tokens: tuple[Token, ...] = ()
    offsets: tuple[int, ...] = ()  # for each token, how many characters of the answer lie before it
    ids: tuple[int, ...] = ()  # as `tokens`, and the stop token
    prompt_rows: tuple[TokenLogprob | None, ...] | None = None
    finish: FinishReason | None = None


def join(pieces: Iterable[Piece]) -> Piece:
    """The pieces of one answer, in order, as one."""
    pieces = list(pieces)
    return Piece(
        index=pieces[0].index,
        text="".join(piece.text for piece in pieces),
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        offsets=tuple(offset for piece in pieces for offset in piece.offsets),
        ids=tuple(token for piece in pieces for token in piece.ids),
        prompt_rows=next((piece.prompt_rows for piece in pieces if piece.prompt_rows is not None), None),
        finish=pieces[-1].finish,
    )


class Choice:
    """One answer on its way from events to text."""

    def __init__(self, index: int, request_id: str, prompt: Prompt, seed: int, text: TextPort, stops: Sequence[str]):
        self.index = index
        self.request_id = request_id
        self.prompt = prompt
        self.seed = seed
        self.ids: list[int] = []  # drawn so far, the stop token last
        self.text = ""  # shown so far
        self.finished: Finished | None = None
        self.ended = False  # finished or failed: there is nothing left to cancel
        self.last_token_at: float | None = None
        self._detokenizer = text.detokenizer()
        self._stop_text = text.stop_text(stops)
        self._length = 0  # characters the tokens so far have made

    def read(self, events: Iterable[Event]) -> Piece:
        piece = join([Piece(self.index), *(self._read_one(event) for event in events)])
        self.ids += piece.ids
        self.text += piece.text
        return piece

    def _read_one(self, event: Event) -> Piece:
        match event:
            case Token():
                offset = self._length
                text = self._visible(self._detokenizer.push(event.token))
                return Piece(self.index, text, (event,), (offset,), (event.token,))
            case PromptLogprobs():
                return Piece(self.index, prompt_rows=event.rows)
            case Finished(reason=FinishReason.CANCELLED) | Failed():
                self.ended = True
            case Finished():
                self.finished, self.ended = event, True
                text = self._visible(self._detokenizer.finish()) + self._stop_text.finish()
                ids = () if event.stop_token is None else (event.stop_token,)
                return Piece(self.index, text, ids=ids, finish=event.reason)
        return Piece(self.index)

    def _visible(self, text: str) -> str:
        self._length += len(text)
        return self._stop_text.push(text)


@dataclass(slots=True)
class Generation:
    """All answers of one HTTP request. Made by `start`; whoever holds it calls `close` at the end, however it ends."""

    engine: EnginePort
    text: TextPort
    metrics: Metrics
    order: Order
    arrived: float  # monotonic seconds
    on_finished: Callable[[Choice], None] | None = None  # told of each finished answer before its last piece is read
    mailbox: Mailbox = field(default_factory=Mailbox)
    choices: list[Choice] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        engine: EnginePort,
        text: TextPort,
        metrics: Metrics,
        order: Order,
        arrived: float,
        on_finished: Callable[[Choice], None] | None = None,
    ) -> Generation:
        """Submit every answer; if the engine refuses one, the others are called back and its error is raised."""
        generation = cls(engine, text, metrics, order, arrived, on_finished)
        try:
            for index in range(len(order.prompts) * order.n):
                generation._submit(index)
        except Exception:
            generation.close()
            raise
        return generation

    def _submit(self, index: int) -> None:
        order = self.order
        prompt = order.prompts[index // order.n]
        seed = (order.sampling.seed + index % order.n) & SEED_MASK
        choice = Choice(index, uuid.uuid4().hex, prompt, seed, self.text, order.stops)
        self.engine.submit(
            Request(
                id=choice.request_id,
                prompt=prompt,
                sampling=replace(order.sampling, seed=seed),
                max_tokens=order.limits[index // order.n],
                stop_tokens=order.stop_tokens,
                sink=partial(self.mailbox.post, index),
                stop_when=self.text.stop_watcher(order.stops) if order.stops else None,
                ignore_stop_tokens=order.ignore_stop_tokens,
                prompt_logprobs=order.prompt_logprobs,
            )
        )
        self.choices.append(choice)
        log.info("%s", _begin_line(choice.request_id, prompt, order.limits[index // order.n]))

    @property
    def done(self) -> bool:
        return all(choice.finished for choice in self.choices)

    async def batches(self, patience: float) -> AsyncIterator[list[Piece]]:
        """Pieces as they come, at most one per answer and batch; an empty batch after `patience` quiet seconds."""
        while not self.done:
            letters = await self.mailbox.take(patience)
            self._measure(letters)
            indices = dict.fromkeys(letter.index for letter in letters)
            pieces = [self.choices[i].read(it.event for it in letters if it.index == i) for i in indices]
            for piece in pieces:
                if piece.finish is not None and self.on_finished is not None:
                    self.on_finished(self.choices[piece.index])
            yield pieces
            _raise_failure(letters)

    async def answers(self) -> list[Piece]:
        """Every answer whole, by index."""
        pieces: list[list[Piece]] = [[] for _ in self.choices]
        async for batch in self.batches(patience=3600.0):
            for piece in batch:
                pieces[piece.index].append(piece)
        return [join(of_one) for of_one in pieces]

    def close(self) -> None:
        """Tell the engine about every answer that nobody will read. Safe to call twice."""
        for choice in self.choices:
            if not choice.ended:
                choice.ended = True
                self.engine.cancel(choice.request_id)
                self.metrics.cancellations.inc()

    def _measure(self, letters: Sequence[Letter]) -> None:
        for letter in letters:
            choice = self.choices[letter.index]
            if isinstance(letter.event, Finished):
                self.metrics.count_finished(letter.event)
                log.info("%s", _account_line(choice.request_id, letter.event, self.text))
            if not isinstance(letter.event, Token):
                continue
            self.metrics.generated.inc()
            if choice.last_token_at is None:
                self.metrics.first_token.observe(letter.at - self.arrived)
            else:
                self.metrics.token.observe(letter.at - choice.last_token_at)
            choice.last_token_at = letter.at

    def usage(self) -> dict[str, Any]:
        """Each prompt counts once, as its first answer met it; answers all count."""
        finished = [_finished(choice) for choice in self.choices]
        firsts = finished[:: self.order.n]
        prompt_tokens = sum(it.prompt_tokens for it in firsts)
        completion_tokens = sum(it.completion_tokens for it in finished)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(it.cache.restored for it in firsts)},
        }

    def report(self, ignored_fields: list[str]) -> dict[str, Any]:
        """What ran: the first answer's account, those of the `others` beside it, and the fields without effect."""
        first, *others = [self._account(choice) for choice in self.choices]
        report = {**first, "ignored_fields": ignored_fields}
        return {**report, "others": others} if others else report

    def _account(self, choice: Choice) -> dict[str, Any]:
        finished = _finished(choice)
        return {
            **_cache(finished.cache, self.text),
            "timings_ms": _milliseconds(finished.timings),
            "max_tokens": self.order.limits[choice.index // self.order.n],
            "seed": choice.seed,
        }


def _finished(choice: Choice) -> Finished:
    assert choice.finished is not None, f"answer {choice.index} is accounted for before it has finished"
    return choice.finished


def _raise_failure(letters: Sequence[Letter]) -> None:
    for letter in letters:
        if isinstance(letter.event, Failed):
            raise letter.event.error
        if isinstance(letter.event, Finished) and letter.event.reason is FinishReason.CANCELLED:
            raise Stopping("the server is stopping and ended this answer before it was complete")


def _cache(cache: CacheReport, text: TextPort) -> dict[str, Any]:
    found = cache.divergence
    return {
        "restored": {"ram": cache.restored_ram, "disk": cache.restored_disk},
        "computed": cache.computed,
        "published": cache.published,
        "sparse": cache.sparse,
        "miss": cache.miss,
        "divergence": found
        and {"position": found.position, "ours": _named(found.ours, text), "seen": _named(found.seen, text)},
    }


def _begin_line(id: str, prompt: Prompt, limit: int) -> str:
    """The first line of a request in the log: a long answer is under way, not a server that hangs."""
    return f"request {id[:8]} begins: {len(prompt.tokens)} prompt tokens, an answer of at most {limit}"


def _account_line(id: str, finished: Finished, text: TextPort) -> str:
    """The last line of a request in the log: what was restored, what was computed, and why not more was known."""
    cache = finished.cache
    line = (
        f"request {id[:8]} {finished.reason}: {finished.prompt_tokens} prompt tokens, "
        f"restored {cache.restored_ram} from RAM and {cache.restored_disk} from disk, "
        f"computed {cache.computed}, published {cache.published}, answered {finished.completion_tokens}"
    )
    if cache.miss is None:
        return line
    found = cache.divergence
    if found is None or found.ours is None or found.seen is None:
        return f"{line}; {cache.miss}"
    ours, seen = (text.token_bytes(token).decode(errors="replace") for token in (found.ours, found.seen))
    return f"{line}; {cache.miss}: {ours!r} came, {seen!r} was known"


def _named(token: int | None, text: TextPort) -> dict[str, Any] | None:
    return None if token is None else {"token": token, "text": text.token_bytes(token).decode(errors="replace")}


def _milliseconds(timings: Timings) -> dict[str, float]:
    seconds = {"queued": timings.queued, "prefill": timings.prefill, "decode": timings.decode}
    return {name: round(value * 1000, 3) for name, value in seconds.items()}


def make_order(body: GenerationBody, prompts: Sequence[Prompt], text: TextPort, settings: Settings) -> Order:
    """Settle every number of a request; what only the vocabulary or the context can refuse is refused here."""
    _check_ids(body.logit_bias or (), "logit_bias", text)
    _check_ids(body.stop_token_ids or (), "stop_token_ids", text)
    return Order(
        prompts=prompts,
        n=body.n or 1,
        sampling=_sampling(body, settings.sampling),
        limits=[_limit(body, prompt, settings) for prompt in prompts],
        stops=tuple(body.stop or ()),
        stop_tokens=text.stop_tokens | frozenset(body.stop_token_ids or ()),
        ignore_stop_tokens=bool(body.ignore_eos),
        prompt_logprobs=body.reported_prompt_logprobs,
    )


SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
)


def _sampling(body: GenerationBody, defaults: Sampling) -> Sampling:
    asked = {name: getattr(body, name) for name in SAMPLING_FIELDS if getattr(body, name) is not None}
    seed = secrets.randbits(63) if body.seed is None else body.seed & SEED_MASK
    return replace(defaults, **asked, seed=seed, logprobs=body.reported_logprobs)


def _limit(body: GenerationBody, prompt: Prompt, settings: Settings) -> int:
    """How long the answer may get: as asked or by default, but never past what the context leaves.

    Agents ask for one fixed length on every turn; near the end of the context a shorter answer serves them better
    than none. The answer's report says what the limit was.
    """
    length = len(prompt.tokens)
    if length == 0:
        raise BadRequest(f"{body.prompt_field}: the prompt has no tokens", body.prompt_field)
    room = settings.context - length
    if room < 1:
        raise PromptTooLong(
            f"this model's maximum context length is {settings.context} tokens, but the prompt has {length} "
            "and its answer needs at least 1",
            body.prompt_field,
        )
    wanted = settings.default_max_tokens if body.answer_limit is None else body.answer_limit
    return room if wanted is None else min(wanted, room)


def _check_ids(ids: Iterable[int], name: str, text: TextPort) -> None:
    for token in ids:
        if token >= text.vocab_size:
            raise BadRequest(f"{name}: token {token} is outside the vocabulary of {text.vocab_size}", name)

"""A live server over fakes: an engine that says what its prompt tells it, and a byte tokenizer."""

from __future__ import annotations

import codecs
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import openai
import pytest
import uvicorn

from rekindle.api import Guard, ModelFacts, ModelHost, ServedModel, Settings, create_app
from rekindle.api.connections import guarded_protocol
from rekindle.api.dialects import DIALECTS
from rekindle.engine.types import (
    CacheReport,
    Divergence,
    DraftReport,
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    Request,
    Started,
    Timings,
    Token,
    TokenLogprob,
)
from rekindle.errors import BadRequest, PromptTooLong, QueueFull, StageLost, Stopping
from rekindle.grammar.calls import CallFormat
from rekindle.grammar.compiler import Compiler, Vocabulary
from rekindle.grammar.guide import Rules
from rekindle.prompt import Prompt
from rekindle.text import ThinkingTokens

END = 256  # the paper model's stop token
VOCAB = 260
CONTEXT = 30_000
PATIENCE = 20.0  # seconds a test waits for what must happen


class PanicException(BaseException):
    """What the tokenizer's library raises where Rust code panics."""


class PaperDetokenizer:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < 256 else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class PaperStopText:
    """Holds everything back until it cannot be a stop string, in the plainest way."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._all = ""
        self._shown = 0
        self.met: str | None = None

    def push(self, text: str) -> str:
        self._all += text
        ends = [self._all.find(stop) for stop in self._stops if stop in self._all]
        self.met = next((stop for stop in self._stops if stop in self._all), None)
        limit = min(ends) if ends else len(self._all) - max((len(stop) - 1 for stop in self._stops), default=0)
        return self._show(limit)

    def finish(self) -> str:
        return "" if self.met else self._show(len(self._all))

    def _show(self, limit: int) -> str:
        shown = self._all[self._shown : limit]
        self._shown = max(self._shown, limit)
        return shown


@cache
def byte_grammars() -> Compiler:
    tokens = [bytes([byte]) if byte < 256 else b"" for byte in range(VOCAB)]
    return Compiler(lambda: Vocabulary(tokens, [END], [END], lambda text: list(text.encode())))


class PaperText:
    """Bytes are tokens. A conversation reads "role:content|role:content|assistant:"."""

    vocab_size = VOCAB
    stop_tokens = frozenset({END})

    def __init__(self) -> None:
        self.rendered: list[dict[str, Any]] = []
        self.remembered: list[tuple[Prompt, tuple[int, ...], dict[str, Any]]] = []
        self.namespaces: list[str] = []  # of all that was rendered or remembered

    is_counting = False

    @property
    def beyond_context(self) -> PaperText:
        text = PaperText()
        text.is_counting = True
        return text

    takes_tools = True
    template_source = "{% for message in messages %}…{% endfor %}{{ tools }}{{ enable_thinking }}"
    marks: tuple[int, ...] = ()
    efforts: Sequence[str] = ("low", "medium", "xhigh")
    options = frozenset({"enable_thinking", "reasoning_effort"})

    thinking_tokens: ThinkingTokens | None = ThinkingTokens(257, 258, (10, 258, 10, 10))

    def takes_option(self, name: str) -> bool:
        return name in self.options

    call_format = CallFormat.HERMES
    may_think = False

    def compile(self, source: str, field: str) -> Rules:
        return byte_grammars().compile(source, field)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        namespace: str = "",
        /,
        **kwargs: Any,
    ) -> Prompt:
        self.namespaces.append(namespace)
        self.rendered.append({"messages": list(messages), "tools": tools, "generate": add_generation_prompt, **kwargs})
        turns = [f"{m['role']}:{_content(m.get('content'))}" for m in messages]
        prompt = self.encode("|".join([*turns, "assistant:"] if add_generation_prompt else turns), True)
        return replace(prompt, marks=self.marks)

    def remember(self, prompt: Prompt, ids: Sequence[int], message: Mapping[str, Any], namespace: str = "") -> None:
        self.namespaces.append(namespace)
        self.remembered.append((prompt, tuple(ids), dict(message)))

    def next_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        answer: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
        namespace: str = "",
        /,
        **kwargs: Any,
    ) -> Prompt | None:
        """[dropped] in a message: the template shows no answers of the past; [stuck]: what comes next takes forever;
        [fixed]: the template refuses an answer as a part of history; [wrong]: it has a mistake."""
        said = str(messages)
        if "[fixed]" in said:
            raise BadRequest("this template takes one question only", "messages")
        if "[wrong]" in said:
            raise KeyError("secret")
        spoken = [*messages, {"role": "assistant", "content": "…"} if "[dropped]" in said else answer]
        turns = [f"{m['role']}:{_content(m.get('content'))}" for m in spoken]
        return self.encode("|".join(["[silent]", *turns] if "[stuck]" in said else turns) + "|", True)

    def encode(self, text: str, add_special_tokens: bool) -> Prompt:
        if "[vast]" in text and not self.is_counting:
            raise PromptTooLong("the prompt has more tokens than the context", "messages", CONTEXT + 1, CONTEXT - 1)
        if "[panic]" in text:
            raise PanicException("byte index 1 is not a char boundary")
        return Prompt(tuple(text.encode()) if add_special_tokens else (0, *text.encode()))

    def prompt_of(self, tokens: Sequence[int]) -> Prompt:
        if bad := [token for token in tokens if token >= VOCAB]:
            raise BadRequest(f"prompt: no token {bad[0]}", "prompt")
        return Prompt(tuple(tokens))

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"<end>"

    def detokenizer(self) -> PaperDetokenizer:
        return PaperDetokenizer()

    def stop_watcher(self, stops: Sequence[str]) -> Callable[[int], bool]:
        detokenizer, stop = PaperDetokenizer(), PaperStopText(stops)

        def watch(token: int) -> bool:
            stop.push(detokenizer.push(token))
            return stop.met is not None

        return watch

    def stop_text(self, stops: Sequence[str]) -> PaperStopText:
        return PaperStopText(stops)


def _content(content: Any) -> str:
    return "".join(part["text"] for part in content) if isinstance(content, list) else str(content or "")


@dataclass(frozen=True)
class PaperPages:
    free: int = 7
    total: int = 10


@dataclass(frozen=True)
class PaperCache:
    hits: Mapping[str, int] = field(default_factory=lambda: {"ram": 5, "disk": 2})
    restored: Mapping[str, int] = field(default_factory=lambda: {"ram": 500, "disk": 200})
    misses: Mapping[str, int] = field(default_factory=lambda: {"unseen": 3})
    short_hits: Mapping[str, int] = field(default_factory=lambda: {"no_boundary": 4})
    published: int = 11
    evictions: Mapping[str, int] = field(default_factory=lambda: {"ram:to_disk": 6})
    quarantined: int = 1
    saves: int = 9
    saves_waiting: int = 2
    refused_saves: Mapping[str, int] = field(default_factory=lambda: {"queue": 1})
    bad_files: int = 1
    entries: Mapping[str, int] = field(default_factory=lambda: {"ram": 8, "disk": 9})
    bytes: Mapping[str, int] = field(default_factory=lambda: {"ram": 800, "disk": 900})
    budgets: Mapping[str, int] = field(default_factory=lambda: {"ram": 1000, "disk": 2000})


@dataclass(frozen=True)
class PaperStatus:
    running: int = 3
    waiting: int = 2
    slots: int = 4
    pages: PaperPages = field(default_factory=PaperPages)
    computed_tokens: int = 1000
    restored_tokens: int = 2000
    generated_tokens: int = 300
    audits: int = 7
    audit_mismatches: int = 1
    broken: str | None = None
    degraded: str | None = None
    draining: bool = False
    cache: PaperCache = field(default_factory=PaperCache)
    work: dict[str, int] = field(
        default_factory=lambda: {
            "step:recorded": 70,
            "experts:cache and cpu": 40,
            "pages:out": 5,
            "slabs:late": 6,
            "swaps:": 2,
        }
    )


def row(token: int, top: int) -> TokenLogprob:
    """A token's log-probability is minus its hundredth; the alternatives are its neighbours."""
    alternatives = [((token + i) % 256, -(token + i) / 100) for i in range(top)]
    return TokenLogprob(token, -token / 100, tuple(alternatives))


class PaperEngine:
    """Answers on a thread of its own. The prompt says how:

    say(X)    the answer is X and then the stop token; otherwise it is "ok"
    [drip]    three tokens, then nothing until cancelled
    [silent]  nothing at all until cancelled
    [lost]    three tokens, then StageLost; [bug] the same with an error nobody foresaw
    [ended]   three tokens, then the engine itself ends it as cancelled
    [vast]    refused by the text side: longer than the context
    [panic]   the tokenizer panics, as its library does: not by an Exception
    [full]    refused: the queue is full; [long] refused: too long; [stopping] refused once it is in the background
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.finished: dict[str, Finished] = {}
        self.kept: list[tuple[tuple[int, ...], float, str]] = []
        self.submitted = threading.Semaphore(0)
        self.cancelled: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._live: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        said = prompt_of(request)
        if "[full]" in said:
            raise QueueFull("7 requests are waiting, the queue holds 7")
        if "[long]" in said:
            raise PromptTooLong("the prompt has 9 tokens, the KV pool holds 8", tokens=9, most=7)
        if "[stopping]" in said and request.background:
            raise Stopping("the server is stopping and takes no more requests")
        self.requests.append(request)
        self._live.put(request)
        self.submitted.release()

    def cancel(self, request_id: str) -> None:
        self.cancelled.put(request_id)

    def keep(self, prompt: Prompt, seconds: float, namespace: str) -> None:
        self.kept.append((prompt.marks, seconds, namespace))

    def status(self) -> PaperStatus:
        return PaperStatus()

    def stop(self) -> None:
        self._live.put(None)
        self._thread.join()

    def _run(self) -> None:
        """One event of each live answer in turn, so that answers overlap."""
        live: list[tuple[Request, Iterator[Event]]] = []
        while True:
            while not live or not self._live.empty():
                request = self._live.get()
                if request is None:
                    return
                live.append((request, self._answer(request)))
            for request, events in list(live):
                event = next(events, None)
                if event is None:
                    live.remove((request, events))
                else:
                    request.sink(event)

    def _answer(self, request: Request) -> Iterator[Event]:
        said = prompt_of(request)
        cache = cache_of(request)
        if "[silent]" in said:
            return
        yield Started(cache)
        if request.prompt_logprobs is not None:
            tokens = request.prompt.tokens
            yield PromptLogprobs((None, *(row(token, request.prompt_logprobs) for token in tokens[1:])))
        answer = list(said.rpartition("say(")[2].partition(")")[0].encode()) if "say(" in said else list(b"ok")
        count, reason, stop_token = 0, FinishReason.LENGTH, None
        for token in [*answer, END, *([END] * 5)][: request.max_tokens]:
            if token in request.stop_tokens and not request.ignore_stop_tokens:
                reason, stop_token = FinishReason.STOP, token
                break
            top = request.sampling.logprobs
            yield Token(token, row(token, top) if top is not None else None)
            count += 1
            if count == 3 and "[drip]" in said:
                return
            if count == 3 and ("[lost]" in said or "[bug]" in said):
                yield Failed(StageLost("stage 1 missed its deadline") if "[lost]" in said else KeyError("secret"))
                return
            if count == 3 and "[ended]" in said:
                reason = FinishReason.CANCELLED
                break
            if request.stop_when is not None and request.stop_when(token):
                reason = FinishReason.STOP
                break
        finished = Finished(
            reason,
            stop_token,
            len(request.prompt.tokens),
            count + (stop_token is not None),
            cache,
            Timings(queued=0.001, prefill=0.25, decode=0.5),
            DraftReport("lookup", None, blocks=4, proposed=20, accepted=9),
        )
        self.finished[request.id] = finished
        yield finished


def prompt_of(request: Request) -> str:
    return bytes(token for token in request.prompt.tokens if token < 256).decode(errors="replace")


def cache_of(request: Request) -> CacheReport:
    length = len(request.prompt.tokens)
    ram, disk = length // 2, length // 4
    divergence = Divergence(position=ram + disk, ours=ord("a"), seen=None)
    return CacheReport(
        {"ram": ram, "disk": disk}, length - ram - disk, 5, "the prompt leaves what was seen", divergence
    )


class LiveServer(uvicorn.Server):
    def __init__(self, app: Any, *bounds: Any) -> None:
        http = guarded_protocol(*bounds)
        super().__init__(
            uvicorn.Config(
                app,
                host="127.0.0.1",
                port=0,
                log_level="warning",
                timeout_graceful_shutdown=1,
                timeout_keep_alive=60,
                http=http,
            )
        )
        self.ready = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @property
    def port(self) -> int:
        return self.servers[0].sockets[0].getsockname()[1]


class PaperSource:
    """A model that is loaded as soon as it may, and needs no memory."""

    def __init__(self, engine: Any, text: Any, settings: Settings) -> None:
        self.settings = settings
        self.may_load = threading.Event()
        self.may_load.set()
        self._model = ServedModel(engine, text, settings)

    def fits_beside(self, others: list[Any]) -> bool:
        return True

    def load(self, others: list[Any]) -> ServedModel:
        assert self.may_load.wait(PATIENCE)
        return self._model

    def reason(self, error: Exception) -> str:
        return str(error)

    def tidy(self) -> None: ...


@dataclass(frozen=True)
class House:
    """The server and what it stands on."""

    engine: PaperEngine
    text: PaperText
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "unused") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)

    def last_finished(self) -> Finished:
        return self.engine.finished[self.engine.requests[-1].id]


@contextmanager
def open_house(
    connections: int = 512,
    header_seconds: float = 15.0,
    unread_seconds: float = 60.0,
    dialects: Sequence[Any] = DIALECTS,
    others: Sequence[Any] = (),
    **settings: Any,
) -> Iterator[House]:
    engine, text = PaperEngine(), PaperText()
    guard = Guard(**{each.name: settings.pop(each.name) for each in fields(Guard) if each.name in settings})
    given = {
        "models": ("paper-9b", "org/alias"),
        "context": CONTEXT,
        "fingerprint": "abcdef0123456789",
        "facts": ModelFacts(template=PaperText.template_source),
        **settings,
    }
    models = ModelHost([PaperSource(engine, text, Settings(**given)), *others]).start()
    app = create_app(models, guard, dialects)
    server = LiveServer(app, connections, header_seconds, unread_seconds)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert server.ready.wait(PATIENCE), "the server did not start"
    try:
        yield House(engine, text, server.port)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        engine.stop()


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with open_house() as opened:
        yield opened


@pytest.fixture
def fresh_house() -> Iterator[Callable[..., House]]:
    """For tests that need their own settings or counters."""
    opened = []

    def open_one(**settings: Any) -> House:
        context = open_house(**settings)
        opened.append(context)
        return context.__enter__()

    yield open_one
    for context in opened:
        context.__exit__(None, None, None)


@pytest.fixture
def late_model() -> Iterator[PaperSource]:
    """A second model of a house, which is not loaded before it may be."""
    engine = PaperEngine()
    source = PaperSource(engine, PaperText(), Settings(models=("late",), context=CONTEXT))
    source.may_load.clear()
    yield source
    source.may_load.set()
    engine.stop()

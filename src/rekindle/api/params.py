"""From what a client asks for to what the engine is asked for: defaults filled in, limits applied."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rekindle.api.choice import ends_behind_thinking, tools_of
from rekindle.api.keys import Client
from rekindle.api.ports import TextPort
from rekindle.api.request import ClientRequest, Conversation
from rekindle.api.rules import constrains_calls
from rekindle.api.settings import Settings
from rekindle.engine.types import Sampling
from rekindle.errors import BadRequest, PromptTooLong
from rekindle.grammar.guide import Rules
from rekindle.prompt import Prompt
from rekindle.text.parsing import Tool

SEED_MASK = 2**63 - 1
ANY_SEED = -1  # llama.cpp, Ollama and vLLM take it for no seed, and their clients send it
OWN_SEEDS = 2**53  # the server's own lie below, where the numbers of clients in JavaScript are exact


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """n answers to each prompt, with every number decided."""

    prompts: Sequence[Prompt]
    n: int
    sampling: Sampling
    max_tokens: Sequence[int]  # of an answer, by prompt
    stop_strings: Sequence[str]
    stop_tokens: frozenset[int]
    ignore_stop_tokens: bool
    prompt_logprobs: int | None = None
    parses: bool = False  # reasoning and calls of `tools` are looked for in the answers
    tools: Sequence[Tool] = ()
    namespace: str = ""
    thinking_budget: int | None = None  # tokens
    rules: Rules | None = None  # the grammar that the answers keep to
    own_calls: bool = False  # calls keep to a grammar, so that they are in the model's own format
    is_alone: bool = False  # no other client has the name space: all that was cached there is the client's own

    def seed(self, index: int) -> int:
        """Of answer `index`: the answers to one prompt have consecutive seeds."""
        return (self.sampling.seed + index % self.n) & SEED_MASK


def make_params(
    request: ClientRequest,
    prompts: Sequence[Prompt],
    rules: Rules | None,
    text: TextPort,
    settings: Settings,
    client: Client,
) -> GenerationParams:
    """Raises BadRequest for what only the vocabulary or the context can refuse."""
    check_ids(request.sampling.get("logit_bias", ()), "logit_bias", text)
    check_ids(request.stop_token_ids, "stop_token_ids", text)
    return GenerationParams(
        prompts=prompts,
        n=request.n,
        sampling=_sampling(request, settings.card.of(thinks=not _is_direct(request, prompts, text))),
        max_tokens=[_max_tokens(request, prompt, settings) for prompt in prompts],
        stop_strings=tuple(request.stop_strings),
        stop_tokens=text.stop_tokens | frozenset(request.stop_token_ids),
        ignore_stop_tokens=request.ignore_stop_tokens,
        prompt_logprobs=request.prompt_logprobs,
        parses=isinstance(request.source, Conversation),
        tools=_callable(request) if text.takes_tools else [],
        namespace=client.namespace,
        thinking_budget=request.source.thinking.budget if isinstance(request.source, Conversation) else None,
        rules=rules,
        own_calls=constrains_calls(request),
        is_alone=client.is_alone,
    )


def _callable(request: ClientRequest) -> list[Tool]:
    source = request.source
    return tools_of(source.tools or ()) if isinstance(source, Conversation) and source.callable_tools else []


def _is_direct(request: ClientRequest, prompts: Sequence[Prompt], text: TextPort) -> bool:
    """Whether the template has told the model to answer without thinking."""
    return isinstance(request.source, Conversation) and any(ends_behind_thinking(prompt, text) for prompt in prompts)


def _sampling(request: ClientRequest, defaults: Sampling) -> Sampling:
    seed = request.seed
    if seed is None or seed == ANY_SEED:
        seed = secrets.randbelow(OWN_SEEDS - request.n)
    return replace(defaults, **request.sampling, seed=seed & SEED_MASK, logprobs=request.logprobs)


def _max_tokens(request: ClientRequest, prompt: Prompt, settings: Settings) -> int:
    """How long the answer may get: as asked or by default, but never past what the context leaves.

    Agents ask for one fixed length on every turn; near the end of the context a shorter answer serves them better
    than none. The answer's report says what the limit was.
    """
    length = len(prompt.tokens)
    if length == 0:
        raise BadRequest(f"{request.prompt_field}: the prompt has no tokens", request.prompt_field)
    room = settings.context - length
    if room < 1:
        raise PromptTooLong(
            f"this model's maximum context length is {settings.context} tokens, but the prompt has {length} "
            "and its answer needs at least 1",
            request.prompt_field,
            tokens=length,
            most=settings.context - 1,
        )
    wanted = settings.card.max_tokens if request.max_tokens is None else request.max_tokens
    return room if wanted is None else min(wanted, room)


def check_ids(ids: Iterable[int], name: str, text: TextPort) -> None:
    for token in ids:
        if token >= text.vocab_size:
            raise BadRequest(f"{name}: token {token} is outside the vocabulary of {text.vocab_size}", name)

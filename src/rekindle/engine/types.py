"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rekindle.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. Order: penalties, bias, temperature, top-k, top-p, min-p, one draw."""

    temperature: float = 1.0  # 0, or next to nothing, is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # multiplicative, over prompt and answer
    frequency_penalty: float = 0.0  # per occurrence in the answer
    presence_penalty: float = 0.0  # once per token seen in the answer
    seed: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # how many alternatives to report per token; 0 reports the drawn one only


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. `sink` is called from the engine's thread, in order, and must not block."""

    id: str
    prompt: Prompt
    sampling: Sampling
    max_tokens: int
    stop_tokens: frozenset[int]  # end the answer and are not part of it
    sink: Callable[[Event], None]
    stop_when: Callable[[int], bool] | None = None  # asked once per token, in order; True ends the answer with it
    ignore_stop_tokens: bool = False
    background: bool = False  # runs only while no other request has anything to run; max_tokens 0 prepares state
    prompt_logprobs: int | None = None  # report the prompt's own log-probabilities (completions with echo)


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), most likely first


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt left what the index had seen."""

    position: int
    ours: int | None  # the prompt's token there, None at its end
    seen: int | None  # the token the index had there


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What was restored and what was computed for one request."""

    restored_ram: int = 0
    restored_disk: int = 0
    computed: int = 0  # prompt tokens run through a forward
    published: int = 0  # tokens newly covered by snapshots of this request
    miss: str | None = None  # why not more was restored, in words; None for a full hit
    divergence: Divergence | None = None
    sparse: bool = False  # some of the context was left out of attention, as --kv-mode sparse allows

    @property
    def restored(self) -> int:
        return self.restored_ram + self.restored_disk


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, by a monotonic clock."""

    queued: float
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is in a slot and what the caches gave is known."""

    cache: CacheReport


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the answer."""

    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probability of every prompt token given those before it; the first has none."""

    rows: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    reason: FinishReason
    stop_token: int | None  # the stop token that ended it, not among the Token events
    prompt_tokens: int
    completion_tokens: int  # Token events, plus the stop token if one was drawn
    cache: CacheReport
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failed:
    error: Exception


Event = Started | PromptLogprobs | Token | Finished | Failed

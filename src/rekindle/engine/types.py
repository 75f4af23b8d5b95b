"""What goes into the engine and what comes out of it.

This module loads no torch, so `api` and the commands import these types directly; the types of other packages that
EngineStatus names are imported for the type checker only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from rekindle.prompt import Prompt

if TYPE_CHECKING:
    from rekindle.grammar.guide import Rules
    from rekindle.prefix import CacheStats
    from rekindle.stages import PageCount


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. Order: penalties, bias, grammar, temperature, top-k, top-p, min-p, one draw."""

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
class ThinkingLimit:
    """After `budget` tokens of thinking the answer goes on with `close`, whatever the model would write."""

    budget: int
    begin: int  # the token that opens the thinking
    end: int  # the token that closes it
    close: tuple[int, ...]  # `end` among them
    is_open: bool  # the prompt ends inside the thinking


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
    namespace: str = ""  # snapshots are restored from it and published in it, and in no other
    thinking: ThinkingLimit | None = None
    rules: Rules | None = None  # the grammar that the answer keeps to

    @property
    def ends(self) -> frozenset[int]:
        """The stop tokens that hold."""
        return frozenset() if self.ignore_stop_tokens else self.stop_tokens


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

    restored_from: Mapping[str, int] = field(default_factory=dict)  # tokens by tier, 0 where none came from it
    computed: int = 0  # prompt tokens run through a forward
    published: int = 0  # tokens newly covered by snapshots of this request
    miss: str | None = None  # why not more was restored, in words; None for a full hit
    divergence: Divergence | None = None
    sparse: bool = False  # some of the context was left out of attention, as --kv-mode sparse allows
    not_published: str | None = None  # why snapshots reach no further, in words, where one could not be kept

    @property
    def restored(self) -> int:
        return sum(self.restored_from.values())


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What was drafted for one answer, and how much of it the target agreed to."""

    drafter: str = "off"
    off: str | None = None  # why nothing was drafted, or the drafter drafts no more, in words
    blocks: int = 0  # that the target verified
    proposed: int = 0  # tokens
    accepted: int = 0  # of them, up to the end of the answer
    cold_from: int | None = None  # the drafter's context begins here: the snapshot brought none, or less than it reads
    positions: tuple[
        tuple[int, int], ...
    ] = ()  # proposed and accepted tokens by their place in the block, the first first

    @property
    def mean_accepted(self) -> float:
        """Drafted tokens accepted per block; the target's own token after them is not counted."""
        return self.accepted / self.blocks if self.blocks else 0.0


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
    draft: DraftReport = DraftReport()
    stuck: str | None = None  # why the answer ended before its grammar did, in words


@dataclass(frozen=True, slots=True)
class Failed:
    error: Exception


Event = Started | PromptLogprobs | Token | Finished | Failed


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The engine at one moment; token counts are totals since it started."""

    running: int  # sequences in a slot
    waiting: int
    slots: int
    pages: PageCount
    computed_tokens: int  # prompt tokens that ran through a forward
    restored_tokens: int
    generated_tokens: int
    audits: int
    audit_mismatches: int
    cache: CacheStats
    work: Mapping[str, int]  # how the stages of this process have worked, by "kind:how"
    broken: str | None = None  # why nothing can run any more
    degraded: str | None = None  # why nothing more is published, though answers are right
    draining: bool = False  # new requests are refused; those taken before run to their end

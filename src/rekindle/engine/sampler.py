"""Draws the next token of every row. A row's draw depends on its own logits, settings and position only.

The random number of a draw is a function of (seed, position), so the same request draws the same tokens alone or
batched, cold or restored, and a sequence that was preempted and resumed goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from rekindle.engine.types import Sampling, TokenLogprob
from rekindle.grammar.guide import Mask
from rekindle.kernels.sampling import (
    add_bias,
    apply_penalties,
    argmax,
    count_tokens,
    keep_allowed,
    log_softmax_at,
    sample,
)

COLDEST = 1e-5  # below it a temperature is none: a logit in doubt has no chance, and dividing by less may overflow


class Drawable(Protocol):
    """What the sampler reads of a sequence."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def tokens(self) -> Sequence[int]: ...  # prompt and answer so far
    @property
    def prompt_length(self) -> int: ...
    @property
    def mask(self) -> Mask | None: ...  # the tokens that its grammar allows; None: all


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) for the token at `position`."""
    return float(np.random.Generator(np.random.Philox(key=seed % 2**64, counter=position)).random())


def needs_history(s: Sampling) -> bool:
    """Whether a draw depends on the tokens before it other than through the logits."""
    return (s.repetition_penalty, s.frequency_penalty, s.presence_penalty) != (1.0, 0.0, 0.0)


def draw(logits: torch.Tensor, sequences: Sequence[Drawable], positions: Sequence[int]) -> torch.Tensor:
    """One token per row of `logits` [rows, vocab], for the given positions: int64 [rows] on the logits' device."""
    with torch.cuda.device_of(logits):  # kernels are launched on the current device
        return _draw(_prepared(logits, sequences), [sequence.sampling for sequence in sequences], positions)


def _draw(logits: torch.Tensor, settings: Sequence[Sampling], positions: Sequence[int]) -> torch.Tensor:
    temperatures = [s.temperature if s.temperature >= COLDEST else 0.0 for s in settings]
    if not any(temperatures):
        return argmax(logits)
    # Settings stay on the host: the sampler reads them there to choose a cheaper path.
    uniforms = [uniform(s.seed, position) for s, position in zip(settings, positions, strict=True)]
    return sample(
        logits,
        torch.tensor(temperatures),
        torch.tensor([s.top_k for s in settings]),
        torch.tensor([s.top_p for s in settings]),
        torch.tensor([s.min_p for s in settings]),
        torch.tensor(uniforms, dtype=torch.float64),
    )


def warm_up_draws(logits: torch.Tensor) -> None:
    """Every way to draw from logits [1, vocab], once: the highest; one of a few; any; of those that a mask allows."""
    argmax(logits)
    keep_allowed(logits, torch.full((1, -(-logits.shape[1] // 32)), -1, dtype=torch.int32), [0])
    one = torch.ones(1)
    for top_k in (20, 0):
        sample(logits, one, torch.tensor([top_k]), one * 0.9, one * 0, one.double() * 0.5)


def are_drawable(logits: torch.Tensor) -> bool:
    """Whether there is a token to draw in every row."""
    with torch.cuda.device_of(logits):
        return bool((argmax(logits) >= 0).all())


def logprob_of(logits: torch.Tensor, token: int, top: int) -> TokenLogprob:
    """Log-probability of `token` under one row of raw logits, with the `top` most likely beside it."""
    found = log_softmax_at(logits.float()[None], torch.tensor([token], device=logits.device), top)
    best = tuple(zip(found.top_tokens[0].tolist(), found.top[0].tolist(), strict=True))
    return TokenLogprob(token, float(found.chosen), best)


def logprobs_of(scores: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """The same of several tokens, from rows of scores as a stage gives them; others may have wanted more."""
    return [
        TokenLogprob(
            token, row[0], tuple(zip(map(int, row[2 : 2 + 2 * top : 2]), row[1 : 1 + 2 * top : 2], strict=True))
        )
        for token, row in zip(tokens, scores.tolist(), strict=True)
    ]


def _prepared(logits: torch.Tensor, sequences: Sequence[Drawable]) -> torch.Tensor:
    """Logits after penalties, bias and grammars; the given tensor itself if no row asks for any."""
    settings = [sequence.sampling for sequence in sequences]
    device, vocab = logits.device, logits.shape[-1]
    if any(needs_history(s) for s in settings):
        logits = apply_penalties(
            logits,
            count_tokens([q.tokens[: q.prompt_length] for q in sequences], vocab, device),
            count_tokens([q.tokens[q.prompt_length :] for q in sequences], vocab, device),
            torch.tensor([s.presence_penalty for s in settings], device=device),
            torch.tensor([s.frequency_penalty for s in settings], device=device),
            torch.tensor([s.repetition_penalty for s in settings], device=device),
        )
    bias = [(row, token, value) for row, s in enumerate(settings) for token, value in s.logit_bias.items()]
    if bias:
        rows, tokens, values = (torch.tensor(column, device=device) for column in zip(*bias, strict=True))
        logits = add_bias(logits, rows, tokens, values.float())
    masks = {row: mask for row, q in enumerate(sequences) if (mask := q.mask) is not None}
    if masks:
        logits = keep_allowed(logits, torch.from_numpy(np.stack(list(masks.values()))), list(masks))
    return logits

"""Draws the next token of every row. A row's draw depends on its own logits, settings and position only.

The random number of a draw is a function of (seed, position), so the same request draws the same tokens alone or
batched, cold or restored, and a sequence that was preempted and resumed goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.random import Generator, Philox

from rekindle.engine.forcing import impose
from rekindle.engine.token_counts import TokenCounts
from rekindle.engine.types import Sampling, TokenLogprob
from rekindle.grammar.guide import Mask
from rekindle.kernels.sampling import (
    Penalty,
    add_bias,
    argmax,
    count_drawn,
    keep_allowed,
    log_softmax_at,
    penalise,
    sample,
)

COLDEST = 1e-5  # below it a temperature is none: a logit in doubt has no chance, and dividing by less may overflow
HIGHEST = 1 - 2**-23  # of a uniform number: just below 1 in float32 too
AT_ONCE = 64  # uniform numbers of a seed that are made together


class Drawable(Protocol):
    """A row of logits to draw from, and what the sampler reads of its sequence."""

    @property
    def sampling(self) -> Sampling: ...
    @property
    def position(self) -> int: ...  # of the token that is drawn
    @property
    def tokens(self) -> Sequence[int]: ...  # prompt and answer so far; the last ones may not be known yet
    @property
    def prompt_length(self) -> int: ...
    @property
    def drafted(self) -> Sequence[int]: ...  # tokens of a block before this row, as if they were accepted
    @property
    def in_block(self) -> bool: ...  # what is drawn may not stay
    @property
    def token_counts(self) -> TokenCounts: ...
    @property
    def mask(self) -> Mask | None: ...  # the tokens that its grammar allows; None: all
    @property
    def forced(self) -> int | None: ...  # the token that must come, whatever the logits say


Draw = Callable[[torch.Tensor, Sequence[Drawable]], torch.Tensor]  # `draw`, or what gives the same tokens


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) for the token at `position`."""
    return _uniforms(seed % 2**64, position // AT_ONCE)[position % AT_ONCE]


@lru_cache(maxsize=1024)
def _uniforms(seed: int, run: int) -> list[float]:
    """Of AT_ONCE positions. Philox makes four numbers at each value of its counter, of which a token takes the first.
    (To set up a generator takes as long as to draw hundreds of numbers.)"""
    generator = Generator(Philox(key=seed, counter=run * AT_ONCE))
    found: list[float] = generator.random(4 * AT_ONCE)[::4].tolist()
    return found


def has_penalties(s: Sampling) -> bool:
    """Whether a draw depends on the tokens before it other than through the logits."""
    return (s.repetition_penalty, s.frequency_penalty, s.presence_penalty) != (1.0, 0.0, 0.0)


def draw(logits: torch.Tensor, rows: Sequence[Drawable]) -> torch.Tensor:
    """One token per row of `logits` [rows, vocab]: int64 [rows] on the logits' device."""
    with torch.cuda.device_of(logits):  # kernels are launched on the current device
        drawn = impose(_draw(_prepared(logits, rows), rows), [row.forced for row in rows])
        _count(drawn, rows)
        return drawn


def _draw(logits: torch.Tensor, rows: Sequence[Drawable]) -> torch.Tensor:
    settings = [row.sampling for row in rows]
    temperatures = [s.temperature if s.temperature >= COLDEST else 0.0 for s in settings]
    if not any(temperatures):
        return argmax(logits)
    # Settings stay on the host: the sampler reads them there to choose a cheaper path.
    return sample(
        logits,
        torch.tensor(temperatures),
        torch.tensor([s.top_k for s in settings]),
        torch.tensor([s.top_p for s in settings]),
        torch.tensor([s.min_p for s in settings]),
        torch.tensor([uniform(row.sampling.seed, row.position) for row in rows], dtype=torch.float64),
    )


def _count(drawn: torch.Tensor, rows: Sequence[Drawable]) -> None:
    """What was drawn is counted where it will stay, on the device: the next step need not wait for the host."""
    counting = [row if has_penalties(row.sampling) and not row.in_block else None for row in rows]
    if any(counting):
        count_drawn(drawn, [None if row is None else row.token_counts.tensor for row in counting])
        for row in counting:
            if row is not None:
                row.token_counts.note_drawn()


def warm_up_draws(logits: torch.Tensor) -> None:
    """Every way to draw from logits [1, vocab], once: the highest; one of a few; any; of those that a mask allows; with
    penalties."""
    counts = torch.zeros(logits.shape[1], dtype=torch.int32, device=logits.device)
    count_drawn(argmax(logits), [counts])
    penalise(logits, [Penalty(counts, (), 0.0, 0.0, 1.0)])
    keep_allowed(logits, torch.full((1, -(-logits.shape[1] // 32)), -1, dtype=torch.int32), [0])
    one = torch.ones(1)
    for top_k in (20, 0):
        sample(logits, one, torch.tensor([top_k]), one * 0.9, one * 0, one.double() * 0.5)
    if logits.is_cuda:
        from rekindle.kernels.sampling import ordered

        block = torch.zeros(ordered.block_words(1, logits.shape[1], 1), dtype=torch.int64, device=logits.device)
        for width in (32, ordered.OPEN, ordered.GREEDY):
            ordered.draw_ordered(ordered.parts_of(block, 1, logits.shape[1]), logits.shape[1], width)


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


def _prepared(logits: torch.Tensor, rows: Sequence[Drawable]) -> torch.Tensor:
    """Logits after penalties, bias and grammars; the given tensor itself if no row asks for any."""
    given, device = logits, logits.device
    if any(has_penalties(row.sampling) for row in rows):
        logits = penalise(logits, [_penalty(row, logits) for row in rows])
    bias = [(i, token, value) for i, row in enumerate(rows) for token, value in row.sampling.logit_bias.items()]
    if bias:
        places, tokens, values = (torch.tensor(column, device=device) for column in zip(*bias, strict=True))
        logits = add_bias(logits, places, tokens, values.float())
    masks = {i: mask for i, row in enumerate(rows) if (mask := row.mask) is not None}
    if masks:
        own = logits is not given
        logits = keep_allowed(logits, torch.from_numpy(np.stack(list(masks.values()))), list(masks), own)
    return logits


def _penalty(row: Drawable, logits: torch.Tensor) -> Penalty | None:
    s, length = row.sampling, row.position - len(row.drafted)
    if not has_penalties(s):
        return None
    counts = row.token_counts.up_to(length, row.tokens, row.prompt_length, logits)
    return Penalty(counts, row.drafted, s.presence_penalty, s.frequency_penalty, s.repetition_penalty)

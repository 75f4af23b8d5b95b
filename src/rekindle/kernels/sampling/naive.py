"""From logits to tokens, in torch on any device, without a host sync.

A row's draw depends on its own logits, settings and uniform number only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rekindle.kernels.sampling import cpu

SMALL_TOP_K = 128  # up to here partial selection beats sorting the vocabulary
RUNS = 64  # runs of the vocabulary that are searched side by side


IN_PROMPT = 1 << 30  # of a count: the token stands in the prompt; the bits below say how often in the answer


class Penalty(NamedTuple):
    """What one row's tokens lose for having been seen."""

    counts: Tensor  # int32 [vocab], on the device of the logits: IN_PROMPT, and how often in the answer
    drafted: Sequence[int]  # tokens of the answer that are not counted yet
    presence: float  # taken off once …
    frequency: float  # … and as often as the token stands there; 0: nothing
    repetition: float  # a factor; 1: nothing


class LogProbs(NamedTuple):
    """Natural logarithms of probabilities."""

    chosen: Tensor  # float32 [rows]
    top: Tensor  # float32 [rows, top], highest first
    top_tokens: Tensor  # int64 [rows, top]


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniforms: Tensor
) -> Tensor:
    """logits float32 [rows, vocab], settings [rows] -> int64 [rows].

    Temperature first, then top-k (0: off), top-p (1: off), min-p (0: off), each on what the one before left; then the
    first token, in the order of the vocabulary, whose cumulated probability exceeds the uniform number in [0, 1). (In
    that order a draw needs no sorted vocabulary.) Temperature 0 takes the highest logit, the lowest id on ties. A row
    with a NaN, or whose highest logit is infinite, gives -1: no token. The settings lie together; on the host they
    choose a cheaper path where there is one.
    """
    if _on_host(temperature) and bool((temperature == 0).all()):
        return argmax(logits)
    # one transfer for all settings; a uniform number just below 1 may not round up to the whole
    settings = torch.stack([x.float() for x in (temperature, top_k, top_p, min_p, uniforms.clamp(max=1 - 2**-23))])
    if logits.is_cuda and _on_host(settings):
        from rekindle.kernels.sampling import triton

        return triton.sample(logits, settings)
    if not (_on_host(logits) and _on_host(settings)):
        return _draw_bounded(logits, settings)
    unbounded = settings[1] == 0
    if not unbounded.any():
        return _draw_bounded(logits, settings)
    drawn = torch.empty(len(logits), dtype=torch.int64)  # each row in its own way, whichever rows stand beside it
    for rows, way in ((unbounded, cpu.draw_unbounded), (~unbounded, _draw_bounded)):
        if rows.any():
            drawn[rows] = way(logits[rows], settings[:, rows])
    return drawn


def _draw_bounded(logits: Tensor, settings: Tensor) -> Tensor:
    """By the highest logits, as many as top-k leaves of the row that it leaves most; all, where one has none."""
    width = logits.shape[-1]
    if _on_host(settings) and bool(((settings[1] > 0) | (settings[0] == 0)).all()):
        width = min(width, max(1, int(settings[1].max())))
    return draw(*highest(logits, width), settings.to(logits.device), logits.shape[-1])


def draw(values: Tensor, tokens: Tensor, settings: Tensor, vocab: int) -> Tensor:
    """One of the tokens [rows, n], whose logits descend; settings float32 [5, rows] as `sample` names them."""
    temperature, top_k, top_p, min_p, uniforms = settings[:, :, None]
    greedy = temperature == 0
    scaled = (values - values[:, :1]) / torch.where(greedy, 1.0, temperature)
    weights = _filtered(scaled.exp(), top_k, top_p, min_p)
    cumulated = weights.new_zeros(weights.shape[0], vocab).scatter_(-1, tokens, weights).cumsum(-1)
    beyond = uniforms * cumulated[:, -1:] < cumulated
    first = beyond.to(torch.int8).argmax(-1, keepdim=True)  # beyond is False … False True … True
    return torch.where(values[:, :1].isfinite(), torch.where(greedy, tokens[:, :1], first), -1)[:, 0]


def argmax(logits: Tensor) -> Tensor:
    """The lowest id among the highest logits [rows, vocab] -> int64 [rows]; -1 as in `sample`."""
    if logits.is_cuda:
        from rekindle.kernels.sampling import triton

        return triton.argmax(logits)
    if cpu.reads(logits):
        return cpu.argmax(logits)
    values, tokens = logits.max(-1)
    return torch.where(values.isfinite(), tokens, -1)


def _on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


def highest(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` highest logits in descending order with their ids, the lowest id first among equals; a NaN, which a
    GPU would sort by its sign, is infinite."""
    logits = torch.where(logits.isnan(), torch.inf, logits)
    if width > SMALL_TOP_K:
        values, tokens = logits.sort(dim=-1, descending=True, stable=True)
        return values[:, :width], tokens[:, :width]
    # Distinct integers in the order (logit, then lower id): selection cannot depend on how ties happen to be met.
    vocab = logits.shape[1]
    bits = (logits + 0.0).view(torch.int32)  # adding zero makes one zero of two
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() * 2**32
    keys += torch.arange(vocab - 1, -1, -1, device=logits.device)
    if vocab % RUNS == 0 and vocab // RUNS >= 4 * width:
        keys = keys.unflatten(1, (RUNS, -1)).topk(width, dim=-1).values.flatten(1)
    tokens = vocab - 1 - (keys.topk(width, dim=-1).values & 0xFFFFFFFF)
    return logits.gather(-1, tokens), tokens


def _filtered(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """weights [rows, n] descend from 1; what a filter removes becomes 0. The first always stays."""
    ranks = torch.arange(weights.shape[-1], device=weights.device)
    weights = torch.where((top_k > 0) & (ranks >= top_k), 0.0, weights)
    cumulated = weights.cumsum(-1)
    before = cumulated - weights  # a token stays while those before it have not reached top_p of the whole
    weights = torch.where((top_p < 1) & (ranks > 0) & (before >= top_p * cumulated[:, -1:]), 0.0, weights)
    return torch.where((weights < min_p) & (ranks > 0), 0.0, weights)


def penalise(logits: Tensor, penalties: Sequence[Penalty | None]) -> Tensor:
    """New logits [rows, vocab], one penalty or none for each row.

    Repetition divides positive and multiplies negative logits of tokens seen in prompt or answer; presence and
    frequency count the answer alone.
    """
    if logits.is_cuda:
        from rekindle.kernels.sampling import triton

        return triton.penalise(logits, penalties)
    out = logits.clone()
    for row, penalty in zip(out, penalties, strict=True):
        if penalty is not None:
            counts = penalty.counts.clone()
            count_tokens(counts, penalty.drafted)
            seen = counts.nonzero()[:, 0]
            answered, values = counts[seen] & ~IN_PROMPT, row[seen]
            values = torch.where(values > 0, values / penalty.repetition, values * penalty.repetition)
            row[seen] = values - penalty.frequency * answered - penalty.presence * (answered > 0)
    return out


def count_tokens(counts: Tensor, tokens: Sequence[int]) -> None:
    """counts int32 [vocab] += 1 for every one of the tokens."""
    if tokens:
        more = on_device(tokens, counts.device)
        counts.index_add_(0, more, torch.ones_like(more, dtype=torch.int32))


def on_device(tokens: Sequence[int], device: torch.device) -> Tensor:
    """int64 [tokens], without a wait for what the device still does."""
    host = torch.from_numpy(np.array(tokens, dtype=np.int64))  # by torch alone a long prompt takes three times as long
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def count_drawn(drawn: Tensor, counts: Sequence[Tensor | None]) -> None:
    """counts[i][drawn[i]] += 1 where row i counts; -1 is no token."""
    if drawn.is_cuda:
        from rekindle.kernels.sampling import triton

        return triton.count_drawn(drawn, counts)
    for token, row in zip(drawn.tolist(), counts, strict=True):
        if row is not None and token >= 0:
            row[token] += 1
    return None


def add_bias(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> Tensor:
    """New logits with values[i] added at (rows[i], tokens[i])."""
    return logits.index_put((rows, tokens), values, accumulate=True)


def keep_allowed(logits: Tensor, masks: Tensor, rows: Sequence[int], own: bool = False) -> Tensor:
    """New logits, or the same memory if it is the caller's `own`: row rows[i] keeps the tokens whose bits are set in
    masks[i] and has -inf elsewhere; other rows stay.

    masks int32 [n, words] on the host, bit b of word w is the token 32 w + b; a token beyond them is not allowed. A NaN
    stays: no token is drawn from its row.
    """
    if logits.is_cuda:
        from rekindle.kernels.sampling import triton

        return triton.keep_allowed(logits, masks, rows, own)
    vocab = logits.shape[1]
    bits = torch.from_numpy(np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")[:, :vocab])
    most = (bits.float() - 0.5) * torch.inf  # a minimum is vectorised, unlike a choice by booleans
    most = torch.nn.functional.pad(most, (0, vocab - most.shape[1]), value=-torch.inf)
    kept = logits if own else logits.clone()
    for row, ceiling in zip(rows, most, strict=True):
        torch.minimum(logits[row], ceiling, out=kept[row])
    return kept


def log_softmax_at(logits: Tensor, tokens: Tensor, top: int) -> LogProbs:
    """Log-probabilities of the chosen tokens int64 [rows] and of the `top` likeliest."""
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(top, dim=-1)
    return LogProbs(logprobs.gather(-1, tokens[:, None])[:, 0], values, ids)

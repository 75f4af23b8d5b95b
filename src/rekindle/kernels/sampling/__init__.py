"""From logits to tokens: penalties, bias, filters, the draw, log-probabilities."""

from __future__ import annotations

from rekindle.kernels.sampling.naive import (
    IN_PROMPT,
    LogProbs,
    Penalty,
    add_bias,
    argmax,
    count_drawn,
    count_tokens,
    keep_allowed,
    log_softmax_at,
    on_device,
    penalise,
    sample,
)

__all__ = [
    "IN_PROMPT",
    "LogProbs",
    "Penalty",
    "add_bias",
    "argmax",
    "count_drawn",
    "count_tokens",
    "keep_allowed",
    "log_softmax_at",
    "on_device",
    "penalise",
    "sample",
]

"""From logits to tokens: penalties, bias, filters, the draw, log-probabilities."""

from __future__ import annotations

from rekindle.kernels.sampling.naive import (
    LogProbs,
    add_bias,
    apply_penalties,
    argmax,
    count_tokens,
    keep_allowed,
    log_softmax_at,
    sample,
)

__all__ = [
    "LogProbs",
    "add_bias",
    "apply_penalties",
    "argmax",
    "count_tokens",
    "keep_allowed",
    "log_softmax_at",
    "sample",
]

"""Log-probabilities of a prompt's own tokens, found where the logits are: a row of logits is a megabyte.

Of a long chunk all logits at once would be gigabytes that no plan counts. So a few rows at a time pass the head, in the
memory that the layers have just left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from rekindle.batch import Batch
from rekindle.kernels.sampling import log_softmax_at

LEFT_BY_LAYERS = 4  # widths of the residual stream, of every row: layers take more than that beside the stream itself
LOGIT_BYTES = 2 + 4 + 4  # of one value: as computed, in float32, and its log-probability


def score_prompts(batch: Batch, x: Tensor, leave: Callable[[Tensor], Tensor], vocab: int) -> Tensor | None:
    """x [batch.rows, hidden] behind the last layer -> [batch.scored_rows, 1 + 2 · the largest top] float32: that of the
    token behind each row, then of each of the likeliest, with its id (whole numbers up to 2²⁴ are exact)."""
    at_once = max(1, LEFT_BY_LAYERS * x.nbytes // (LOGIT_BYTES * vocab))
    parts = list[Tensor]()
    for start, segment in batch.row_starts():
        for at in range(0, segment.scored_rows, at_once):
            stop = min(segment.scored_rows, at + at_once)
            behind = torch.tensor(segment.tokens[at + 1 : stop + 1], device=x.device)
            parts.append(_score(leave(x[start + at : start + stop]), behind, segment.top))
    return join_scores(parts)


def _score(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    found = log_softmax_at(logits.float(), tokens, top)
    pairs = torch.stack((found.top, found.top_tokens.float()), dim=2)  # [rows, top, 2]
    return torch.cat((found.chosen[:, None], pairs.flatten(1)), dim=1)


def join_scores(parts: Sequence[Tensor]) -> Tensor | None:
    """Below each other, as wide as the widest: who wanted fewer of the likeliest finds nothing behind them."""
    widest = max((part.shape[1] for part in parts), default=0)
    return torch.cat([pad(part, (0, widest - part.shape[1])) for part in parts]) if parts else None

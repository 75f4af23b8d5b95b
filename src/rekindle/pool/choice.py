"""Which pages a sequence attends in sparse mode. Pure functions: the same state chooses the same pages, hit or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rekindle.kernels.attention.rows import from_rows
from rekindle.spec import PAGE

KvMode = Literal["exact", "sparse"]
Policy = Literal["qk", "lru"]

SINK = 1  # pages at the beginning that never leave …
TAIL = 4  # … and sealed pages at the end


def is_kept(page: int, sealed: int) -> bool:
    """Sink or tail of a sequence with so many sealed pages."""
    return page < SINK or page >= sealed - TAIL


def choose(sealed: int, room: int, scores: Sequence[float] | np.ndarray | None) -> tuple[int, ...]:
    """The sealed pages that are attended, ascending: all that fit in `room`, else sink, tail and the best of the rest.

    Without scores the latest are the best.
    """
    if sealed <= room:
        return tuple(range(sealed))
    tail = max(SINK, sealed - TAIL)
    left = max(0, room - SINK - (sealed - tail))
    rest = np.arange(SINK, tail)
    if scores is not None:
        rest = rest[np.argsort(np.asarray(scores)[SINK:tail], kind="stable")]  # of equals the latest are the best
    return (*range(SINK), *np.sort(rest[len(rest) - left :]).tolist(), *range(tail, sealed))


def key_directions(pages: Sequence[Tensor]) -> Tensor:
    """The mean key of one sealed page as a direction, from its [2, PAGE, kv_heads, row] in every layer.

    float16 [layers, kv_heads, dim]. Keys are stored turned by their position, so the mean is of turned keys.
    """
    means = torch.stack([from_rows(page[0]).mean(0) for page in pages])
    return torch.nn.functional.normalize(means, dim=-1).half()


def score_pages(keys: Tensor, query: Tensor) -> Tensor:
    """How well pages answer a query: the best head's cosine, averaged over the layers. float32 [pages].

    keys [pages, layers, kv_heads, dim] directions; query [layers, heads, dim], turned by its position.
    """
    grouped = torch.nn.functional.normalize(query.float(), dim=-1).unflatten(1, (keys.shape[2], -1))
    cosines = torch.einsum("plkd,lkgd->plkg", keys.float(), grouped)
    return cosines.flatten(2).amax(-1).mean(-1)


def deciding_row(position: int, end: int, rewindable: bool) -> int | None:
    """The row of a segment whose query chooses the pages from here on, None where the choice stands.

    The last row of a prefill chunk; in decode and verify the last row of a page. A function of position, so a run
    that was restored chooses where the straight run does.
    """
    if end - position > 1 and not rewindable:
        return end - position - 1
    edge = end // PAGE * PAGE
    return edge - 1 - position if edge > position else None

"""Fetching pages and scoring them, by definition."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from rekindle.kernels.attention.rows import from_rows


def fetch_pages(targets: Tensor, sources: Tensor, nbytes: int) -> None:
    for target, source in zip(targets.flatten().tolist(), sources.flatten().tolist(), strict=True):
        ctypes.memmove(target, source, nbytes)


def fetch_listed(page_addresses: Tensor, moves: Tensor, layer: int, nbytes: int) -> None:
    targets, sources = moves[:, 1 : 1 + int(moves[0, 0])]
    fetch_pages(page_addresses[layer, targets], page_addresses[layer, sources], nbytes)


def key_directions(keys: Tensor) -> Tensor:
    """Summed in halves: the bits of a page do not depend on the pages beside it."""
    sums = _sum_halves(from_rows(keys), 2)
    lengths = _sum_halves(sums.square(), 3).sqrt().clamp_min(1e-12)
    return (sums / lengths.unsqueeze(3)).transpose(0, 1).half()


def _sum_halves(x: Tensor, dim: int) -> Tensor:
    """The sum over a dimension of 2^n."""
    while (size := x.shape[dim]) > 1:
        assert size % 2 == 0, f"{size} values have no two halves"
        x = x.narrow(dim, 0, size // 2) + x.narrow(dim, size // 2, size // 2)
    return x.squeeze(dim)


def score_pages(keys: Tensor, query: Tensor) -> Tensor:
    grouped = torch.nn.functional.normalize(query.float(), dim=-1).unflatten(1, (keys.shape[2], -1))
    cosines = torch.einsum("plkd,lkgd->plkg", keys.float(), grouped)
    return cosines.flatten(2).amax(-1).mean(-1)

"""The definitions."""

from __future__ import annotations

import torch
from torch import Tensor


def store_ring(ring: Tensor, k: Tensor, v: Tensor, slots: Tensor, firsts: Tensor, counts: Tensor) -> None:
    rows, places = len(k) // len(slots), ring.shape[2]
    blocks = zip(slots.tolist(), firsts.tolist(), counts.tolist(), k.split(rows), v.split(rows), strict=True)
    for slot, first, count, its_k, its_v in blocks:
        for row in range(max(0, count - places), count):
            ring[slot, 0, (first + row) % places] = its_k[row].to(ring.dtype)
            ring[slot, 1, (first + row) % places] = its_v[row].to(ring.dtype)


def ring_rows(ring: Tensor, slot: int, start: int, stop: int) -> Tensor:
    """[2, positions, kv_heads, dim], ascending: those of [start, stop) that are still there; a copy."""
    places = ring.shape[2]
    count = min(places, stop - start)
    return ring[slot][:, torch.arange(stop - count, stop, device=ring.device) % max(places, 1)]


def attend_ring(
    query: Tensor, k: Tensor, v: Tensor, ring: Tensor, slots: Tensor, starts: Tensor, stops: Tensor,
    window: int | None, causal: bool,
) -> Tensor:  # fmt: skip
    rows = len(query) // len(slots)
    blocks = zip(slots.tolist(), starts.tolist(), stops.tolist(), strict=True)
    contexts = [ring_rows(ring, slot, start, stop).float() for slot, start, stop in blocks]
    pieces = zip(query.float().split(rows), k.float().split(rows), v.float().split(rows), contexts, strict=True)
    return torch.cat([_attend(*piece, window, causal) for piece in pieces]).to(query.dtype)


def _attend(query: Tensor, k: Tensor, v: Tensor, context: Tensor, window: int | None, causal: bool) -> Tensor:
    """One block."""
    keys, values = torch.cat((context[0], k)), torch.cat((context[1], v))
    grouped = query.unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)  # [kv heads, shared, rows, dim]
    scores = grouped @ keys.permute(1, 2, 0)[:, None] * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~_visible(context.shape[1], len(query), window, causal, k.device), float("-inf"))
    mixed = scores.softmax(dim=-1) @ values.transpose(0, 1)[:, None]
    return mixed.permute(2, 0, 1, 3).flatten(1, 2)


def _visible(count: int, rows: int, window: int | None, causal: bool, device: torch.device) -> Tensor:
    """[rows, count + rows]: which keys each row sees, of the ring and of the block itself."""
    row, key = torch.arange(rows, device=device)[:, None], torch.arange(-count, rows, device=device)[None]
    near = (row - key < window) | (key >= 0) if window is not None else torch.ones_like(row + key) > 0
    return near & ((key <= row) | (key < 0)) if causal else near


def convolve(x: Tensor, base: Tensor, computed: Tensor, side: int, block: int) -> Tensor:
    taps, channels = base.shape[1:]
    both = computed.view(len(x), 2, taps, -1)
    weights = base[side].to(x.dtype) + both[:, side].repeat_interleave(channels // both.shape[-1], dim=-1)
    inside = torch.arange(len(x), device=x.device)[:, None] % block
    out = weights[:, 0] * x
    for back in range(1, min(taps, block)):
        out += torch.where(inside >= back, weights[:, back] * x.roll(back, dims=0), 0)
    return out


def walk(values: Tensor, first: Tensor, steps: Tensor) -> Tensor:
    chosen, every = [(values[:, 0] + first).argmax(dim=-1)], torch.arange(len(values), device=values.device)
    for row in range(1, values.shape[1]):
        chosen.append((values[:, row] + steps[every, row - 1, chosen[-1]]).argmax(dim=-1))
    return torch.stack(chosen, dim=1)

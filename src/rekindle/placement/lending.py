"""One budget for experts, state and KV: what of a stage may be lent to the pool, and what that holds as pages.

Experts have the memory while contexts are short. A conversation that outgrows the pool grows into the coldest of them,
and they come back when it ends; so their weights are in RAM too. The state of a slot is there for the pool until a
sequence comes. So both are counted where they lie, and not in the pool. A pool that was asked for stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from rekindle.placement.mixers import SpanMixers
from rekindle.placement.types import Device, LayerSizes, Wishes, pages_for

USED_SHARE = 0.95  # of a lent slot's bytes that are found again as pages: a page lies in one piece
PLANNED_SHARE = 0.8  # the same where the types of the weights are at their worst: so many slots more are lendable


def may_lend(wishes: Wishes, device: Device) -> bool:
    """Whether stages on the device trade at all. Memory that is RAM gains nothing."""
    return wishes.lends and not device.host


def slot_pages(wishes: Wishes, device: Device, mixers: SpanMixers, pages: int) -> int:
    """That fit into the state of a slot, beside a pool of `pages` pages: wherever the slot begins, so less one page of
    a layer up to the next edge."""
    page, place = mixers.widest_page(wishes.kv_type), mixers.page_bytes(wishes.kv_type)
    if not (wishes.lends_slots and not device.host and page and wishes.sequences > 1 and pages < wishes.full_pages):
        return 0
    return max(0, sum(mixers.slot_bytes().values()) // page - 1) // (place // page)


def lendable_slots(
    wishes: Wishes, layers: Sequence[LayerSizes], hot: Sequence[int], used: int, page_bytes: int, pages: int
) -> tuple[int, ...]:
    """Per layer, so that one sequence at the context limit finds room beside a pool of `pages` pages; the experts that
    one token uses stay."""
    more = min(wishes.full_pages - pages, pages_for(wishes.context))
    most = [max(0, count - used) for count in hot]
    each = sum(layer.expert for layer, limit in zip(layers, most, strict=True) if limit)
    if more <= 0 or not each:
        return (0,) * len(most)
    wanted = ceil(more * page_bytes / (each * PLANNED_SHARE))
    return tuple(min(limit, wanted) for limit in most)


def lent_slots(lendable: Sequence[int], layers: Sequence[LayerSizes], page_bytes: int, pages: int) -> tuple[float, ...]:
    """Slots per layer that are lent when the pool has got `pages` pages more."""
    whole = sum(slots * layer.expert for slots, layer in zip(lendable, layers, strict=True))
    share = min(1.0, pages * page_bytes / USED_SHARE / whole) if whole else 0.0
    return tuple(share * slots for slots in lendable)


def lendable_pages(lendable: Sequence[int], layers: Sequence[LayerSizes], page_bytes: int) -> int:
    """Pages that the pool can get."""
    whole = sum(slots * layer.expert for slots, layer in zip(lendable, layers, strict=True))
    return int(whole * USED_SHARE / page_bytes) if whole else 0

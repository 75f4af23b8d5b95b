"""The statuses of several engines as one. Loads no torch, as `types`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from rekindle.engine.types import EngineStatus

if TYPE_CHECKING:
    from rekindle.prefix import CacheStats

NOT_ADDED = ("pages", "cache", "work", "broken", "degraded", "draining")


def sum_of(each: Sequence[EngineStatus], caches: Sequence[CacheStats] | None = None) -> EngineStatus:
    """Counts are added up; broken, degraded or draining as soon as one is. caches: where engines share one."""
    if len(each) == 1:
        return each[0]
    pages = [status.pages for status in each]
    names = [field.name for field in fields(EngineStatus) if field.name not in NOT_ADDED]
    return EngineStatus(
        **{name: sum(getattr(status, name) for status in each) for name in names},
        pages=type(pages[0])(sum(p.free for p in pages), sum(p.used for p in pages), sum(p.total for p in pages)),
        cache=_together(caches or [status.cache for status in each]),
        work=_added([status.work for status in each]),
        broken="; ".join(status.broken for status in each if status.broken is not None) or None,
        degraded=next((status.degraded for status in each if status.degraded is not None), None),
        draining=any(status.draining for status in each),
    )


def ended(status: EngineStatus) -> EngineStatus:
    """What stays of an engine's status when it has been stopped: its counts."""
    cache = replace(status.cache, entries={}, bytes={}, budgets={}, states={}, saves_waiting=0)
    pages = type(status.pages)(0, 0, 0)
    now = replace(status, running=0, waiting=0, slots=0, cache=cache, pages=pages)
    return replace(now, broken=None, degraded=None, draining=False)


def _added(each: Sequence[Mapping[str, int]]) -> Counter[str]:
    """Zeros stay, which adding counters would drop."""
    counts = Counter[str]()
    for some in each:
        counts.update(some)
    return counts


def _together(caches: Sequence[CacheStats]) -> CacheStats:
    if len(caches) == 1:
        return caches[0]
    names = [field.name for field in fields(caches[0])]
    return type(caches[0])(**{name: _sum([getattr(cache, name) for cache in caches]) for name in names})


def _sum(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _sum([value[key] for value in values if key in value]) for key in keys}
    return sum(values) if isinstance(values[0], int) else ", ".join(dict.fromkeys(map(str, values)))

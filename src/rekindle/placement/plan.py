"""Entry point of the package: `make_plan`."""

from __future__ import annotations

from dataclasses import replace

from rekindle.errors import DoesNotFit
from rekindle.placement.advice import neighbours, reasons
from rekindle.placement.expect import expectations
from rekindle.placement.levels import largest
from rekindle.placement.place import Placer
from rekindle.placement.reserve import least_pages
from rekindle.placement.types import Machine, Plan, Sizes, Wishes, pages_for
from rekindle.spec import PAGE, ModelSpec


def make_plan(machine: Machine, spec: ModelSpec, sizes: Sizes, wishes: Wishes) -> Plan:
    """Where every layer, expert and page goes, why, and what stands next to it; DoesNotFit if it cannot run."""
    placer = _with_pool_that_fits(Placer(machine, spec, sizes, wishes))
    plan = replace(placer.place(), wishes=wishes)
    said, others = reasons(placer, plan), neighbours(placer, plan)
    return replace(plan, reasons=said, alternatives=others, expected=expectations(plan, sizes))


def _with_pool_that_fits(placer: Placer) -> Placer:
    """A pool that was asked for is a bound: where it does not fit, the largest below it that does."""
    wishes = placer.wishes
    if wishes.pool is None or _fits(placer):
        return placer

    def bounded(pages: int) -> Placer:
        return Placer(placer.machine, placer.spec, placer.sizes, replace(wishes, pool=pages * PAGE))

    least, asked = least_pages(wishes), min(wishes.full_pages, pages_for(wishes.pool))
    return bounded(largest(least, asked, lambda pages: _fits(bounded(pages))))


def _fits(placer: Placer) -> bool:
    try:
        placer.place()
    except DoesNotFit:
        return False
    return True

"""Entry point of the package: `make_plan`."""

from __future__ import annotations

from dataclasses import replace

from rekindle.placement.advice import neighbours, reasons
from rekindle.placement.expect import expectations
from rekindle.placement.place import Placer
from rekindle.placement.types import Machine, Plan, Sizes, Wishes
from rekindle.spec import ModelSpec


def make_plan(machine: Machine, spec: ModelSpec, sizes: Sizes, wishes: Wishes) -> Plan:
    """Where every layer, expert and page goes, why, and what stands next to it; DoesNotFit if it cannot run."""
    placer = Placer(machine, spec, sizes, wishes)
    plan = placer.place()
    said, others = reasons(placer, plan), neighbours(placer, plan)
    return replace(plan, reasons=said, alternatives=others, expected=expectations(plan, sizes))

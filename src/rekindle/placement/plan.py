"""The door of the room."""

from __future__ import annotations

from dataclasses import replace

from rekindle.placement.advice import neighbours, reasons
from rekindle.placement.place import Placer
from rekindle.placement.types import Machine, Plan, Sizes, Wishes
from rekindle.spec import ModelSpec


def make_plan(machine: Machine, spec: ModelSpec, sizes: Sizes, wishes: Wishes) -> Plan:
    """Where every layer, expert and page goes, why, and what stands next to it; DoesNotFit if it cannot run."""
    placer = Placer(machine, spec, sizes, wishes)
    plan = placer.place()
    return replace(plan, reasons=reasons(placer, plan), alternatives=neighbours(placer, plan))

"""Machine + model + wishes -> plan. Pure arithmetic: no torch, no device calls."""

from __future__ import annotations

from rekindle.placement.advice import alternatives, way_out
from rekindle.placement.cards import card_named
from rekindle.placement.place import moved_bytes
from rekindle.placement.plan import make_plan
from rekindle.placement.reserve import expanded_values
from rekindle.placement.shapes import known_shapes, shape_named
from rekindle.placement.show import plan_as_json, show_plan
from rekindle.placement.sizes import sizes_from_tensors
from rekindle.placement.split import parse_split, split_layers
from rekindle.placement.types import (
    Alternative,
    Device,
    Item,
    LayerSizes,
    Machine,
    Plan,
    Rates,
    Sizes,
    StagePlan,
    Wishes,
    pages_for,
)

__all__ = [
    "Alternative",
    "Device",
    "Item",
    "LayerSizes",
    "Machine",
    "Plan",
    "Rates",
    "Sizes",
    "StagePlan",
    "Wishes",
    "alternatives",
    "card_named",
    "expanded_values",
    "known_shapes",
    "make_plan",
    "moved_bytes",
    "pages_for",
    "parse_split",
    "plan_as_json",
    "shape_named",
    "show_plan",
    "sizes_from_tensors",
    "split_layers",
    "way_out",
]

"""Stages whose slots lend their memory to pages, on a CPU."""

from __future__ import annotations

from typing import Any

import torch

from rekindle.experts import CostModel, RoutingCounts, SpanExperts
from rekindle.kernels.device_memory import DeviceMemory, PagePlaces
from rekindle.layers import load_span
from rekindle.layers.base import page_shapes
from rekindle.layers.slot_memory import state_slots
from rekindle.spec import Span
from rekindle.stages import LocalStage
from rekindle.stages.idle_slots import IdleSlots

CPU = torch.device("cpu")
# Of a tiny model: the state of a slot has room for three pages then.
WIDE: dict[str, Any] = dict(linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=32)


def lending_stage(
    tiny: Any, span: Span | None = None, slots: int = 3, places: int = 8, host_pages: int = 30, lendable: int = 0,
    **options: Any,
) -> LocalStage:  # fmt: skip
    """lendable: of six hot experts of every layer, those whose slots can be lent, too."""
    file = tiny.open()
    span = span or file.spec.whole
    shapes = page_shapes(file.spec, span, "f32")
    page_bytes = next(iter(shapes.values())).page_bytes
    pages, states = PagePlaces(page_bytes, len(shapes), places + 1), state_slots(file.spec, span, slots)
    memory = DeviceMemory(pages, (1 << 24) if lendable else 0, CPU, states)
    experts = None
    if lendable:
        layers, counts = len(span), RoutingCounts(file.spec.layers, file.spec.ffn.experts)
        hot, lent = [list(range(6))] * layers, [lendable] * layers
        experts = SpanExperts(hot, [2] * layers, counts, CostModel.same_memory(), lendable=lent, memory=memory)
    model = load_span(file, span, CPU, torch.float32, experts=experts)
    return LocalStage(model, slots, places, "f32", host_pages, memory=memory, **options)


def idle_of(stage: LocalStage) -> IdleSlots:
    assert stage._idle is not None, "the stage lends its slots"
    return stage._idle


def state_of(stage: LocalStage, slot: int) -> list[torch.Tensor]:
    return [tensor for state in stage._state.layers.values() for tensor in state.cleared(slot)]


def poisoned(stage: LocalStage) -> LocalStage:
    """Whoever gets memory finds no number in it."""
    idle = idle_of(stage)
    lend, take_back = idle.lend, idle.take_back

    def lend_poisoned(slot: int) -> None:
        if slot not in idle:
            for layer in stage.pool.kv:
                layer[list(idle._places[slot])] = torch.nan
        lend(slot)

    def take_back_poisoned(slot: int) -> None:
        lent = slot in idle
        take_back(slot)
        if lent:
            for tensor in state_of(stage, slot):
                tensor.fill_(torch.nan)

    idle.lend, idle.take_back = lend_poisoned, take_back_poisoned  # type: ignore[method-assign]
    return stage

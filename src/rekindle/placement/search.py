"""Which layers go to which device, where the wishes name no split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rekindle.errors import BadConfig
from rekindle.placement.levels import Level, Levels
from rekindle.placement.reserve import expert_layers
from rekindle.placement.split import best_spans, can_tile, spans_from_wish
from rekindle.placement.stage import StageCandidate, StagePlanner
from rekindle.placement.types import pages_for
from rekindle.spec import Span


class SplitSearch:
    """Looks for the split that holds the highest level; of equals the fastest."""

    def __init__(self, planner: StagePlanner) -> None:
        self._planner = planner
        self._devices, self._layers = planner.machine.devices, planner.spec.layers

    def spans(self) -> tuple[Span, ...]:
        """As the wishes say, or the best ones."""
        devices, split = len(self._devices), self._planner.wishes.split
        if devices > self._layers:
            raise BadConfig(f"{devices} devices cannot share {self._layers} layers, each needs at least one")
        if devices == 1 and split is None:
            return (self._planner.spec.whole,)
        if split is not None:
            return spans_from_wish(split, devices, self._layers)
        return self._highest_spans()

    def cheapest(self, cost: Callable[[int, Span], tuple[int, int]]) -> tuple[Span, ...]:
        return best_spans(self._layers, [device.speed for device in self._devices], cost)

    def with_shares(self, stages: list[StageCandidate]) -> list[StageCandidate]:
        """Their shares of the highest level that all of them hold; as they are if there is none."""
        spans = [stage.span for stage in stages]
        level = self._levels().highest(lambda level: all(self._holds(i, span, level) for i, span in enumerate(spans)))
        if level is None:
            return stages
        return [
            # in RAM, which others need too, pages are shared out later
            stage if stage.device.host else replace(stage, share=level.share_of(stage.span))
            for stage in stages
        ]

    def _highest_spans(self) -> tuple[Span, ...]:
        devices = len(self._devices)

        def tiles(level: Level) -> bool:
            return can_tile(self._layers, devices, lambda index, span: self._holds(index, span, level))

        level = self._levels().highest(tiles)
        if level is None:
            return self.cheapest(lambda index, span: (self._planner.missing(index, span), 0))
        return self.cheapest(lambda index, span: (not self._holds(index, span, level), 0))

    def _levels(self) -> Levels:
        """What a split is chosen for; speed decides between splits that hold the same.

        On GPUs alone: every expert, and pages for one sequence at the context limit, or for all sequences if they fit.
        With a CPU or a device in RAM: pages up to the target only, since more of them would move layers to the CPU.
        """
        planner = self._planner
        routed = expert_layers(planner.sizes, planner.spec.whole)
        candidates = planner.candidates(routed, planner.page_bytes)
        if any(device.is_cpu or device.host for device in self._devices):
            candidates = replace(candidates, most=candidates.target, full=candidates.target)
        else:
            one_sequence = max(candidates.target, pages_for(planner.wishes.context))
            candidates = replace(candidates, most=min(candidates.most, one_sequence))
        return Levels(candidates, self._layers)

    def _holds(self, index: int, span: Span, level: Level) -> bool:
        """Whether a device has room for its layers' part of everything up to the level."""
        space = self._planner.space(index, span)
        experts = 0 if self._devices[index].is_cpu else level.cost(span)
        needed = experts + level.pages * space.page_bytes + (0 if level.whole else space.staging)
        return space.room >= max(needed, space.least)

"""A routed layer: which experts a row takes, and where their weights are."""

from rekindle.experts.cost import CostModel
from rekindle.experts.counts import ROUND, CountsFile, RoutingCounts
from rekindle.experts.expert_set import ExpertSet, Way
from rekindle.experts.lending import Unit, units_of
from rekindle.experts.routed import RoutedFfn, SpanExperts, kept_slots, load_routed_ffn

__all__ = [
    "ROUND",
    "CostModel",
    "CountsFile",
    "ExpertSet",
    "RoutedFfn",
    "RoutingCounts",
    "SpanExperts",
    "Unit",
    "Way",
    "kept_slots",
    "load_routed_ffn",
    "units_of",
]

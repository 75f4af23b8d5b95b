"""A routed layer: which experts a row takes, and where their weights are."""

from rekindle.experts.routed import RoutedFfn, load_routed_ffn

__all__ = ["RoutedFfn", "load_routed_ffn"]

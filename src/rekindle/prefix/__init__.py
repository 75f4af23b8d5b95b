"""The longest published prefix of a prompt; tiers; what to keep, what to evict."""

from __future__ import annotations

from rekindle.prefix.cache import CacheStats, PrefixCache
from rekindle.prefix.held import HeldStates
from rekindle.prefix.index import PrefixIndex
from rekindle.prefix.local import local_tiers
from rekindle.prefix.retention import check_budgets
from rekindle.prefix.tier import Tier
from rekindle.prefix.types import Entry, Hit, Lookup, Miss

__all__ = [
    "CacheStats",
    "Entry",
    "HeldStates",
    "Hit",
    "Lookup",
    "Miss",
    "PrefixCache",
    "PrefixIndex",
    "Tier",
    "check_budgets",
    "local_tiers",
]

"""At most N pages of KV; positions ↔ pages."""

from rekindle.pool.pages import PagePool, PageTable, PoolFull

__all__ = ["PagePool", "PageTable", "PoolFull"]

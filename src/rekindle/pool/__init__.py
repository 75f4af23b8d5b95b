"""At most N pages of KV on the device; positions ↔ pages; paging to host; page scores."""

from rekindle.pool.choice import KvMode, Policy
from rekindle.pool.pages import HeldPage, PagePool, PageTable, PagingCounts, PoolFull, host_copies
from rekindle.pool.reader import PoolReader

__all__ = [
    "HeldPage",
    "KvMode",
    "PagePool",
    "PageTable",
    "PagingCounts",
    "Policy",
    "PoolFull",
    "PoolReader",
    "host_copies",
]

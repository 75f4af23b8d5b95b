"""At most N pages of KV on the device; positions ↔ pages; paging to host; page scores."""

from rekindle.pool.choice import KvMode, Policy
from rekindle.pool.copies import STOCK
from rekindle.pool.pages import HeldPage, PagePool, PageTable, PagingCounts
from rekindle.pool.reader import PoolReader, Seat
from rekindle.pool.returns import Recorder

__all__ = [
    "STOCK",
    "HeldPage",
    "KvMode",
    "PagePool",
    "PageTable",
    "PagingCounts",
    "Policy",
    "PoolReader",
    "Recorder",
    "Seat",
]

"""At most N pages of KV on the device; positions ↔ pages; paging to host; page scores."""

from rekindle.pool.choice import KvMode, Policy
from rekindle.pool.page_ins import Recorder
from rekindle.pool.page_table import HeldPage, PageTable
from rekindle.pool.pages import PagePool, PagingCounts
from rekindle.pool.reader import PoolReader
from rekindle.pool.ready import Together
from rekindle.pool.segments import SegmentPages

__all__ = [
    "HeldPage",
    "KvMode",
    "PagePool",
    "PageTable",
    "PagingCounts",
    "Policy",
    "PoolReader",
    "Recorder",
    "SegmentPages",
    "Together",
]

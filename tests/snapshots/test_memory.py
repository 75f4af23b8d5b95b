from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.paper_snapshots import PaperModel

from rekindle.snapshots.memory import MemoryStore
from rekindle.snapshots.types import Page, Snapshot


def bytes_of(snapshots: list[Snapshot]) -> int:
    """The definition: own bytes, and every page that anyone holds once."""
    pages = {page for s in snapshots for part in s.parts for page in part.pages}
    return sum(s.own_bytes for s in snapshots) + sum(page.nbytes for page in pages)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 200)), max_size=12), st.booleans())
def test_each_page_is_counted_once_whatever_comes_and_goes(steps: list[tuple[bool, int]], share: bool) -> None:
    model = PaperModel(share=share)
    store, held = MemoryStore(budget=0), []
    for add, n in steps:
        if add or not held:
            held.append(model.snapshot(list(range(n))))
            store.add(held[-1])
        else:
            store.remove(held.pop(n % len(held)))
        assert store.bytes == bytes_of(held)
        assert len(store) == len(held)


def test_pages_of_a_run_are_what_a_tensor_of_their_own_would_be() -> None:
    run = torch.randn(5, 2, 3, 1, 4).to(torch.bfloat16)[1:]
    pages = Page.all_of(run, None)
    assert len(pages) == len(set(pages)) == 4
    for page, row in zip(pages, run, strict=True):
        alone = Page(row)
        assert torch.equal(page.data, row)
        assert (page.address, page.nbytes, page.pinned) == (alone.address, alone.nbytes, False)
        assert page.data.data_ptr() == page.address == row.data_ptr()

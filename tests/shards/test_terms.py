"""What a head planned with, a shard has: else the handshake names both numbers."""

from __future__ import annotations

from rekindle.shards.frames import Hello
from rekindle.shards.terms import Terms, disagreements
from rekindle.spec import Span

SHARD = Terms("m", Span(2, 4), "float32", "f32", slots=16, pages=40, rewind_rows=16)


def hello(slots: int = 16, pages: int = 40, rewind_rows: int = 16) -> Hello:
    return Hello("cpu", "m", 2, 4, "float32", "f32", slots, pages=pages, rewind_rows=rewind_rows)


def test_a_shard_with_more_than_the_head_planned_is_welcome() -> None:
    assert disagreements(SHARD, hello()) == []
    assert disagreements(SHARD, hello(1, 1, 0)) == []


def test_fewer_slots_pages_or_rows_of_a_block_are_refused_with_both_numbers() -> None:
    assert disagreements(SHARD, hello(17, 2048, 17)) == [
        "slots: shard has 16, head needs 17",
        "pages (--pages and --host-pages together): shard has 40, head needs 2048",
        "rows of a block (--rewind-rows): shard has 16, head needs 17",
    ]

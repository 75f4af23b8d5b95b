"""Sizes as people write them."""

from __future__ import annotations

import pytest

from rekindle.config import parse_bytes
from rekindle.errors import BadConfig


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 << 30), ("1.5G", 3 << 29), ("512MB", 512_000_000), ("4096B", 4096), ("0", 0)]
)
def test_a_size_is_a_number_and_a_unit(text: str, size: int) -> None:
    assert parse_bytes(text, "--vram") == size


def test_a_number_without_a_unit_is_not_taken_for_bytes() -> None:
    with pytest.raises(BadConfig, match="--vram: '24' has no unit; write 24GiB, 24MiB or 24B"):
        parse_bytes("24", "--vram")

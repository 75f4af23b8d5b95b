"""Bytes for people."""

from __future__ import annotations


def gib(size: int) -> str:
    """'1.25 GiB', '12.0 MiB', '3.0 KiB', '12 bytes'."""
    if abs(size) >= 1 << 30:
        return f"{size / (1 << 30):.2f} GiB"
    if abs(size) >= 1 << 20:
        return f"{size / (1 << 20):.1f} MiB"
    return f"{size / 1024:.1f} KiB" if abs(size) >= 1 << 10 else plural(size, "byte")


def at_least(size: int) -> str:
    """As `gib`, never less than the size: what is read back as a budget is enough."""
    unit, name, digits = (1 << 30, "GiB", 100) if size >= 1 << 30 else (1 << 20, "MiB", 10)
    return f"{-(-size * digits // unit) / digits:.{len(str(digits)) - 1}f} {name}"


def plural(count: int, noun: str) -> str:
    """'1 expert', '2,048 experts'."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"

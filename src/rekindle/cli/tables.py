"""Tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

BEYOND = 10_000  # columns, more than any table needs


def show_table(table: Table) -> None:
    """As wide as it has to be: rich would cut figures to fit a narrow terminal, or 80 columns of a file. A terminal
    that is too narrow wraps the lines."""
    console = Console()
    needed = console.measure(table, options=console.options.update(max_width=BEYOND)).maximum
    console.width = max(console.width, needed)
    console.print(table)

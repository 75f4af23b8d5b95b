"""`rekindle inspect`: what is in a model file."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rekindle.build import embedded_model
from rekindle.cli import options
from rekindle.cli.tables import show_table
from rekindle.config import show_bytes
from rekindle.weights import open_weights
from rekindle.weights.describe import describe


def inspect(model: options.ModelPath = None) -> None:
    """Show architecture, layers by kind, sizes and quantisations; reads the header only."""
    found = describe(open_weights(model or embedded_model()))
    out = Console(highlight=False, markup=False)
    layers = ", ".join(f"{count} {kind}" for kind, count in found.layers.items())
    experts = f"; {found.experts} experts per layer, {found.experts_used} used" if found.experts else ""
    nextn = f"; {found.nextn} next-token-prediction (MTP) block{'s' if found.nextn > 1 else ''}" if found.nextn else ""
    out.print(found.name, style="bold")
    out.print(f"{found.architecture}, {found.parameters / 1e6:,.1f} M parameters, {show_bytes(found.nbytes)}")
    out.print(f"layers: {layers}{experts}{nextn}")
    out.print(f"context {found.context:,}, vocabulary {found.vocab:,}")
    for title, sizes in (("quantisation", found.bytes_by_type), ("part", found.bytes_by_part)):
        table = Table(title, "bytes", "share", box=None, pad_edge=False, header_style="bold")
        for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
            table.add_row(Text(name), show_bytes(size), f"{size / found.nbytes:.1%}")
        out.print()
        show_table(table)

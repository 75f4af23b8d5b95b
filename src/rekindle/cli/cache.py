"""`rekindle cache`: look at, check and move the snapshots in a cache folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rekindle.config import parse_bytes, show_bytes
from rekindle.errors import BadConfig
from rekindle.snapshots.about import told
from rekindle.snapshots.tools import (
    SnapshotInfo,
    export_chain,
    import_chain,
    list_snapshots,
    prune_snapshots,
    show_snapshot,
    verify_snapshots,
)

app = typer.Typer(help="Snapshots on disk: list, show, verify, prune, export, import.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="The folder given to `rekindle serve --cache-dir`.")]
Id = Annotated[str, typer.Argument(help="A snapshot's id, or the beginning of it.")]
WHICH = "name the one that was given to `rekindle serve --cache-dir`"
SHOWN = 10  # characters of an id in a list
LISTED = 20  # snapshots of one model and its settings, unless all are asked for
ITEMS = 4  # of a list in a manifest, unless all are asked for

All = Annotated[bool, typer.Option("--all", help="Nothing left out.")]


@app.command("list")
def list_command(
    folder: Folder,
    whole: All = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs; all of them.")] = False,
) -> None:
    """The snapshots, the most recently used first. A server may be using the folder."""
    found = list_snapshots(_existing(folder))
    if as_json:
        print(json.dumps([{name: getattr(info, name) for name in SnapshotInfo.__slots__} for info in found]))
        return
    if not found:
        print(f"no snapshots in {folder}; {WHICH}")
        return
    out = Console()
    for fingerprint in dict.fromkeys(info.fingerprint for info in found):
        alike = [info for info in found if info.fingerprint == fingerprint]
        about = told(alike[0].about) or f"{fingerprint[:SHOWN]}, of which nothing says what model and settings it was"
        out.print(f"{about}:", highlight=False, markup=False)
        out.print(_table(alike if whole else alike[:LISTED]))
        if len(alike) > LISTED and not whole:
            out.print(f"and {len(alike) - LISTED:,} that were used before these; --all lists them", highlight=False)
    own = show_bytes(sum(info.own_bytes for info in found))
    print(f"{len(found)} snapshots, {own} beside the pages that they share")


def _table(alike: list[SnapshotInfo]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("id", "tokens", "kind", "conversation", "used", "own", "with pages"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("id", "kind", "conversation") else "right")
    for info in alike:
        table.add_row(
            info.id[:SHOWN],
            f"{info.position:,}",
            info.kind,
            (info.conversation or "")[:SHOWN],
            _ago(time.time() - info.used),
            show_bytes(info.own_bytes),
            show_bytes(info.total_bytes),
        )
    return table


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return "just now"


@app.command("show")
def show_command(folder: Folder, id: Id, whole: All = False) -> None:
    """The manifest of one snapshot, as JSON; of its long lists the beginning."""
    manifest = show_snapshot(_existing(folder), id)
    print(json.dumps(manifest if whole else {name: _beginning(value) for name, value in manifest.items()}, indent=2))


def _beginning(value: object) -> object:
    if not isinstance(value, list) or len(value) <= ITEMS:
        return value
    return [*value[:ITEMS], f"and {len(value) - ITEMS:,} more; --all shows them"]


@app.command("verify")
def verify_command(folder: Folder) -> None:
    """Read every byte and compare it with its checksum; fails if one is not as it was written."""
    findings = verify_snapshots(_existing(folder))
    faulty = [finding for finding in findings if finding.fault is not None]
    for finding in faulty:
        print(f"{finding.id[:SHOWN]}  {finding.fault}")
    print(f"{len(findings)} snapshots, {len(faulty)} faulty")
    if faulty:
        raise typer.Exit(1)


@app.command("prune")
def prune_command(folder: Folder, size: Annotated[str, typer.Option(help="What may be left, such as 4GiB.")]) -> None:
    """Remove the snapshots that were not used for longest, until no more than SIZE is left."""
    pruned = prune_snapshots(_existing(folder), parse_bytes(size, "--size"))
    print(f"{len(pruned.removed)} snapshots removed, {show_bytes(pruned.freed)} freed, {show_bytes(pruned.left)} left")


@app.command("export")
def export_command(folder: Folder, id: Id, target: Annotated[Path, typer.Argument(help="The tar file.")]) -> None:
    """Write a snapshot and all shorter ones on its way into one file, to be imported elsewhere."""
    ids = export_chain(_existing(folder), id, target)
    print(f"{len(ids)} snapshots in {target}, {show_bytes(target.stat().st_size)}")


@app.command("import")
def import_command(folder: Folder, source: Annotated[Path, typer.Argument(help="A tar file of `export`.")]) -> None:
    """Take in an exported file; every checksum is verified first."""
    if not source.is_file():
        raise BadConfig(f"there is no file {source}")
    ids = import_chain(folder, source)
    print(f"{len(ids)} snapshots taken in")


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise BadConfig(f"there is no folder {folder}; {WHICH}")
    return folder

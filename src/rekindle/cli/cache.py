"""`rekindle cache`: look at, check and move the snapshots in a cache folder."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rekindle.cli.tables import show_table
from rekindle.config import parse_bytes, printable, show_bytes, snapshot_folder
from rekindle.errors import BadConfig
from rekindle.snapshots import folder as folders
from rekindle.snapshots.about import in_words
from rekindle.snapshots.folder import held_bytes
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

Folder = Annotated[
    Path | None,
    typer.Option("--cache-dir", help="The folder given to `rekindle serve --cache-dir`; your own if left out there."),
]
Id = Annotated[str, typer.Argument(help="A snapshot's id, or the beginning of it.")]
WHICH = "nothing was saved there yet, or --cache-dir has to name the one that `rekindle serve` was given"
SHOWN = 10  # characters of an id in a list
LISTED = 20  # snapshots of one model and its settings, unless all are asked for


@app.command("list")
def list_command(
    folder: Folder = None,
    whole: Annotated[
        bool, typer.Option("--all", help=f"Also those that were used before the latest {LISTED} of a model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs; all of them.")] = False,
) -> None:
    """The snapshots, the most recently used first. A server may be using the folder."""
    place = _existing(folder)
    found = list_snapshots(place)
    if as_json:
        print(json.dumps([{name: getattr(info, name) for name in SnapshotInfo.__slots__} for info in found]))
        return
    if not found:
        print(
            f"{place} has no snapshots: none was saved there yet, or `rekindle serve --cache-dir` names another folder"
        )
        return
    out = Console()
    models = dict.fromkeys(info.fingerprint for info in found)
    for fingerprint in models:
        alike = [info for info in found if info.fingerprint == fingerprint]
        about = (
            in_words(alike[0].about) or f"{fingerprint[:SHOWN]}, of which nothing says what model and settings it was"
        )
        out.print(f"{printable(about)}:", highlight=False, markup=False)
        show_table(_table(alike if whole else alike[:LISTED]))
        if len(alike) > LISTED and not whole:
            out.print(f"and {len(alike) - LISTED:,} that were used before these; --all lists them", highlight=False)
        if len(models) > 1:
            print(_size(alike, held_bytes(place, fingerprint)))
    print(("in all " if len(models) > 1 else "") + _size(found, sum(held_bytes(place, each) for each in models)))


def _size(some: Sequence[SnapshotInfo], held: int) -> str:
    own = show_bytes(sum(info.own_bytes for info in some))
    return f"{len(some)} snapshots, {show_bytes(held)} on disk: {own} of their own, and shared pages"


def _table(alike: list[SnapshotInfo]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    owned = any(info.namespace for info in alike)
    for name in (
        "id",
        "tokens",
        "kind",
        *(["name space"] if owned else []),
        "conversation",
        "used",
        "own",
        "with pages",
    ):
        words = name in ("id", "kind", "name space", "conversation")
        table.add_column(name, no_wrap=True, justify="left" if words else "right")
    for info in alike:
        table.add_row(
            _cell(info.id[:SHOWN]),
            f"{info.position:,}",
            _cell(info.kind),
            *([_cell(info.namespace)] if owned else []),
            _cell((info.conversation or "")[:SHOWN]),
            _ago(time.time() - info.used),
            show_bytes(info.own_bytes),
            show_bytes(info.total_bytes),
        )
    return table


def _cell(text: str) -> Text:
    """Text from a manifest, which a foreign file may hold."""
    return Text(printable(text))


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return "just now"


@app.command("show")
def show_command(
    id: Id,
    folder: Folder = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The manifest as it is on disk: every tensor, page, chunk and token id.")
    ] = False,
) -> None:
    """What one snapshot consists of: the state of its layers by kind, its pages, how it was computed."""
    manifest = show_snapshot(_existing(folder), id)
    if as_json:
        print(json.dumps(manifest, indent=2))
        return
    for name, value in _summary(manifest):
        print(f"{name:<14}{printable(str(value))}")
    print("--json shows the whole manifest")


def _summary(manifest: dict[str, Any]) -> Iterator[tuple[str, object]]:
    yield from ((name, manifest[name]) for name in ("id", "fingerprint", "kind", "conversation"))
    yield "name space", manifest.get("namespace", "the common one")
    yield "saved", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest["saved"]))
    yield "tokens", f"{manifest['position']:,} ({_computed(manifest['stretches'])}; grid {manifest['grid']})"
    yield "pages", f"{len(manifest['pages']):,}; in one {' and '.join(map(_tensors, _alike(manifest['page_rows'])))}"
    yield "tail", f"{len(manifest['tail_tokens'])} tokens past the last page"
    yield "own", f"{show_bytes(manifest['own_bytes'])} in {manifest['own']}:"
    for alike in _alike(manifest["parts"]):
        size = show_bytes(sum(part["bytes"] for part in alike))
        yield f"  {alike[0]['name']}", f"{_tensors(alike)}, {size}"


def _computed(stretches: list[dict[str, Any]]) -> str:
    """Tokens by the way they were computed; a stretch begins where the one before it stops."""
    tokens: Counter[str] = Counter()
    for before, stretch in zip([0, *(it["stop"] for it in stretches)], stretches, strict=False):
        tokens[stretch["how"]] += stretch["stop"] - before
    return ", ".join(f"{how} {count:,}" for how, count in tokens.items())


def _alike(parts: list[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    """Tensors of one kind, type and shape together: those of most layers."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        groups.setdefault(f"{part.get('name')} {part['dtype']} {part['shape']}", []).append(part)
    return groups.values()


def _tensors(alike: list[dict[str, Any]]) -> str:
    first = alike[0]
    tensor = f"{first['dtype']} [{', '.join(map(str, first['shape']))}]"
    return tensor if first["layer"] is None else f"{tensor} of {len(alike)} layers"


@app.command("verify")
def verify_command(folder: Folder = None) -> None:
    """Read every byte and compare it with its checksum; fails if one is not as it was written."""
    findings = verify_snapshots(_existing(folder))
    faulty = [finding for finding in findings if finding.fault is not None]
    for finding in faulty:
        print(printable(f"{finding.id[:SHOWN]}  {finding.fault}"))
    print(f"{len(findings)} snapshots, {len(faulty)} faulty")
    if faulty:
        raise typer.Exit(1)


@app.command("prune")
def prune_command(
    size: Annotated[str, typer.Option(help="What may be left, such as 4GiB.")], folder: Folder = None
) -> None:
    """Remove the snapshots that were not used for longest, until no more than SIZE is left."""
    budget = parse_bytes(size, "--size")
    with _unwarned():
        pruned = prune_snapshots(_existing(folder), budget)
    print(f"{len(pruned.removed)} snapshots removed, {show_bytes(pruned.freed)} freed, {show_bytes(pruned.left)} left")
    for used in pruned.in_use:
        print(f"a server is using {used}, or it may not be written: what is there stays")
    if pruned.left > budget:
        raise typer.Exit(1)


@app.command("export")
def export_command(
    id: Id, target: Annotated[Path, typer.Argument(help="The tar file.")], folder: Folder = None
) -> None:
    """Write a snapshot and all shorter ones on its way into one file, to be imported elsewhere."""
    ids = export_chain(_existing(folder), id, target)
    print(f"{len(ids)} snapshots in {target}, {show_bytes(target.stat().st_size)}")


@app.command("import")
def import_command(
    source: Annotated[Path, typer.Argument(help="A tar file of `export`.")], folder: Folder = None
) -> None:
    """Take in an exported file; every checksum is verified first."""
    if not source.is_file():
        raise BadConfig(f"there is no file {source}")
    ids = import_chain(_named(folder), source)
    print(f"{len(ids)} snapshots taken in")


@contextmanager
def _unwarned() -> Iterator[None]:
    """Of a folder that another writes to a store says that it saves nothing, which is for servers."""
    log = logging.getLogger(folders.__name__)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _named(folder: Path | None) -> Path:
    """The one that is named, or where a server keeps snapshots that was told no folder."""
    place = folder or snapshot_folder()
    if place is None:
        raise BadConfig(f"you have no home, and so no folder of your own; {WHICH}")
    return place


def _existing(folder: Path | None) -> Path:
    place = _named(folder)
    if not place.is_dir():
        raise BadConfig(f"there is no folder {place}; {WHICH}")
    return place

"""A snapshot as bytes and back. The layout is canonical: layers ascend, whatever the split they came from.

page object   [PAGE token ids, int32][first attention layer: K, V][second: K, V] …
own object    [tails, queries of sparse runs][recurrent states and windows][logits][drafter], each on an ALIGNMENT edge
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from rekindle.errors import BadSnapshotFile
from rekindle.snapshots.files import Bytes, raw
from rekindle.snapshots.manifest import ALIGNMENT, DTYPES, Manifest, PageRow, PartRow, stretches_of
from rekindle.snapshots.slabs import Piece
from rekindle.snapshots.types import DeltaPart, KvPart, Page, Part, Snapshot
from rekindle.spec import PAGE

Pages = tuple[Page, ...]  # the pages of all attention layers at one page position, layers ascending


@dataclass(frozen=True, slots=True)
class OwnObject:
    rows: tuple[PartRow, ...]
    pieces: tuple[Bytes, ...]
    nbytes: int


def kv_parts(snapshot: Snapshot) -> list[KvPart]:
    return [part for part in snapshot.parts if isinstance(part, KvPart)]


def page_rows(snapshot: Snapshot) -> tuple[PageRow, ...]:
    """How a page object of this model is divided; read off the tail, which even a snapshot without pages has."""
    return tuple(
        PageRow(part.layer, _dtype_name(part.tail), (2, PAGE, *part.tail.shape[2:])) for part in kv_parts(snapshot)
    )


def page_columns(snapshot: Snapshot) -> list[Pages]:
    """Sealed pages by page position instead of by layer; a model without attention has empty columns."""
    parts = kv_parts(snapshot)
    count = snapshot.position // PAGE
    assert all(len(part.pages) == count for part in parts), "a part keeps a full page open in its tail"
    return [tuple(part.pages[i] for part in parts) for i in range(count)]


def page_pieces(tokens: np.ndarray, pages: Pages, rows: Sequence[PageRow]) -> list[Bytes]:
    tensors = [page.data for page in pages]
    for tensor, row in zip(tensors, rows, strict=True):
        same = tuple(tensor.shape) == row.shape and _dtype_name(tensor) == row.dtype
        assert same, f"layer {row.layer}: a sealed page and the tail differ in shape or dtype"
    return [np.ascontiguousarray(tokens).view(np.uint8), *map(raw, tensors)]


def own_object(snapshot: Snapshot) -> OwnObject:
    rows: list[PartRow] = []
    pieces: list[Bytes] = []
    end = 0
    for name, layer, tensor in _own_tensors(snapshot):
        padding = -end % ALIGNMENT
        start = end + padding
        rows.append(PartRow(name, layer, _dtype_name(tensor), tuple(tensor.shape), start, tensor.nbytes))
        pieces += [np.zeros(padding, dtype=np.uint8), raw(tensor)]
        end = start + tensor.nbytes
    return OwnObject(tuple(rows), tuple(pieces), end)


def _own_tensors(snapshot: Snapshot) -> list[tuple[str, int | None, torch.Tensor]]:
    tensors: list[tuple[str, int | None, torch.Tensor]] = []
    for part in snapshot.parts:
        if isinstance(part, KvPart):
            tensors.append(("tail", part.layer, part.tail))
            if part.query is not None:
                tensors.append(("query", part.layer, part.query))
        else:
            tensors += [("state", part.layer, part.state), ("window", part.layer, part.window)]
    if snapshot.logits is not None:
        tensors.append(("logits", None, snapshot.logits))
    tensors += [("drafter", None, tensor) for tensor in snapshot.drafter]
    return tensors


def read_pages(manifest: Manifest, bodies: Sequence[Piece]) -> list[Pages]:
    """The layers of page objects, as views of what stands behind the token ids; layers that are alike are cut at
    once."""
    cuts = list[tuple[int, int, str, tuple[int, ...]]]()
    start = 0
    for (dtype, shape), alike in groupby(manifest.page_rows, key=lambda row: (row.dtype, row.shape)):
        sizes = [row.nbytes for row in alike]
        cuts.append((start, sum(sizes), dtype, (len(sizes), *shape)))
        start += sum(sizes)
    columns = list[Pages]()
    for piece in bodies:
        content = torch.from_numpy(piece.memory)
        columns.append(tuple(page for cut in cuts for page in Page.all_of(_view(content, *cut), piece.slab)))
    return columns


def read_snapshot(manifest: Manifest, tokens: np.ndarray, columns: Sequence[Pages], own: torch.Tensor) -> Snapshot:
    """Put the pieces together; every tensor is a view."""
    tensors: dict[tuple[str, int | None], list[torch.Tensor]] = {}
    for row in manifest.parts:
        view = _view(own, row.offset, row.bytes, row.dtype, row.shape)
        tensors.setdefault((row.name, row.layer), []).append(view)
    attention = {row.layer: i for i, row in enumerate(manifest.page_rows)}
    parts: list[Part] = []
    for layer in sorted({row.layer for row in manifest.parts if row.layer is not None}):
        if layer in attention:
            pages = tuple(column[attention[layer]] for column in columns)
            query = _one(manifest, tensors, "query", layer) if ("query", layer) in tensors else None
            parts.append(KvPart(layer, pages, _one(manifest, tensors, "tail", layer), query))
        else:
            state = _one(manifest, tensors, "state", layer)
            parts.append(DeltaPart(layer, state, _one(manifest, tensors, "window", layer)))
    return Snapshot(
        tokens=tokens,
        parts=tuple(parts),
        logits=_one(manifest, tensors, "logits", None) if manifest.has_logits else None,
        grid=manifest.grid,
        stretches=stretches_of(manifest),
        drafter=tuple(tensors.get(("drafter", None), ())),
    )


def _one(
    manifest: Manifest, tensors: dict[tuple[str, int | None], list[torch.Tensor]], name: str, layer: int | None
) -> torch.Tensor:
    found = tensors.get((name, layer), [])
    if len(found) != 1:
        raise BadSnapshotFile(f"{manifest.id}: layer {layer} has {len(found)} parts called {name}, not one")
    return found[0]


def _view(content: torch.Tensor, start: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    if not nbytes:  # torch cannot see no bytes as another type
        return torch.empty(shape, dtype=DTYPES[dtype])
    return content[start : start + nbytes].view(DTYPES[dtype]).view(shape)


def _dtype_name(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    assert name in DTYPES, f"no snapshot holds {tensor.dtype}"
    return name

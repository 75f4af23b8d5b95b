"""A snapshot as bytes and back. The layout is canonical: layers ascend, whatever the split they came from.

page object   [PAGE token ids, int32][first paged layer: K, V][second: K, V] …
own object    [the tensors of every part, kind by kind and layer by layer][logits], each on an ALIGNMENT edge

Tensors of one name, dtype and shape stand side by side, and a load cuts them out of what was read at once. (Earlier
versions wrote all tensors of a layer, then those of the next; readers go by the manifest.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise

import numpy as np
import torch

from rekindle.snapshots.files import Bytes, raw
from rekindle.snapshots.manifest import ALIGNMENT, DTYPES, LOGITS, Manifest, PageRow, PartRow, tensor_bytes
from rekindle.snapshots.slabs import SlabSlice
from rekindle.snapshots.types import TAIL, Page, Part, Snapshot
from rekindle.spec import PAGE

Pages = tuple[Page, ...]  # the pages of all paged layers at one page position, layers ascending


@dataclass(frozen=True, slots=True)
class OwnObject:
    rows: tuple[PartRow, ...]
    pieces: tuple[Bytes, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class OwnRun:
    """Tensors of the own object that lie side by side in memory."""

    rows: tuple[PartRow, ...]
    start: int  # bytes of the object, with the padding behind the last tensor
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class PageRun:
    """Page objects that are read into memory side by side."""

    names: Sequence[str]
    heads: np.ndarray  # their token ids, int32 [pages, PAGE]; outside of the slab, so that it holds as many pages as …
    bodies: SlabSlice  # … if there were none: the rest of each, one behind the other

    @property
    def body(self) -> int:
        """Bytes of a page behind its token ids."""
        return self.bodies.memory.nbytes // len(self.names)


def paged_parts(snapshot: Snapshot) -> list[Part]:
    return [part for part in snapshot.parts if part.is_paged]


def page_rows(snapshot: Snapshot) -> tuple[PageRow, ...]:
    """How a page object of this model is divided; read off the tail, which even a snapshot without pages has."""
    tails = ((part.layer, part.tensors[TAIL]) for part in paged_parts(snapshot))
    return tuple(PageRow(layer, _dtype_name(tail), (2, PAGE, *tail.shape[2:])) for layer, tail in tails)


def page_columns(snapshot: Snapshot) -> list[Pages]:
    """Sealed pages by page position instead of by layer; a model without paged layers has empty columns."""
    parts = paged_parts(snapshot)
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
    alike: dict[object, list[tuple[str, int | None, torch.Tensor]]] = {}
    for part in snapshot.parts:
        for name, tensor in part.tensors.items():
            alike.setdefault((name, tensor.dtype, tensor.shape), []).append((name, part.layer, tensor))
    tensors = list(chain.from_iterable(alike.values()))
    return tensors if snapshot.logits is None else [*tensors, (LOGITS, None, snapshot.logits)]


def read_pages(manifest: Manifest, run: PageRun) -> list[Pages]:
    """The layers of page objects, as views of memory that may yet have to be filled. Layers that are alike are cut at
    once; where all are, those of all objects."""
    count, content = len(run.names), torch.from_numpy(run.bodies.memory)
    alike = [
        (*key, len(list(rows))) for key, rows in groupby(manifest.page_rows, key=lambda row: (row.dtype, row.shape))
    ]
    if len(alike) == 1:
        dtype, shape, layers = alike[0]
        pages = Page.all_of(_view(content, 0, content.nbytes, dtype, (count * layers, *shape)), run.bodies.slab)
        return [tuple(pages[at : at + layers]) for at in range(0, len(pages), layers)]
    columns, at = list[Pages](), 0
    for _ in run.names:
        column = list[Page]()
        for dtype, shape, layers in alike:
            nbytes = layers * tensor_bytes(dtype, shape)
            column += Page.all_of(_view(content, at, nbytes, dtype, (layers, *shape)), run.bodies.slab)
            at += nbytes
        columns.append(tuple(column))
    return columns


def own_runs(manifest: Manifest, most: int) -> list[OwnRun]:
    """The own object in runs of at most `most` bytes, unless one tensor has more."""
    runs = list[list[PartRow]]()
    for row in manifest.parts:
        stop = row.offset + row.bytes
        if not runs or stop + -stop % ALIGNMENT - runs[-1][0].offset > most:
            runs.append([])
        runs[-1].append(row)
    edges = pairwise((*(rows[0].offset for rows in runs), manifest.own_bytes))
    return [OwnRun(tuple(rows), *edge) for rows, edge in zip(runs, edges, strict=True)]


def read_parts(
    manifest: Manifest, columns: Sequence[Pages], own: Sequence[tuple[OwnRun, Bytes]]
) -> tuple[tuple[Part, ...], torch.Tensor | None]:
    """The parts of a snapshot and its logits; every tensor is a view of memory that may yet have to be filled."""
    logits: torch.Tensor | None = None
    tensors: dict[int, dict[str, torch.Tensor]] = {}  # by layer and name, in the order of the rows
    for run, memory in own:
        content = torch.from_numpy(memory)
        for rows in _side_by_side(run.rows):
            for row, view in zip(rows, _views(content, rows, run.start), strict=True):
                if row.layer is not None:
                    tensors.setdefault(row.layer, {})[row.name] = view
                elif row.name == LOGITS:
                    logits = view
    pages = dict(zip((row.layer for row in manifest.page_rows), zip(*columns, strict=True), strict=bool(columns)))
    return tuple(Part(layer, named, pages.get(layer, ())) for layer, named in sorted(tensors.items())), logits


def _side_by_side(rows: Sequence[PartRow]) -> list[list[PartRow]]:
    """In runs of one dtype and shape that follow one another without padding."""
    runs = list[list[PartRow]]()
    for row in rows:
        last = runs[-1][-1] if runs else None
        if last is None or (last.dtype, last.shape, last.offset + last.bytes) != (row.dtype, row.shape, row.offset):
            runs.append([])
        runs[-1].append(row)
    return runs


def _views(content: torch.Tensor, rows: Sequence[PartRow], start: int) -> Sequence[torch.Tensor]:
    """All in one cut: a call into torch gives the interpreter's lock away, which loads of other snapshots want too.
    start: of the content, in bytes of the object."""
    (first, *_), count = rows, len(rows)
    if count == 1:
        return [_view(content, first.offset - start, first.bytes, first.dtype, first.shape)]
    shape = (count, *first.shape)
    return _view(content, first.offset - start, count * first.bytes, first.dtype, shape).unbind()


def _view(content: torch.Tensor, start: int, nbytes: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    if not nbytes:  # torch cannot see no bytes as another type
        return torch.empty(shape, dtype=DTYPES[dtype])
    return content[start : start + nbytes].view(DTYPES[dtype]).view(shape)


def _dtype_name(tensor: torch.Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    assert name in DTYPES, f"no snapshot holds {tensor.dtype}"
    return name

"""Snapshot parts as entries and tensors of a frame, and back.

Pages that the receiver holds already are not sent again: the entry says how many leading pages it keeps, the tensor
`<layer>/pages` brings the rest. What a layer's tensors are is checked by the layer, when they are restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rekindle.errors import BadFrame, SnapshotMismatch
from rekindle.shards.frames import PartEntry
from rekindle.snapshots.types import TAIL, Page, Part, wait_for
from rekindle.spec import PAGE, Span

LayerPages = Mapping[int, tuple[Page, ...]]  # by layer


@dataclass(frozen=True, slots=True)
class Held:
    """Pages of one slot that both ends of a link hold since the frame `id`."""

    id: int
    pages: LayerPages


NOTHING_HELD = Held(0, {})


@dataclass(frozen=True, slots=True)
class ExportedParts:
    entries: tuple[PartEntry, ...]
    tensors: dict[str, torch.Tensor]


def pages_of(parts: Sequence[Part]) -> LayerPages:
    return {part.layer: part.pages for part in parts if part.is_paged}


def export_parts(parts: Sequence[Part], held: LayerPages) -> ExportedParts:
    wait_for(parts)
    entries: list[PartEntry] = []
    tensors: dict[str, torch.Tensor] = {}
    for part in parts:
        kept = _common(held.get(part.layer, ()), part.pages)
        entries.append(PartEntry(part.layer, tuple(part.tensors), kept))
        if part.is_paged:
            tensors[_pages_name(part.layer)] = _join(part.pages[kept:], part.tensors[TAIL])
        tensors |= {f"{part.layer}.{name}": tensor for name, tensor in part.tensors.items()}
    return ExportedParts(tuple(entries), tensors)


def import_parts(
    entries: Sequence[PartEntry], tensors: Mapping[str, torch.Tensor], held: LayerPages
) -> tuple[Part, ...]:
    """Parts whose pages are the held ones, then views into the message."""
    wanted = {name for entry in entries for name in _tensor_names(entry)}
    if wanted != tensors.keys():
        raise BadFrame(f"the parts need the tensors {sorted(wanted)}, the frame brings {sorted(tensors)}")
    return tuple(_import_part(entry, tensors, held.get(entry.layer, ())) for entry in entries)


def check_parts(span: Span, position: int, parts: Sequence[Part]) -> None:
    """What can be known without the stage: one part per layer of the span, all at the position."""
    layers = [part.layer for part in parts]
    if layers != list(span.layers):
        raise SnapshotMismatch(f"the stage holds layers {span}, the snapshot brings {layers}")
    for part in parts:
        if part.position not in (position, None):
            raise SnapshotMismatch(f"layer {part.layer} holds {part.position} positions, the snapshot is at {position}")


def _common(held: Sequence[Page], now: Sequence[Page]) -> int:
    """Leading pages that are the very same objects; equal content under another object counts as new."""
    count = 0
    for old, new in zip(held, now, strict=False):
        if old is not new:
            break
        count += 1
    return count


def _join(pages: Sequence[Page], tail: torch.Tensor) -> torch.Tensor:
    """[pages, 2, PAGE, kv_heads, row]"""
    if not pages:
        return tail.new_empty((0, 2, PAGE, *tail.shape[2:]))
    return torch.stack([page.data for page in pages])


def _pages_name(layer: int) -> str:
    """Unlike that of any tensor of the layer itself."""
    return f"{layer}/pages"


def _tensor_names(entry: PartEntry) -> list[str]:
    pages = [_pages_name(entry.layer)] if TAIL in entry.names else []
    return [*pages, *(f"{entry.layer}.{name}" for name in entry.names)]


def _import_part(entry: PartEntry, tensors: Mapping[str, torch.Tensor], known: Sequence[Page]) -> Part:
    own = {name: tensors[f"{entry.layer}.{name}"] for name in entry.names}
    if entry.kept > len(known):
        raise BadFrame(f"layer {entry.layer}: the frame builds on {entry.kept} pages, this end holds {len(known)}")
    if TAIL not in own:
        if entry.kept:
            raise BadFrame(f"layer {entry.layer}: the frame builds on {entry.kept} pages and brings no tail")
        return Part(entry.layer, own)
    pages = tensors[_pages_name(entry.layer)]
    _check_pages(entry.layer, pages, own[TAIL])
    return Part(entry.layer, own, (*known[: entry.kept], *map(Page, pages.unbind(0))))


def _check_pages(layer: int, pages: torch.Tensor, tail: torch.Tensor) -> None:
    kv_shape = tuple(tail.shape[2:])  # kv_heads, row
    rows_fit = tail.ndim == 4 and tail.shape[0] == 2 and tail.shape[1] < PAGE
    if not rows_fit or tuple(pages.shape[1:]) != (2, PAGE, *kv_shape) or pages.dtype != tail.dtype:
        raise BadFrame(
            f"layer {layer}: a paged part is pages [n, 2, {PAGE}, heads, row] and a tail [2, rows, heads, row], "
            f"the frame brings {_describe(pages)} and {_describe(tail)}"
        )


def _describe(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"

"""Snapshot parts as entries and tensors of a frame, and back.

Pages that the receiver holds already are not sent again: the entry says how many leading pages it keeps, the tensor
`<layer>.pages` brings the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rekindle.errors import BadFrame, SnapshotMismatch
from rekindle.shards.frames import DeltaEntry, KvEntry, PartEntry
from rekindle.snapshots.types import DeltaPart, KvPart, Page, Part, wait_for
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
    return {part.layer: part.pages for part in parts if isinstance(part, KvPart)}


def export_parts(parts: Sequence[Part], held: LayerPages) -> ExportedParts:
    wait_for(parts)
    entries: list[PartEntry] = []
    tensors: dict[str, torch.Tensor] = {}
    for part in parts:
        if isinstance(part, DeltaPart):
            entries.append(DeltaEntry(part.layer))
            tensors[f"{part.layer}.state"] = part.state
            tensors[f"{part.layer}.window"] = part.window
        else:
            kept = _common(held.get(part.layer, ()), part.pages)
            entries.append(KvEntry(part.layer, kept))
            tensors[f"{part.layer}.pages"] = _join(part.pages[kept:], part.tail)
            tensors[f"{part.layer}.tail"] = part.tail
            if part.query is not None:
                tensors[f"{part.layer}.query"] = part.query
    return ExportedParts(tuple(entries), tensors)


def import_parts(
    entries: Sequence[PartEntry], tensors: Mapping[str, torch.Tensor], held: LayerPages
) -> tuple[Part, ...]:
    """Parts whose pages are the held ones, then views into the message."""
    wanted = {name for entry in entries for name in _tensor_names(entry)}
    may_come = {f"{entry.layer}.query" for entry in entries if isinstance(entry, KvEntry)}  # of sparse runs
    if wanted != tensors.keys() - may_come:
        raise BadFrame(f"the parts need the tensors {sorted(wanted)}, the frame brings {sorted(tensors)}")
    return tuple(
        _import_delta(entry, tensors) if isinstance(entry, DeltaEntry) else _import_kv(entry, tensors, held)
        for entry in entries
    )


def check_parts(span: Span, position: int, parts: Sequence[Part]) -> None:
    """What can be known without the stage: one part per layer of the span, all at the position."""
    layers = [part.layer for part in parts]
    if layers != list(span.layers):
        raise SnapshotMismatch(f"the stage holds layers {span}, the snapshot brings {layers}")
    for part in parts:
        if isinstance(part, KvPart) and part.position != position:
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


def _tensor_names(entry: PartEntry) -> tuple[str, str]:
    if isinstance(entry, DeltaEntry):
        return f"{entry.layer}.state", f"{entry.layer}.window"
    return f"{entry.layer}.pages", f"{entry.layer}.tail"


def _import_delta(entry: DeltaEntry, tensors: Mapping[str, torch.Tensor]) -> DeltaPart:
    state, window = (tensors[name] for name in _tensor_names(entry))
    if state.ndim != 3 or window.ndim != 2 or {state.dtype, window.dtype} != {torch.float32}:
        raise BadFrame(
            f"layer {entry.layer}: a DeltaNet part is a float32 state of 3 dimensions and a window of 2, "
            f"the frame brings {_describe(state)} and {_describe(window)}"
        )
    return DeltaPart(entry.layer, state, window)


def _import_kv(entry: KvEntry, tensors: Mapping[str, torch.Tensor], held: LayerPages) -> KvPart:
    pages, tail = (tensors[name] for name in _tensor_names(entry))
    kv_shape = tuple(tail.shape[2:])  # kv_heads, row
    rows_fit = tail.ndim == 4 and tail.shape[0] == 2 and tail.shape[1] < PAGE
    if not rows_fit or tuple(pages.shape[1:]) != (2, PAGE, *kv_shape) or pages.dtype != tail.dtype:
        raise BadFrame(
            f"layer {entry.layer}: a KV part is pages [n, 2, {PAGE}, heads, row] and a tail [2, rows, heads, row], "
            f"the frame brings {_describe(pages)} and {_describe(tail)}"
        )
    known = held.get(entry.layer, ())
    if entry.kept > len(known):
        raise BadFrame(f"layer {entry.layer}: the frame builds on {entry.kept} pages, this end holds {len(known)}")
    query = tensors.get(f"{entry.layer}.query")
    if query is not None and (query.ndim not in (2, 3) or query.dtype != torch.float32):
        raise BadFrame(
            f"layer {entry.layer}: a query is [heads, dim] float32, or two of them, the frame brings {_describe(query)}"
        )
    return KvPart(entry.layer, (*known[: entry.kept], *map(Page, pages.unbind(0))), tail, query)


def _describe(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"

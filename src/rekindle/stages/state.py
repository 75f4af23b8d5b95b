"""The state of a span's layers: pages, which paged layers share, and what every layer keeps per slot.

It loops over the layers and knows no kind. All of it runs on the device of the stage, which makes that device current.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rekindle.errors import SnapshotMismatch
from rekindle.layers import LayerState, PagedKv, SlotMemory, block_of
from rekindle.pool import Together
from rekindle.snapshots.types import Part, wait_for
from rekindle.spec import ModelSpec, Span
from rekindle.stages.layout import round_up


class SpanState:
    def __init__(self, spec: ModelSpec, span: Span, slots: SlotMemory, paged: PagedKv) -> None:
        self.paged = paged
        self.layers: dict[int, LayerState] = {
            layer: block_of(spec.mixers[layer]).new_state(spec.mixers[layer], layer, slots, paged)
            for layer in span.layers
        }
        self._span = span
        self._block_rows = 0  # of a rewindable block that there is room for
        self._rewinders = list[Callable[[torch.Tensor], None]]()  # of every kind of layer that logs rows
        self._prepared: dict[int, tuple[int, dict[int, Part]]] = {}  # by slot: position and parts to be restored

    def clear(self, slot: int) -> None:
        self._prepared.pop(slot, None)
        self.paged.clear(slot)
        if tensors := [tensor for state in self.layers.values() for tensor in state.cleared(slot)]:
            torch._foreach_zero_(tensors)  # one launch for all

    def begin_capture(self, slot: int) -> Callable[[], list[Part]]:
        """Copies what the next forward overwrites; what is called later takes the rest of the time, and gives the
        parts."""
        pages, copies = self.paged.export(slot), self.paged.pool.copies
        live = {layer: state.live(slot) for layer, state in self.layers.items()}
        copied = copies.copy_live([tensor for named in live.values() for tensor in named.values()])
        exported = self.paged.ready(slot)

        def finish() -> list[Part]:
            tensors = iter(copied.to_host())
            awaited = tuple(ready for ready in (exported, copied.ready) if ready is not None)
            ready = Together(awaited) if awaited else None
            return [
                Part(layer, {name: next(tensors) for name in named}, pages.get(layer, ()), ready)
                for layer, named in live.items()
            ]

        return finish

    # Restoring, in two steps: nothing changes before all stages have checked their parts

    def prepare(self, slot: int, position: int, parts: Sequence[Part]) -> None:
        own = {part.layer: part for part in parts if part.layer in self._span}
        brought = [part.layer for part in parts if part.layer in self._span]
        wait_for(own.values())
        if brought != list(self._span.layers):
            raise SnapshotMismatch(f"the stage holds layers {self._span}, the snapshot brings {brought}")
        for layer, part in own.items():
            self.layers[layer].check(part, position)
        self.paged.check(slot, position, own)
        self._prepared[slot] = position, own

    def missing(self, slot: int) -> int:
        """Pages more than it has now that the slot will hold when what was prepared is adopted."""
        return self.paged.tables[slot].missing(self._prepared[slot][0])

    def abort(self, slot: int) -> None:
        self._prepared.pop(slot, None)

    def commit(self, slot: int) -> None:
        """Adopt what was prepared; the slot is empty afterwards if that fails."""
        position, parts = self._prepared.pop(slot)
        self.paged.clear(slot)  # what layers keep besides is overwritten, all of it
        try:
            self.paged.adopt(slot, position, parts)
            pairs = [pair for layer, part in parts.items() for pair in self.layers[layer].restored(slot, part)]
            self.paged.pool.copies.send(pairs)
            self.paged.take_up(slot, parts)
        except Exception:
            self.clear(slot)
            raise

    # Rewinding

    @property
    def logs_rows(self) -> bool:
        """Whether some layer has to replay rows when a slot goes back."""
        return any(state.logs_rows for state in self.layers.values())

    def make_room(self, rows: int, dtype: torch.dtype) -> bool:
        """For blocks of `rows` rows in every slot; dtype: of what they are computed in. The plan counts these bytes.
        True if logs lie in new memory."""
        if rows <= self._block_rows:
            return False
        self._block_rows = round_up(rows)
        kinds: dict[type[LayerState], list[LayerState]] = {}
        for state in self.layers.values():
            if state.logs_rows:
                state.make_room(self._block_rows, dtype)
                kinds.setdefault(type(state), []).append(state)
        self._rewinders = [kind.rewinder(states) for kind, states in kinds.items()]
        return True

    def rewind(self, where: torch.Tensor) -> None:
        """Settle a block: where is int32 [2] on the device, a slot and the rows of its last block that stay, once for
        each block. Pages are cut apart."""
        for rewind in self._rewinders:
            rewind(where)

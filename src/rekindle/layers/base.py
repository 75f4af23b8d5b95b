"""What a kind of mixer answers. Stages, snapshots and shards loop over these verbs and ask for no kind.

A kind is a spec without torch (`spec/`) and, here, a block, which computes, and a state, which the block reads and
writes and which is captured, restored and rewound. The block is registered under the spec's `kind`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from rekindle.errors import SnapshotMismatch
from rekindle.kernels.matmul import Matrix
from rekindle.kernels.ragged import Ragged
from rekindle.layers.paged import PagedKv, PageShape
from rekindle.layers.slot_memory import SlotMemory
from rekindle.snapshots.types import Part
from rekindle.spec import MixerSpec, ModelSpec, Span

Spec = TypeVar("Spec", bound=MixerSpec)
State = TypeVar("State", bound="LayerState")
Self = TypeVar("Self", bound="MixerBlock[Any, Any]")


class LayerState(ABC):
    """What one layer carries for every slot of its stage."""

    __slots__ = ()
    # The block logs the rows of a rewindable batch here, and every segment of it is pending until `rewind` has settled
    # it with the rows that stay. Pages need no log: they are cut.
    logs_rows: ClassVar[bool] = False

    @abstractmethod
    def live(self, slot: int) -> Mapping[str, Tensor]:
        """The tensors of a part, by name, as they lie on the device now; capture copies them. Pages are not among
        them: a paged layer gives the rows of its open page, as "tail"."""

    @abstractmethod
    def check(self, part: Part, position: int) -> None:
        """Raises SnapshotMismatch, naming both sides, where the part cannot be this layer's at `position`."""

    @abstractmethod
    def restored(self, slot: int, part: Part) -> list[tuple[Tensor, Tensor]]:
        """(to, from) for every tensor of a checked part. The slot has its pages by now."""

    def cleared(self, slot: int) -> list[Tensor]:
        """What is zeroed when the slot is closed."""
        return []

    def make_room(self, rows: int, dtype: torch.dtype) -> None:
        """For batches of up to `rows` rows in every slot; dtype: of activations, as kernels write them down. What is
        pending stays so."""
        raise NotImplementedError(f"{type(self).__name__} logs no rows")

    def rewind(self, where: Tensor) -> None:
        """Settle the pending rows of slot where[0]: its state becomes that after the first where[1] of them, be it none
        or all. The stage asks once for each rewindable segment, before anything reads the slot's state, unless it is
        cleared or restored; until then the state may be whatever suits the kind. `where` is int32 [2] on the device,
        and the host does not read it: a recorded rewind serves every slot."""
        raise NotImplementedError(f"{type(self).__name__} logs no rows")

    @classmethod
    def rewinder(cls, states: Sequence[Any]) -> Callable[[Tensor], None]:
        """`rewind` of several layers of this kind; it is asked for anew when there is room for longer blocks."""

        def rewind(where: Tensor) -> None:
            for state in states:
                state.rewind(where)

        return rewind


class SlotState(LayerState):
    """State of a fixed size: named tensors with one place per slot, and one more for padded rows."""

    __slots__ = ("_shapes", "_slots")

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Every tensor is [slots + 1, …], of zeros."""
        # By slot. Views that are made once: every call into torch gives the interpreter's lock away, and a capture or a
        # restore would make one for each tensor of each layer.
        rows = zip(*(tensor.unbind() for tensor in tensors.values()), strict=True)
        self._slots = [dict(zip(tensors, row, strict=True)) for row in rows]
        # Of every tensor its shape: torch would repeat a window of one row.
        self._shapes = {name: (tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in tensors.items()}

    def live(self, slot: int) -> Mapping[str, Tensor]:
        return self._slots[slot]

    def cleared(self, slot: int) -> list[Tensor]:
        return list(self.live(slot).values())

    def check(self, part: Part, position: int) -> None:
        expect(part, self._shapes)

    def restored(self, slot: int, part: Part) -> list[tuple[Tensor, Tensor]]:
        return [(tensor, part.tensors[name]) for name, tensor in self._slots[slot].items()]


Shape = tuple[tuple[int, ...], torch.dtype]


def expect(part: Part, stage: Mapping[str, Shape]) -> None:
    """The part's tensors are exactly these."""
    brought = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in part.tensors.items()}
    if brought != dict(stage):
        raise SnapshotMismatch(f"layer {part.layer}: the snapshot has {_shown(brought)}, the stage {_shown(stage)}")


def _shown(tensors: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name} {shape} {dtype}" for name, (shape, dtype) in tensors.items()) or "no tensors"


class Tensors(Protocol):
    """The weights of one layer, by their names inside it."""

    @property
    def device(self) -> torch.device: ...
    def matrix(self, name: str) -> Matrix: ...
    def vector(self, name: str) -> Tensor:
        """Values in float32, in the tensor's own shape."""
        ...


class MixerBlock(ABC, Generic[Spec, State]):
    """How one layer mixes positions: its weights, and what it does with them."""

    __slots__ = ()

    @classmethod
    @abstractmethod
    def load(cls: type[Self], tensors: Tensors, spec: Spec, eps: float) -> Self: ...

    @classmethod
    @abstractmethod
    def new_state(cls, spec: Spec, layer: int, slots: SlotMemory, paged: PagedKv) -> State:
        """Empty state for a layer of a stage: `paged` holds the pages of the stage, `slots` has memory for what the
        spec counts as `slot_bytes`."""

    @classmethod
    def page_shape(cls, spec: Spec, kv_type: str) -> PageShape | None:
        """None where the kind keeps no pages."""
        return None

    @abstractmethod
    def forward(self, h: Tensor, rows: Ragged, state: State) -> Tensor:
        """h [rows, hidden], normed -> [rows, hidden]"""

    @property
    def first(self) -> Matrix | None:
        """The largest of the matrices that it reads at first, so that the layer before can fetch its beginning."""
        return None

    def linked(self: Self, behind: Matrix | None) -> Self:
        """The block, knowing the matrix that is read after its last one."""
        return self


class FfnBlock(Protocol):
    def forward(self, h: Tensor) -> Tensor: ...


AnyBlock = MixerBlock[Any, Any]
BLOCKS: dict[str, type[AnyBlock]] = {}  # by kind
Block = TypeVar("Block", bound=type[AnyBlock])


def register_mixer(kind: str) -> Callable[[Block], Block]:
    """Class decorator: the block of every spec of this kind."""

    def register(block: Block) -> Block:
        assert kind not in BLOCKS, f"{kind} is registered twice"
        BLOCKS[kind] = block
        return block

    return register


def block_of(spec: MixerSpec) -> type[AnyBlock]:
    assert spec.kind in BLOCKS, f"no block is registered for the mixer {spec.kind!r}, only for {list(BLOCKS)}"
    return BLOCKS[spec.kind]


def page_shapes(spec: ModelSpec, span: Span, kv_type: str) -> dict[int, PageShape]:
    """By layer, of the layers that are paged."""
    shapes = {layer: block_of(spec.mixers[layer]).page_shape(spec.mixers[layer], kv_type) for layer in span.layers}
    return {layer: shape for layer, shape in shapes.items() if shape is not None}

"""The layers of one span, with the embedding where it starts the model and the head where it ends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rekindle.experts import ROUND, ExpertSet, RoutedFfn, Unit, units_of
from rekindle.kernels.device_memory import DeviceMemory
from rekindle.kernels.matmul import Matrix, multiply
from rekindle.kernels.norm import add, rms_norm
from rekindle.kernels.ragged import Ragged
from rekindle.layers.base import LayerState
from rekindle.layers.embedding import Embedding
from rekindle.layers.layer import HybridLayer, launches_of
from rekindle.spec import ModelSpec, Span

# A section, behind which a chunk may pause, has so many layers that it computes about SECTION rows of layers;
# two at least if these have no more than LARGEST together, and a chunk of fewer rows than LEAST_CUT has none. Experts
# that come over the link come ahead of their layer, but not ahead of their section: with them sections are longer, and
# only long chunks have some.
SECTION, LEAST_LAYERS, LARGEST, LEAST_CUT = 2048, 2, 4096, 64
STREAMED_SECTION, LEAST_STREAMED = 10, 1024
# Layers whose experts change places before one forward: the host takes a quarter of a millisecond for each exchange,
# and the forward waits for it and for the link.
MOST_SWAPPING = 4  # in decode; before a chunk, which is a round by itself, one


@dataclass(frozen=True, slots=True)
class Head:
    """Final norm and output matrix."""

    norm: torch.Tensor
    matrix: Matrix
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return multiply(rms_norm(x, self.norm, self.eps), self.matrix)


@dataclass(frozen=True, slots=True)
class ModelSpan:
    """What one stage runs."""

    spec: ModelSpec
    span: Span
    device: torch.device
    dtype: torch.dtype  # of the activations, also where they cross to the next stage
    layers: tuple[HybridLayer, ...]
    embedding: Embedding | None
    head: Head | None

    @property
    def is_first(self) -> bool:
        return self.embedding is not None

    @property
    def is_last(self) -> bool:
        return self.head is not None

    @property
    def routed(self) -> tuple[RoutedFfn | ExpertSet, ...]:
        return tuple(layer.ffn for layer in self.layers if isinstance(layer.ffn, RoutedFfn | ExpertSet))

    @property
    def all_resident(self) -> bool:
        """No expert of the span is cold."""
        return all(ffn.all_resident for ffn in self.routed)

    def can_record(self, rows: int) -> bool:
        """Whether a step of `rows` rows needs no answer from the host, so that it may be recorded and replayed."""
        return all(ffn.can_record(rows) for ffn in self.routed)

    def ways(self, rows: int) -> Counter[str]:
        """How the layers with cold experts run `rows` rows: layers by way."""
        return Counter(ffn.way_name(rows) for ffn in self.routed if isinstance(ffn, ExpertSet))

    def units(self, memory: DeviceMemory) -> list[Unit]:
        """The expert slots that can be lent, cut from this memory."""
        return units_of([ffn for ffn in self.routed if isinstance(ffn, ExpertSet)], memory)

    @property
    def swaps(self) -> int:
        """Experts that have changed places so far."""
        return sum(ffn.swaps for ffn in self.routed if isinstance(ffn, ExpertSet))

    def poll_experts(self, rows: int) -> None:
        """Between forwards: counts are brought up to date and experts change places. `run` calls it by itself; a
        replayed step does not run this code, so it is called before a replay."""
        for ffn in self.routed:
            ffn.poll(rows)
        waiting = [ffn for ffn in self.routed if isinstance(ffn, ExpertSet) and ffn.may_swap]
        waiting.sort(key=lambda ffn: ffn.swapped_at)
        # In decode of up to 25 rows so many that none waits for another round.
        turns = 1 if rows >= ROUND else min(1 + rows * len(self.routed) // ROUND, MOST_SWAPPING)
        for ffn in waiting[:turns]:
            ffn.swap_some()

    def enter(self, tokens: Sequence[int] | torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        """[rows, hidden]: the embedded tokens, or what the stage before sent."""
        if self.embedding is None:
            assert hidden is not None, f"stage {self.span} is not the first and got no activations"
            return hidden.to(self.device, self.dtype)
        return self.embedding.rows(tokens)

    @property
    def unlike_layers(self) -> tuple[HybridLayer, ...]:
        """Some of the layers, which between them launch every kernel that all layers launch."""
        found: dict[object, HybridLayer] = {}
        for layer in self.layers:
            found.setdefault(launches_of(layer), layer)
        return tuple(found.values())

    def sections(self, rows: int) -> tuple[tuple[HybridLayer, ...], ...]:
        """The layers, in the sections between which a chunk of so many rows may pause."""
        if rows < (LEAST_CUT if self.all_resident else LEAST_STREAMED):
            return (self.layers,)
        length = max(1, min(LEAST_LAYERS, LARGEST // rows), SECTION // rows) if self.all_resident else STREAMED_SECTION
        return tuple(self.layers[at : at + length] for at in range(0, len(self.layers), length))

    def run(
        self,
        x: torch.Tensor,
        rows: Ragged,
        states: Mapping[int, LayerState],
        layers: Sequence[HybridLayer] | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Through all layers, unless some are named -> the residual stream, and as it was after each tapped layer."""
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.poll_experts(x.shape[0])
        layers = self.layers if layers is None else layers
        for layer in layers:
            if isinstance(layer.ffn, ExpertSet):
                layer.ffn.begin(x.shape[0])
        y: torch.Tensor | None = None
        features = list[torch.Tensor]()
        for layer in layers:
            x, y = layer.forward(x, y, rows, states[layer.index])
            if layer.index in taps:
                features.append(add(x, y))
        return x if y is None else add(x, y), tuple(features)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] logits, in the type of the activations; of every row of the head, `drawable` or not."""
        assert self.head is not None, f"stage {self.span} is not the last and has no head"
        return self.head.forward(x)

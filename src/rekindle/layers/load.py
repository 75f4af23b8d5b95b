"""A span of layers from a weight file. Touches the bytes of no other layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rekindle.experts import ExpertSet, RoutedFfn, SpanExperts, load_routed_ffn
from rekindle.kernels.matmul import Matrix, make_matrix
from rekindle.kernels.upload import upload_values
from rekindle.layers.base import block_of
from rekindle.layers.embedding import Embedding, load_embedding
from rekindle.layers.ffn import DenseFfn
from rekindle.layers.layer import HybridLayer
from rekindle.layers.span import Head, ModelSpan
from rekindle.models.registry import family_of
from rekindle.spec import Span
from rekindle.weights import WeightFile

Progress = Callable[[int, int], None]  # bytes done, bytes in all


def load_span(
    file: WeightFile,
    span: Span,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: Progress | None = None,
    experts: SpanExperts | None = None,
) -> ModelSpan:
    """The layers of `span`; with the embedding if it starts the model, with the head if it ends it.

    Every expert goes to the device unless `experts` says which.
    """
    return _Loader(file, span, device, dtype, on_progress, experts).load()


def load_head(file: WeightFile, device: torch.device, dtype: torch.dtype) -> Head:
    """Final norm and output matrix alone."""
    return _Loader(file, file.spec.whole, device, dtype, None, None).head()


@dataclass
class _Loader:
    file: WeightFile
    span: Span
    device: torch.device
    dtype: torch.dtype
    on_progress: Progress | None
    experts: SpanExperts | None
    done: int = 0

    def load(self) -> ModelSpan:
        spec = self.file.spec
        self.total = self._total_bytes()
        layers = [self.layer(index) for index in self.span.layers]
        head = self.head() if self.span.stop == spec.layers else None
        return ModelSpan(
            spec=spec,
            span=self.span,
            device=self.device,
            dtype=self.dtype,
            layers=tuple(map(HybridLayer.linked, layers, [*layers[1:], None])),
            embedding=self.embedding(head) if self.span.start == 0 else None,
            head=head,
        )

    def embedding(self, head: Head | None) -> Embedding:
        return load_embedding(self.file, self.device, self.dtype, None if head is None else head.matrix)

    def layer(self, index: int) -> HybridLayer:
        spec, tensors = self.file.spec, _LayerTensors(self, f"blk.{index}")
        mixer = spec.mixers[index]
        return HybridLayer(
            index=index,
            mixer=block_of(mixer).load(tensors, mixer, spec.eps),
            ffn=self.routed(index) if spec.ffn.is_moe else DenseFfn.load(tensors),
            mixer_norm=tensors.vector("attn_norm.weight"),
            ffn_norm=tensors.vector(family_of(spec.architecture).ffn_norm),
            eps=spec.eps,
        )

    def routed(self, index: int) -> RoutedFfn | ExpertSet:
        name, place = f"blk.{index}", index - self.span.start
        ffn = load_routed_ffn(self.file, name, self.device, self.dtype, self.experts, place, index)
        for tensor in self.file.tensors.values():
            if tensor.name.startswith(f"{name}.ffn_") and not tensor.name.endswith("norm.weight"):
                self._count(tensor.nbytes)
        return ffn

    def head(self) -> Head:
        tied = self.file.spec.tied
        return Head(
            norm=self.vector("output_norm.weight"),
            matrix=self.matrix("token_embd.weight" if tied else "output.weight"),
            eps=self.file.spec.eps,
        )

    def matrix(self, name: str) -> Matrix:
        info = self.file.tensors[name]
        rows, columns = info.shape
        matrix = make_matrix(self.file.unread(name), info.type, (rows, columns), self.device, self.dtype)
        self._count(info.nbytes)
        return matrix

    def vector(self, name: str) -> torch.Tensor:
        """Norms, decays and the like stay float32 on every device."""
        self._count(self.file.tensors[name].nbytes)
        return upload_values(self.file.values(name), self.device)

    def _total_bytes(self) -> int:
        prefixes = tuple(f"blk.{index}." for index in self.span.layers)
        tensors = self.file.tensors.values()
        total = sum(tensor.nbytes for tensor in tensors if tensor.name.startswith(prefixes))
        if self.span.stop == self.file.spec.layers:
            names = ("output_norm.weight", "token_embd.weight" if self.file.spec.tied else "output.weight")
            total += sum(self.file.tensors[name].nbytes for name in names)
        return total

    def _count(self, nbytes: int) -> None:
        self.done += nbytes
        if self.on_progress is not None:
            self.on_progress(self.done, self.total)


@dataclass(frozen=True, slots=True)
class _LayerTensors:
    """The weights of one layer, as its blocks ask for them."""

    loader: _Loader
    layer: str

    @property
    def device(self) -> torch.device:
        return self.loader.device

    def matrix(self, name: str) -> Matrix:
        return self.loader.matrix(f"{self.layer}.{name}")

    def vector(self, name: str) -> torch.Tensor:
        return self.loader.vector(f"{self.layer}.{name}")

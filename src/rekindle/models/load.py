"""A span of layers from a weight file. Touches the bytes of no other layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from rekindle.experts import ExpertSet, RoutedFfn, SpanExperts, load_routed_ffn
from rekindle.kernels.matmul import Matrix, make_matrix
from rekindle.kernels.rope import rope_frequencies
from rekindle.models.embedding import load_embedding
from rekindle.models.hybrid import AttentionBlock, DeltaBlock, DenseFfn, HybridLayer
from rekindle.models.model import Head, ModelSpan
from rekindle.spec import Mixer, Span
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


def _linked(layer: HybridLayer, behind: HybridLayer | None) -> HybridLayer:
    """The layer, with blocks that know what is read behind them. With routed experts nobody knows it so early."""
    if not isinstance(layer.ffn, DenseFfn):
        return layer
    assert isinstance(layer.mixer, AttentionBlock | DeltaBlock), "as they were just loaded"
    mixer = replace(layer.mixer, then=layer.ffn.gate)
    ffn = replace(layer.ffn, then=None if behind is None else behind.mixer.first)
    return replace(layer, mixer=mixer, ffn=ffn)


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
        return ModelSpan(
            spec=spec,
            span=self.span,
            device=self.device,
            dtype=self.dtype,
            layers=tuple(map(_linked, layers, [*layers[1:], None])),
            embedding=load_embedding(self.file, self.device, self.dtype) if self.span.start == 0 else None,
            head=self.head() if self.span.stop == spec.layers else None,
        )

    def layer(self, index: int) -> HybridLayer:
        spec, name = self.file.spec, f"blk.{index}"
        is_attention = spec.mixers[index] is Mixer.ATTENTION
        # Hybrid files call the second norm after what it follows, plain ones after what it feeds.
        second = f"{name}.post_attention_norm.weight"
        ffn_norm = second if second in self.file.tensors else f"{name}.ffn_norm.weight"
        return HybridLayer(
            index=index,
            mixer=self.attention(name) if is_attention else self.delta(name),
            ffn=self.routed(index) if spec.ffn.is_moe else self.dense(name),
            mixer_norm=self.vector(f"{name}.attn_norm.weight"),
            ffn_norm=self.vector(ffn_norm),
            eps=spec.eps,
        )

    def attention(self, name: str) -> AttentionBlock:
        spec = self.file.spec.attention
        return AttentionBlock(
            spec=spec,
            q=self.matrix(f"{name}.attn_q.weight"),
            k=self.matrix(f"{name}.attn_k.weight"),
            v=self.matrix(f"{name}.attn_v.weight"),
            out=self.matrix(f"{name}.attn_output.weight"),
            q_norm=self.vector(f"{name}.attn_q_norm.weight") if spec.qk_norm else None,
            k_norm=self.vector(f"{name}.attn_k_norm.weight") if spec.qk_norm else None,
            frequencies=rope_frequencies(spec, self.device),
            eps=self.file.spec.eps,
        )

    def delta(self, name: str) -> DeltaBlock:
        spec = self.file.spec.delta
        assert spec is not None, "a DeltaNet layer in a model without DeltaNet sizes"
        return DeltaBlock(
            spec=spec,
            qkv=self.matrix(f"{name}.attn_qkv.weight"),
            gate=self.matrix(f"{name}.attn_gate.weight"),
            alpha=self.matrix(f"{name}.ssm_alpha.weight"),
            beta=self.matrix(f"{name}.ssm_beta.weight"),
            out=self.matrix(f"{name}.ssm_out.weight"),
            conv=self.vector(f"{name}.ssm_conv1d.weight"),
            decay=self.vector(f"{name}.ssm_a"),
            dt_bias=self.vector(f"{name}.ssm_dt.bias"),
            norm=self.vector(f"{name}.ssm_norm.weight"),
            eps=self.file.spec.eps,
        )

    def dense(self, name: str) -> DenseFfn:
        return DenseFfn(
            gate=self.matrix(f"{name}.ffn_gate.weight"),
            up=self.matrix(f"{name}.ffn_up.weight"),
            down=self.matrix(f"{name}.ffn_down.weight"),
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
        matrix = make_matrix(self.file.raw(name), info.type, (rows, columns), self.device, self.dtype)
        self._count(info.nbytes)
        return matrix

    def vector(self, name: str) -> torch.Tensor:
        """Norms, decays and the like stay float32 on every device."""
        self._count(self.file.tensors[name].nbytes)
        return torch.from_numpy(self.file.values(name).copy()).to(self.device)

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

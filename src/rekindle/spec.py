"""What a model is, in numbers. No torch: the planner and the CLI read it on any machine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PAGE = 64  # tokens of KV in one page, everywhere: pool, snapshots, disk


class Mixer(StrEnum):
    """How a layer mixes positions."""

    ATTENTION = "attention"
    DELTA = "delta"


@dataclass(frozen=True, slots=True)
class Span:
    """Contiguous layers, half-open."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop, f"span [{self.start}, {self.stop}) runs backwards"

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.start <= layer < self.stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    @property
    def layers(self) -> range:
        return range(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Full attention: grouped heads, rotary positions, optional gate and per-head norms."""

    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int  # the first rope_dim of head_dim rotate, in pairs (j, j + rope_dim / 2)
    rope_theta: float
    rope_factors: tuple[float, ...] | None = None  # divisors of the frequencies, rope_dim / 2 of them
    qk_norm: bool = False
    gated: bool = False

    @property
    def kv_values_per_token(self) -> int:
        """K and V of one layer, in values."""
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Gated DeltaNet. Value heads are in tiled order: value head p reads key head p mod key_heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def inner(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.key_heads * self.key_dim

    @property
    def state_values(self) -> int:
        """Values of the recurrent matrices of one layer and slot (float32)."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def window_values(self) -> int:
        """Values of the convolution window of one layer and slot (float32)."""
        return (self.conv_width - 1) * self.conv_channels


@dataclass(frozen=True, slots=True)
class FfnSpec:
    """Dense when `experts` is 0; otherwise routed experts plus one shared expert."""

    width: int = 0
    experts: int = 0
    used: int = 0
    expert_width: int = 0
    shared_width: int = 0

    @property
    def is_moe(self) -> bool:
        return self.experts > 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model. Dense and MoE differ in `ffn` only; plain attention models have no `delta`."""

    architecture: str  # qwen35, qwen35moe, llama, qwen3
    name: str
    hidden: int
    vocab: int
    mixers: tuple[Mixer, ...]  # one per layer
    attention: AttentionSpec
    delta: DeltaSpec | None
    ffn: FfnSpec
    eps: float
    context: int  # positions the model was trained for
    tied: bool  # the output matrix is the embedding
    nextn: int = 0  # next-token-prediction blocks behind the layers; loaded by nobody yet

    @property
    def layers(self) -> int:
        return len(self.mixers)

    @property
    def whole(self) -> Span:
        return Span(0, self.layers)

    def attention_layers(self, span: Span | None = None) -> tuple[int, ...]:
        return self._layers_with(Mixer.ATTENTION, span)

    def delta_layers(self, span: Span | None = None) -> tuple[int, ...]:
        return self._layers_with(Mixer.DELTA, span)

    def _layers_with(self, mixer: Mixer, span: Span | None) -> tuple[int, ...]:
        return tuple(i for i in (span or self.whole).layers if self.mixers[i] is mixer)

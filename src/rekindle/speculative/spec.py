"""What a DFlash drafter is, in numbers. No torch: the planner reads it too.

A drafter is a small transformer that proposes a block of tokens in one pass. It has no vocabulary of its own: it reads
the target's embedding and features of some of the target's layers, and the target's head turns its rows into logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.errors import BadModelFile
from rekindle.spec import ModelSpec, Shapes

DEFAULT_TAPS = 5  # of files that do not name theirs


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """How one layer of the drafter attends."""

    window: int | None  # a row at position p sees context keys j with p - j < window; None: all of them
    causal: bool  # rows of the block see only rows before them, and themselves


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """DFlash 2: a short convolution along the block on both sides of every sublayer, its taps partly computed."""

    taps: int
    group: int  # neighbouring channels that share a computed tap


@dataclass(frozen=True, slots=True)
class SelectorSpec:
    """DFlash 2: scores between neighbouring tokens choose one path through the best candidates of every row."""

    rank: int
    candidates: int  # of each row, by the target's head


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int  # of the feed-forward part
    vocab: int
    layers: tuple[DraftLayer, ...]
    block: int  # rows of a block: the last token and block - 1 masks
    mask: int  # token id
    taps: tuple[int, ...]  # target layers whose outputs are its features, in this order
    rope_theta: float
    eps: float
    conv: ConvSpec | None = None
    selector: SelectorSpec | None = None
    feature_norms: bool = False  # every tap has a norm of its own before they are joined
    context_norm_per_layer: bool = False  # context rows pass each layer's norm before its K and V
    gate: int = 0  # rows of the attention gate: one per head, one per channel, or none
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float = 0.0  # logits become softcap · tanh(logits / softcap); 0: they stay

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(layer.window for layer in self.layers)

    @property
    def features(self) -> int:
        """Values of one position's features."""
        return len(self.taps) * self.hidden

    def tensors(self) -> Shapes:
        """Every tensor that a drafter's file holds, under our names."""
        shapes: Shapes = {
            "fc.weight": (self.hidden, self.features),
            "context_norm.weight": (self.hidden,),
            "output_norm.weight": (self.hidden,),
        }
        if self.feature_norms:
            shapes |= {f"feature_norm.{tap}.weight": (self.hidden,) for tap in range(len(self.taps))}
        if self.selector is not None:
            shapes |= {
                "selector.predecessor": (self.vocab, self.selector.rank),
                "selector.successor": (self.vocab, self.selector.rank),
                "selector.hidden.weight": (self.selector.rank, self.hidden),
            }
        for layer in range(len(self.layers)):
            shapes |= {f"blk.{layer}.{name}": shape for name, shape in self._layer_tensors().items()}
        return shapes

    def _layer_tensors(self) -> Shapes:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: Shapes = {
            "attn_norm.weight": (self.hidden,),
            "attn_q.weight": (q, self.hidden),
            "attn_k.weight": (kv, self.hidden),
            "attn_v.weight": (kv, self.hidden),
            "attn_q_norm.weight": (self.head_dim,),
            "attn_k_norm.weight": (self.head_dim,),
            "attn_output.weight": (self.hidden, q),
            "ffn_norm.weight": (self.hidden,),
            "ffn_gate.weight": (self.width, self.hidden),
            "ffn_up.weight": (self.width, self.hidden),
            "ffn_down.weight": (self.hidden, self.width),
        }
        if self.gate:
            shapes["attn_gate.weight"] = (self.gate, self.hidden)
        if self.conv is not None:
            computed = (2 * self.conv.taps * (self.hidden // self.conv.group), self.hidden)
            for side in ("attn", "ffn"):
                shapes[f"{side}_conv.base"] = (2, self.conv.taps, self.hidden)
                shapes[f"{side}_conv.weight"] = computed
        return shapes

    def check_target(self, target: ModelSpec, name: str) -> None:
        """Refuse a target that this drafter was not made for, naming both sides."""
        if self.hidden != target.hidden:
            raise BadModelFile(f"{name} reads rows of {self.hidden} values, {target.name} has rows of {target.hidden}")
        if self.taps and max(self.taps) >= target.layers:
            raise BadModelFile(
                f"{name} reads the outputs of layers {list(self.taps)}, {target.name} has {target.layers} layers"
            )
        if self.mask >= target.vocab:
            raise BadModelFile(f"{name} masks with token {self.mask}, {target.name} has {target.vocab} tokens")
        if self.selector is not None and not target.drawable <= self.vocab <= target.vocab:
            raise BadModelFile(f"{name} chooses among {self.vocab} tokens, {target.name} has {target.vocab}")


def default_taps(layers: int) -> tuple[int, ...]:
    """Where files that name no taps were trained to read: evenly from the second layer on."""
    step = (layers - 2) // (DEFAULT_TAPS - 1)
    return tuple(1 + index * step for index in range(DEFAULT_TAPS))

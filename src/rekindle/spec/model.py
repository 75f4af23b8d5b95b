"""One model, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from rekindle.spec.attention import AttentionSpec
from rekindle.spec.base import MixerSpec, Span
from rekindle.spec.delta import DeltaSpec
from rekindle.spec.ffn import FfnSpec

T = TypeVar("T", bound=MixerSpec)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model. Dense and MoE differ in `ffn` only, hybrid and plain models in the list of mixers."""

    architecture: str  # the name of its family in models/
    name: str
    hidden: int
    vocab: int  # rows of the embedding and of the head
    mixers: tuple[MixerSpec, ...]  # one per layer; layers of one kind may share theirs
    ffn: FfnSpec
    eps: float
    context: int  # positions the model was trained for
    tied: bool  # the output matrix is the embedding
    nextn: int = 0  # next-token-prediction blocks after the layers; a drafter (speculative/mtp.py)
    # Ids that the tokenizer has a token for, where those are fewer than rows; 0: every row. No part of the identity: it
    # changes which tokens are drawn, not what any of them does to the state.
    tokens: int = field(default=0, repr=False)

    @property
    def drawable(self) -> int:
        """Ids below it may be drawn and may stand in a prompt; rows after them only pad the matrix."""
        return self.tokens or self.vocab

    @property
    def layers(self) -> int:
        return len(self.mixers)

    @property
    def whole(self) -> Span:
        return Span(0, self.layers)

    @property
    def distinct_mixers(self) -> tuple[MixerSpec, ...]:
        """The different specs, in the order of their first layers."""
        return tuple(dict.fromkeys(self.mixers))

    def mixers_of(self, kind: type[T]) -> tuple[T, ...]:
        """The different specs of one kind, in the order of their first layers."""
        return tuple(mixer for mixer in self.distinct_mixers if isinstance(mixer, kind))

    @property
    def attention(self) -> AttentionSpec:
        """Of a model whose attention layers are all alike."""
        (spec,) = self.mixers_of(AttentionSpec)
        return spec

    @property
    def delta(self) -> DeltaSpec | None:
        """Of a model whose DeltaNet layers, if it has some, are all alike."""
        return next(iter(self.mixers_of(DeltaSpec)), None)

    @property
    def identity(self) -> str:
        """What the fingerprint hashes of the numbers: all but the display name. Snapshots on disk are found by it, so
        the text of a model stays what it was when mixers were an enumeration beside one spec of each kind."""
        first = {kind: next((m for m in self.mixers if m.kind == kind), None) for kind in ("attention", "delta")}
        kinds = ", ".join(f"<Mixer.{mixer.kind.upper()}: {mixer.kind!r}>" for mixer in self.mixers)
        known = ", ".join(f"{kind}={spec!r}" for kind, spec in first.items())
        more = set(self.mixers) - set(first.values())
        fields = [
            f"architecture={self.architecture!r}, name='', hidden={self.hidden!r}, vocab={self.vocab!r}",
            f"mixers=({kinds}{',' if len(self.mixers) == 1 else ''}), {known}, ffn={self.ffn!r}, eps={self.eps!r}",
            f"context={self.context!r}, tied={self.tied!r}, nextn={self.nextn!r}",
            *([f"mixers={self.mixers!r}"] if more else []),
        ]
        return f"ModelSpec({', '.join(fields)})"

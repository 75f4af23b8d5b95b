"""What the mixers of a span keep and need, by their own answers: whatever their kinds are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import accumulate

from rekindle.spec import Bytes, MixerSpec, ModelSpec, Span


@dataclass(frozen=True, slots=True)
class SpanMixers:
    """How many layers of a span have which mixer."""

    counts: tuple[tuple[MixerSpec, int], ...]  # none of them 0

    def page_bytes(self, kv_type: str) -> int:
        """One page in all layers."""
        return sum(layers * mixer.page_bytes(kv_type) for mixer, layers in self.counts)

    def widest_page(self, kv_type: str) -> int:
        """One page of the layer with the largest ones; 0 where no layer has pages."""
        return max((mixer.page_bytes(kv_type) for mixer, _ in self.counts), default=0)

    def page_key_bytes(self) -> int:
        """The mean keys of one page in all layers."""
        return sum(layers * mixer.page_key_bytes() for mixer, layers in self.counts)

    def slot_bytes(self) -> Bytes:
        """State of one slot, by name, in the order in which the model's layers name it."""
        total = Counter[str]()
        for mixer, layers in self.counts:
            total.update({name: layers * size for name, size in mixer.slot_bytes().items()})
        return dict(total)

    def rewind_bytes(self, rows: int, value_bytes: int) -> int:
        """What one slot keeps of a block of `rows` rows under verify."""
        return sum(layers * mixer.rewind_bytes(rows, value_bytes) for mixer, layers in self.counts)

    def work_bytes(self, rows: int, decode_rows: int) -> Bytes:
        """The most that one layer needs, by name; layers take turns. Sorted, so that every split has the same order."""
        most: Bytes = {}
        for mixer, _ in self.counts:
            for name, size in mixer.work_bytes(rows, decode_rows).items():
                most[name] = max(size, most.get(name, 0))
        return dict(sorted(most.items()))


class MixerSums:
    """Answers which mixers a span has, from running sums: a search for the best split asks for every span."""

    def __init__(self, spec: ModelSpec) -> None:
        self._sums = {
            mixer: list(accumulate((int(other == mixer) for other in spec.mixers), initial=0))
            for mixer in spec.distinct_mixers
        }

    def of(self, span: Span) -> SpanMixers:
        layers = ((mixer, sums[span.stop] - sums[span.start]) for mixer, sums in self._sums.items())
        return SpanMixers(tuple((mixer, count) for mixer, count in layers if count))

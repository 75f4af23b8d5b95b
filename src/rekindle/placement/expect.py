"""How fast a plan is expected to decode: bytes that a step reads, divided by how fast they come.

A step of one sequence reads every weight that its token needs once, and the KV of its context: on the device at the
speed of its memory, beyond the pool and for cold experts over the link. KV that outgrows the pool has got the memory of
slots without a sequence, and that of the coldest experts, by then (lending.py). Every layer costs a fixed time beside
that. The shares below were fitted to the figures of an H200 in docs/bench.md, and a test holds them to those.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rekindle.placement.lending import lendable_pages, lent_slots
from rekindle.placement.reserve import Weigher
from rekindle.placement.types import ExpectedSpeed, LayerSizes, Plan, Sizes, StagePlan, pages_for
from rekindle.spec import PAGE

LAYER_SECONDS = 24.5e-6  # of every layer, whatever it reads: launches, norms, the recurrent step
WEIGHTS_SHARE = 0.84  # of a card's memory speed, at which the weights of one row come …
BATCH_SHARE = 0.38  # … and those of 2 to 16 rows: the products take longer than the bytes
KV_SHARE = 0.75  # of a card's memory speed, at which attention reads pages
LINK_SHARE = 0.81  # of a link's nominal speed, at which pages come over it …
EXPERT_SHARE = 0.65  # … and the first missing expert of a layer
HELPED = 0.45  # of that time, for every further one: CPU threads compute some of them meanwhile
MOST_ROWS = 16  # that were fitted: a dense model is slower with more
SHOWN = (0, 8_192, 32_768, 65_536)  # contexts that are shown beside the limit


def expected(plan: Plan, sizes: Sizes, context: int, sequences: int = 1) -> ExpectedSpeed | None:
    """None where so much KV does not fit anywhere, or where the speed of some device is not known, or is that of a CPU:
    their kernels were not fitted."""
    if any(stage.device.rates is None or stage.device.is_cpu for stage in plan.stages):
        return None
    if sequences * pages_for(context) > plan.live_pages:
        return None
    steps = [_Step(plan, sizes, stage, context, sequences) for stage in plan.stages]
    seconds = sum(step.seconds for step in steps)  # one token passes all stages
    return ExpectedSpeed(
        context,
        sequences,
        sequences / seconds,
        min(step.tokens_here for step in steps),
        sum(step.link_bytes for step in steps),
        plan.hot - round(sum(sum(step.lent) for step in steps)),
    )


def expectations(plan: Plan, sizes: Sizes) -> tuple[tuple[ExpectedSpeed, ExpectedSpeed | None], ...]:
    """At every context that is shown: of one sequence, and of as many as the plan has slots for, up to MOST_ROWS."""
    limit, several = plan.wishes.context, min(plan.wishes.sequences, MOST_ROWS)
    contexts = (*(shown for shown in SHOWN if shown < limit), limit)
    pairs = ((expected(plan, sizes, context), expected(plan, sizes, context, several)) for context in contexts)
    return tuple((alone, together) for alone, together in pairs if alone is not None)


@dataclass(frozen=True, slots=True)
class _Step:
    """One decode step on one stage."""

    plan: Plan
    sizes: Sizes
    stage: StagePlan
    context: int  # of each sequence
    rows: int

    @property
    def seconds(self) -> float:
        rates = self.stage.device.rates
        assert rates is not None, "asked only where they are known"
        weights = rates.memory * (WEIGHTS_SHARE if self.rows == 1 else BATCH_SHARE)
        here = self.weight_bytes / weights + self._kv_here / (rates.memory * KV_SHARE)
        away = self._kv_away / (rates.link * LINK_SHARE) + self._waited_for / (rates.link * EXPERT_SHARE)
        return len(self.stage.span) * LAYER_SECONDS + here + away

    @property
    def weight_bytes(self) -> float:
        """On the device: what one step reads of them, with routing that favours no expert."""
        stage, sizes = self.stage, self.sizes.on(self.stage.device)
        weights = Weigher(self.plan.spec, sizes).weigh(stage.span)
        last = stage.span.stop == self.plan.spec.layers
        plain = weights.mixers + weights.dense + weights.shared + (sizes.head + sizes.norms if last else 0)
        return plain + sum(self._asked(layer.experts) * layer.expert for layer in self._layers())

    @property
    def tokens_here(self) -> int:
        """Of KV that is attended on the device, of all rows together."""
        return min(self.rows * self.context, self._pool_tokens)

    @property
    def lent_pages(self) -> int:
        """That the pool has got from experts, for the contexts that are live."""
        short = self.rows * pages_for(self.context) - self.stage.pages_beside(self.rows)
        return max(0, min(short, lendable_pages(self.stage.lendable, self._lending, self.stage.page_bytes)))

    @property
    def lent(self) -> tuple[float, ...]:
        """Slots for them per layer; () where none can be lent."""
        return lent_slots(self.stage.lendable, self._lending, self.stage.page_bytes, self.lent_pages)

    @property
    def _lending(self) -> list[LayerSizes]:
        return self._layers() if self.stage.lendable else []

    @property
    def _pool_tokens(self) -> int:
        return (self.stage.pages_beside(self.rows) + self.lent_pages) * PAGE

    @property
    def link_bytes(self) -> int:
        return round(self._kv_away + self._missing)

    @property
    def _kv_here(self) -> float:
        return self.tokens_here * self._token_bytes

    @property
    def _kv_away(self) -> float:
        """Beyond the pool, where it lies. In sparse mode no sequence attends more than the pool holds."""
        attended = self.rows * self.context
        if self.plan.wishes.kv_mode == "sparse":
            attended = self.rows * min(self.context, self._pool_tokens)
        return (attended - min(attended, self._pool_tokens)) * self._token_bytes

    @property
    def _token_bytes(self) -> float:
        return self.stage.page_bytes / PAGE

    @property
    def _missing(self) -> float:
        """Bytes of cold experts that a step asks for and the expert cache does not hold."""
        return sum(count * layer.expert for layer, count in self._missing_of_layers())

    @property
    def _waited_for(self) -> float:
        """The same, in bytes whose time over the link is as long as the step waits."""
        total = 0.0
        for layer, count in self._missing_of_layers():
            asked = self._asked(layer.experts)
            first = 1 - (1 - min(1.0, count / asked)) ** asked  # how likely any is missing
            total += (first + HELPED * (count - first)) * layer.expert
        return total

    def _missing_of_layers(self) -> Iterator[tuple[LayerSizes, float]]:
        """Layers with experts, and how many of them a step asks for and does not find."""
        stage = self.stage
        lent = self.lent or (0.0,) * len(stage.hot)
        for i, (layer, hot, cached) in enumerate(zip(self._layers(), stage.hot, stage.expert_cache_slots, strict=True)):
            if layer.experts:
                here = min(layer.experts, len(hot) + cached - lent[i])
                yield layer, self._absent(stage.span.start + i, layer.experts, here)

    def _absent(self, index: int, experts: int, here: float) -> float:
        """Different experts of a layer that the rows use, if the `here` most used ones are on the device."""
        counts = None if self.plan.wishes.counts is None else sorted(self.plan.wishes.counts[index], reverse=True)
        if counts is None or not any(counts):
            return self._asked(experts) * (experts - here) / experts
        total, used = sum(counts), self.plan.spec.ffn.used
        asked = [1 - (1 - min(1.0, used * count / total)) ** self.rows for count in counts[int(here) :]]
        return sum(asked) - (here - int(here)) * (asked[0] if asked else 0.0)

    def _asked(self, experts: int) -> float:
        """Different experts of a layer that the rows use."""
        used = self.plan.spec.ffn.used
        return experts * (1 - (1 - used / experts) ** self.rows) if experts else 0.0

    def _layers(self) -> list[LayerSizes]:
        layers = self.sizes.on(self.stage.device).layers
        return [layers[i] for i in self.stage.span.layers]

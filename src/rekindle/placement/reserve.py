"""What a stage reserves before experts and pages are allocated: every byte of it by name.

Nothing here depends on the context limit, so a higher limit never costs a device anything but the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from rekindle.buffers import (
    CAPTURED_PAGES,
    DRAWN_ROWS,
    RECORDED_ROWS,
    SCRATCH,
    SINK_PAGES,
    SLAB_BYTES,
    SLAB_MAKERS,
    STAGED_PAGES,
    STAGED_PARTS,
    TAIL_PAGES,
    UPLOAD_SLABS,
    USUAL_ROWS,
    captures_in_flight,
    staged_experts,
)
from rekindle.errors import BadConfig
from rekindle.placement.mixers import MixerSums, SpanMixers
from rekindle.placement.types import (
    CAPTURES,
    LONGEST_CONTEXT,
    Device,
    Item,
    LayerSizes,
    Sizes,
    Wishes,
    pages_for,
)
from rekindle.spec import ModelSpec, Span
from rekindle.spec.base import F32

MIB = 1 << 20
RUNTIME = 256 * MIB  # driver context, loaded kernels, library workspaces of a GPU
MARGIN_PART = 32  # the margin is this part of the budget …
MARGIN_MOST = 512 * MIB  # … and never more than this
STAGING_SLABS = UPLOAD_SLABS + 2 + SLAB_MAKERS  # of every GPU: for uploads, two that captures fill, those being made
STOCK_MOST = 256  # slabs of one GPU that wait for captures and for what is read from disk …
STOCK_PART = 32  # … and of all GPUs together at most this part of the RAM
KEYED_PAGES = pages_for(LONGEST_CONTEXT)  # pages that can be chosen among, of all sequences together
LOOKUP_BYTES = 300  # of RAM that prompt lookup keeps for a token of a live sequence, as measured
KEY_COPIES = 3  # with the page, in its sequence's list, and in the next list while that one grows

MOVING_PAGES = 2  # that no pool can do without, beside its sink and tail


@dataclass(frozen=True, slots=True)
class SpanWeights:
    """Bytes of one span's weights, and its mixers."""

    mixers: int
    dense: int
    shared: int
    experts: int  # bytes of all routed experts
    state: SpanMixers


class Weigher:
    """Answers what any span of the model weighs, from running sums."""

    def __init__(self, spec: ModelSpec, sizes: Sizes) -> None:
        if len(sizes.layers) != spec.layers:
            raise BadConfig(f"sizes describe {len(sizes.layers)} layers, the model has {spec.layers}")
        self._mixers = MixerSums(spec)
        self._sums = [
            list(accumulate(values, initial=0))
            for values in (
                [layer.mixer for layer in sizes.layers],
                [layer.dense for layer in sizes.layers],
                [layer.shared for layer in sizes.layers],
                [layer.expert * layer.experts for layer in sizes.layers],
            )
        ]

    def weigh(self, span: Span) -> SpanWeights:
        mixers, dense, shared, experts = (sums[span.stop] - sums[span.start] for sums in self._sums)
        return SpanWeights(mixers, dense, shared, experts, self._mixers.of(span))


def weight_bytes(sizes: Sizes, weights: SpanWeights, first: bool, last: bool) -> int:
    """Of a stage, with the embedding wherever it lies."""
    outer = sizes.embedding_of(first, last) + (sizes.norms + sizes.head if last else 0)
    return weights.mixers + weights.dense + weights.shared + weights.experts + outer


def least_pages(wishes: Wishes) -> int:
    """The smallest pool that can run: open pages of all sequences and one chunk of prefill, or what paging needs."""
    open_pages = 2 if wishes.rewind_rows else 1  # a block may lie across a page's edge
    running = SINK_PAGES + wishes.sequences * open_pages + pages_for(wishes.chunk)
    return min(wishes.full_pages, max(SINK_PAGES + TAIL_PAGES + MOVING_PAGES, running))


def margin(budget: int) -> int:
    return min(budget // MARGIN_PART, MARGIN_MOST)


def smallest_budget(needed: int, margins: int = 1) -> int:
    """The least budget that leaves `needed` bytes beside its margin; RAM has one for each device that is all of it."""
    budget = needed
    while (enough := needed + margins * margin(budget)) > budget:
        budget = enough
    return budget


def chooses_by_keys(wishes: Wishes) -> bool:
    """Sparse mode keeps the mean key of every sealed page, wherever the page is."""
    return wishes.kv_mode == "sparse" and wishes.kv_policy == "qk"


def staging_bytes(layers: dict[int, LayerSizes]) -> int:
    """Where cold experts pass through the device, for every kind of layer; not needed while all of them are hot."""
    kinds = {(layer.expert, staged_experts(layer.experts)) for layer in layers.values()}
    return STAGED_PARTS * sum(size * slots for size, slots in kinds)


def fixed_items(
    spec: ModelSpec,
    sizes: Sizes,
    wishes: Wishes,
    device: Device,
    weights: SpanWeights,
    first: bool,
    last: bool,
    tapped: int,
) -> list[Item]:
    """Weights that are always on the device, state, and work memory; without margin, experts and pool. tapped: layers
    of the stage that a drafter reads."""
    return [
        Item("embedding", 0 if device.is_cpu else sizes.embedding_of(first, last)),  # a CPU has it as stored, in RAM
        Item("mixers", weights.mixers),
        Item("dense ffn", weights.dense),
        Item("routers and shared experts", weights.shared),
        Item("final norm", sizes.norms if last else 0),
        Item("head", sizes.head if last else 0),
        Item("drafter", wishes.drafter_bytes if last else 0),  # with all features beside it, where there is one
        Item("features", 0 if last and wishes.drafter_bytes else tapped * _tap_bytes(spec, wishes, device)),
        *_state_items(wishes, device, weights.state),
        *_work_items(spec, sizes, wishes, device, weights.state, last),
    ]


def _tap_bytes(spec: ModelSpec, wishes: Wishes, device: Device) -> int:
    """Of one tapped layer: what leaves it in a chunk, the rows of it that are sent on, and on a GPU a buffer that
    recorded chunks write and one that other recorded steps write."""
    decode_rows = wishes.sequences * (1 + wishes.rewind_rows)
    rows = 2 * wishes.chunk + (0 if device.is_cpu else max(USUAL_ROWS, _recorded_rows(wishes)) + decode_rows)
    return rows * spec.hidden * wishes.compute_bytes


def _state_items(wishes: Wishes, device: Device, mixers: SpanMixers) -> list[Item]:
    slots, rows = wishes.sequences, wishes.rewind_rows
    by_name, page = mixers.slot_bytes(), mixers.page_bytes(wishes.kv_type)
    slot = sum(by_name.values())
    apart = 0 if device.is_cpu else CAPTURED_PAGES * page  # a CPU copies pages into the snapshot at once
    return [
        *(Item(name, slots * size) for name, size in by_name.items()),
        Item("padding slot and page", slot + page),  # padded rows of a replayed graph write here
        # Padding is a block, too.
        Item("rewind rows", (slots + 1) * mixers.rewind_bytes(rows, F32 if device.is_cpu else wishes.compute_bytes)),
        Item(CAPTURES, captures_in_flight(wishes.chunk) * (slot + page) + apart),
    ]


def _work_items(
    spec: ModelSpec, sizes: Sizes, wishes: Wishes, device: Device, mixers: SpanMixers, last: bool
) -> list[Item]:
    decode_rows = wishes.sequences * (1 + wishes.rewind_rows)
    rows = wishes.chunk + decode_rows
    gpu = not device.is_cpu
    widest_page = mixers.widest_page(wishes.kv_type)
    keys = KEY_COPIES * KEYED_PAGES * mixers.page_key_bytes()
    return [
        Item("page tables", wishes.sequences * pages_for(LONGEST_CONTEXT) * 4 if widest_page else 0),
        Item("page staging", 2 * STAGED_PAGES * widest_page if gpu else 0),
        Item("page keys", keys if chooses_by_keys(wishes) else 0),
        Item("activations", rows * _row_bytes(spec, wishes.compute_bytes)),
        # logits, the sampler's copy, and what penalties count of each sequence
        Item("logits", (2 * decode_rows + wishes.sequences) * spec.vocab * F32 if last else 0),
        Item("recorded draws", _drawing_bytes(spec, wishes.sequences) if gpu and last else 0),
        Item("expand scratch", expanded_values(sizes) * wishes.compute_bytes),
        *(Item(name, size) for name, size in mixers.work_bytes(rows, decode_rows).items()),
        Item("recorded steps", _recorded_bytes(spec, wishes, mixers) if gpu else 0),
        Item("kernels and runtime", RUNTIME if gpu else 0),
    ]


def _recorded_bytes(spec: ModelSpec, wishes: Wishes, mixers: SpanMixers) -> int:
    """Graphs share work memory that nothing else uses: what the longest recorded chunk computes in; and what a section
    of a chunk leaves to the next one."""
    rows = _recorded_rows(wishes)
    between = max(USUAL_ROWS, rows) * spec.hidden * wishes.compute_bytes
    return rows * _row_bytes(spec, wishes.compute_bytes) + sum(mixers.work_bytes(rows, 1).values()) + between


def _recorded_rows(wishes: Wishes) -> int:
    """Of the longest recorded chunk."""
    return min(wishes.chunk, RECORDED_ROWS)


def _drawing_bytes(spec: ModelSpec, sequences: int) -> int:
    """Grammars' masks, and in memory that recorded draws share the larger of candidates (at most 128 of every 1024
    logits, of 8 bytes) and of logits that are drawn from without top-k."""
    shared = max(DRAWN_ROWS * spec.vocab, min(sequences, DRAWN_ROWS) * spec.vocab * F32)
    return DRAWN_ROWS * (spec.vocab // 8) + shared


def _row_bytes(spec: ModelSpec, compute_bytes: int) -> int:
    """One row at the widest point of a layer: residual, its sum and its norm, then the mixer or the feed-forward. Of
    the whole model, so that the split does not change it."""
    mixers = max(mixer.row_values for mixer in spec.distinct_mixers) * compute_bytes
    return 3 * spec.hidden * compute_bytes + max(spec.ffn.row_bytes(spec.hidden, compute_bytes), mixers)


def expanded_values(sizes: Sizes) -> int:
    """Quantised weights that a stage has as values at one time: in one buffer, that all its products share."""
    return min(sizes.widest, SCRATCH)


def pins_ram(device: Device) -> bool:
    """Whether this machine's RAM is pinned for it."""
    return not device.is_cpu and not device.remote


def stock_bytes(ram: int, gpus: int, left: int) -> int:
    """Pinned RAM that waits for captures, of `left` bytes; with less of it captures wait for the system instead."""
    return min(gpus * STOCK_MOST * SLAB_BYTES, ram // STOCK_PART, left)


def expert_layers(sizes: Sizes, span: Span) -> dict[int, LayerSizes]:
    """The span's layers that route, by index."""
    return {i: sizes.layers[i] for i in span.layers if sizes.layers[i].experts}

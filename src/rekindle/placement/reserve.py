"""What a stage reserves before it buys experts and pages: every byte of it by name.

Nothing here depends on the context limit, so a higher limit never costs a device anything but the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from rekindle.errors import BadConfig
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
from rekindle.spec import PAGE, Mixer, ModelSpec, Span

MIB = 1 << 20
F16, F32 = 2, 4
RUNTIME = 256 * MIB  # driver context, loaded kernels, library workspaces of a GPU
MARGIN_PART = 32  # the margin is this part of the budget …
MARGIN_MOST = 512 * MIB  # … and never more than this
EXPANDED = 1 << 28  # weights that are values at one time, as in the kernels, which expand more in slices of rows
IN_FLIGHT = 2  # captures whose copies to the host are under way
CAPTURED_PAGES = 64  # pages that captures set apart on a GPU until they are copied; a restore passes through as much
SLAB = 16 * MIB  # a piece of pinned RAM
STAGING_SLABS = 7  # of every GPU: four through which what is not pinned goes up, two in use and one on its way to stock
STOCK_MOST = 32  # slabs of one GPU that wait for captures …
STOCK_PART = 64  # … and of all GPUs together at most this part of the RAM
REMOTE_STOCK = 8  # slabs of a GPU in another machine, whose RAM is not ours to share out
STAGED_PAGES = 2 * 64  # pages of one layer in the two buffers between host and device
STAGED_EXPERTS = 16  # in each of the two halves through which cold experts of one kind pass in prefill
KEYED_PAGES = pages_for(LONGEST_CONTEXT)  # pages that can be chosen among, of all sequences together
KEY_COPIES = 3  # with the page, in its sequence's list, and in the next list while that one grows
ATTENTION_SPLITS = 16  # parts into which decode cuts a long sequence
SUB_CHUNK = 64  # rows the chunked delta rule solves at once

# Pages no pool can do without: the sink, the four before the append head, and two to move.
SINK_PAGES, TAIL_PAGES, MOVING_PAGES = 1, 4, 2


@dataclass(frozen=True, slots=True)
class SpanWeights:
    """Bytes and layer counts of one span."""

    mixers: int
    dense: int
    shared: int
    experts: int  # bytes of all routed experts
    attention_layers: int
    delta_layers: int


class Weigher:
    """Answers what any span of the model weighs, from running sums."""

    def __init__(self, spec: ModelSpec, sizes: Sizes) -> None:
        if len(sizes.layers) != spec.layers:
            raise BadConfig(f"sizes describe {len(sizes.layers)} layers, the model has {spec.layers}")
        self._sums = [
            list(accumulate(values, initial=0))
            for values in (
                [layer.mixer for layer in sizes.layers],
                [layer.dense for layer in sizes.layers],
                [layer.shared for layer in sizes.layers],
                [layer.expert * layer.experts for layer in sizes.layers],
                [int(mixer is Mixer.ATTENTION) for mixer in spec.mixers],
                [int(mixer is Mixer.DELTA) for mixer in spec.mixers],
            )
        ]

    def weigh(self, span: Span) -> SpanWeights:
        return SpanWeights(*(sums[span.stop] - sums[span.start] for sums in self._sums))


def weight_bytes(sizes: Sizes, weights: SpanWeights, first: bool, last: bool) -> int:
    """Of a stage, with the embedding wherever it lies."""
    outer = (sizes.embedding if first else 0) + (sizes.norms + sizes.head if last else 0)
    return weights.mixers + weights.dense + weights.shared + weights.experts + outer


def kv_token_bytes(spec: ModelSpec, kv_type: str) -> int:
    """K and V of one token in ONE attention layer."""
    values = spec.attention.kv_values_per_token
    if kv_type == "q8":  # 32 values and their scale take 34 bytes
        if spec.attention.head_dim % 32:
            raise BadConfig(f"q8 KV packs 32 values, the model's heads have {spec.attention.head_dim}")
        return values // 32 * 34
    return values * (4 if kv_type == "f32" else 2)


def state_bytes(spec: ModelSpec, layers: int) -> int:
    """Recurrent matrices of one slot in so many DeltaNet layers."""
    return layers * spec.delta.state_values * F32 if spec.delta else 0


def window_bytes(spec: ModelSpec, layers: int) -> int:
    """Convolution windows of one slot in so many DeltaNet layers."""
    return layers * spec.delta.window_values * F32 if spec.delta else 0


def rewind_bytes(spec: ModelSpec, layers: int, rows: int) -> int:
    """Rows (convolution input, k, δ, g) that one slot keeps while a block is verified."""
    if spec.delta is None:
        return 0
    delta = spec.delta
    values = delta.conv_channels + delta.value_heads * (delta.key_dim + delta.value_dim + 1)
    return layers * rows * values * F32


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
    kinds = {(layer.expert, min(STAGED_EXPERTS, layer.experts)) for layer in layers.values()}
    return 2 * sum(size * slots for size, slots in kinds)


def fixed_items(
    spec: ModelSpec, sizes: Sizes, wishes: Wishes, device: Device, weights: SpanWeights, first: bool, last: bool
) -> list[Item]:
    """Weights that are always on the device, state, and work memory; without margin, experts and pool."""
    return [
        Item("embedding", sizes.embedding if first and not device.is_cpu else 0),  # on a CPU the file stays mapped
        Item("mixers", weights.mixers),
        Item("dense ffn", weights.dense),
        Item("routers and shared experts", weights.shared),
        Item("final norm", sizes.norms if last else 0),
        Item("head", sizes.head if last else 0),
        Item("drafter", wishes.drafter_bytes if last else 0),
        *_state_items(spec, wishes, device, weights),
        *_work_items(spec, sizes, wishes, device, weights, last),
    ]


def _state_items(spec: ModelSpec, wishes: Wishes, device: Device, weights: SpanWeights) -> list[Item]:
    state, window = state_bytes(spec, weights.delta_layers), window_bytes(spec, weights.delta_layers)
    page = weights.attention_layers * PAGE * kv_token_bytes(spec, wishes.kv_type)
    slots, rows = wishes.sequences, wishes.rewind_rows
    apart = 0 if device.is_cpu else CAPTURED_PAGES * page  # a CPU copies pages into the snapshot at once
    return [
        Item("recurrent state", slots * state),
        Item("conv windows", slots * window),
        Item("padding slot and page", state + window + page),  # padded rows of a replayed graph write here
        Item("rewind rows", slots * rewind_bytes(spec, weights.delta_layers, rows)),
        Item("rewind bases", slots * (state + window) if rows else 0),  # the state before the block
        Item(CAPTURES, IN_FLIGHT * (state + window + page) + apart),
    ]


def _work_items(
    spec: ModelSpec, sizes: Sizes, wishes: Wishes, device: Device, weights: SpanWeights, last: bool
) -> list[Item]:
    decode_rows = wishes.sequences * (1 + wishes.rewind_rows)
    rows = wishes.chunk + decode_rows
    kv_page = PAGE * kv_token_bytes(spec, wishes.kv_type)
    gpu = not device.is_cpu
    has_attention, has_delta = weights.attention_layers > 0, weights.delta_layers > 0
    partials = decode_rows * spec.attention.heads * ATTENTION_SPLITS * (spec.attention.head_dim + 2) * F32
    keys = weights.attention_layers * spec.attention.kv_heads * spec.attention.head_dim * F16
    return [
        Item("page tables", wishes.sequences * pages_for(LONGEST_CONTEXT) * 4 if has_attention else 0),
        Item("page staging", STAGED_PAGES * kv_page if has_attention and gpu else 0),
        Item("page keys", KEY_COPIES * KEYED_PAGES * keys if chooses_by_keys(wishes) else 0),
        Item("activations", rows * _row_bytes(spec, wishes.compute_bytes)),
        Item("logits", 2 * decode_rows * spec.vocab * F32 if last else 0),  # logits, and the sampler's copy
        Item("expand scratch", expanded_values(sizes) * wishes.compute_bytes),
        Item("attention partials", partials if has_attention else 0),
        Item("delta scratch", _delta_scratch(spec, rows) if has_delta else 0),
        Item("kernels and runtime", RUNTIME if gpu else 0),
    ]


def _row_bytes(spec: ModelSpec, compute_bytes: int) -> int:
    """One row at the widest point of a layer: residual, its sum and its norm, then the mixer or the feed-forward."""
    attention, delta, ffn = spec.attention, spec.delta, spec.ffn
    q = attention.heads * attention.head_dim
    widths = [q * (3 if attention.gated else 2) + attention.kv_values_per_token]
    if delta:
        widths.append(2 * delta.conv_channels + 2 * delta.inner + 2 * delta.value_heads)
    if ffn.is_moe:
        widths.append(ffn.experts + ffn.used * (3 * ffn.expert_width + spec.hidden) + 3 * ffn.shared_width)
    else:
        widths.append(3 * ffn.width)
    return (3 * spec.hidden + max(widths)) * compute_bytes


def _delta_scratch(spec: ModelSpec, rows: int) -> int:
    """Terms of the chunked delta rule: solved keys and values, queries, writes, and the matrices between rows."""
    assert spec.delta is not None, "a DeltaNet layer in a model without DeltaNet sizes"
    per_row = 4 * spec.delta.key_dim + 3 * spec.delta.value_dim + 5 * SUB_CHUNK
    return rows * spec.delta.value_heads * per_row * F32


def expanded_values(sizes: Sizes) -> int:
    """Quantised weights that a stage has as values at one time: in one buffer, that all its products share."""
    return min(sizes.widest, EXPANDED)


def pins_ram(device: Device) -> bool:
    """Whether this machine's RAM is pinned for it."""
    return not device.is_cpu and not device.remote


def stock_bytes(ram: int, gpus: int, left: int) -> int:
    """Pinned RAM that waits for captures, of `left` bytes; with less of it captures wait for the system instead."""
    return min(gpus * STOCK_MOST * SLAB, ram // STOCK_PART, left)


def expert_layers(sizes: Sizes, span: Span) -> dict[int, LayerSizes]:
    """The span's layers that route, by index."""
    return {i: sizes.layers[i] for i in span.layers if sizes.layers[i].experts}

"""Choosing tokens on a GPU: the highest logit of a row, the draw among a row's best, the draw among all of a row.

All three filters keep the first tokens of the descending order, so a filter is a cut. With few candidates the cut is
found among them in order. Without top-k it is found by its distance from the highest logit, in nats, five bits at a
time: every level sums the weights of 32 buckets of the bracket the level before chose. Sums are integers, so their
order does not matter: a row's draw is the same in every batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from rekindle.kernels.sampling import naive
from rekindle.kernels.sampling.naive import Penalty

PART = 4096  # logits one program reads
MOST = 128  # top-k up to which candidates are selected …
RUN = 1024  # … from runs of so many logits, at least four times the candidates they leave …
FINAL = 1024  # … until so few are left
OPEN_PART = 2048  # logits of one program where the whole vocabulary is drawn from
LEVELS = 5  # brackets of 32, 1, 2^-5 … 2^-20 nats, the last as fine as float32 logits
LOWEST = tl.constexpr(-(2**63) + 1)  # below the key of any logit
FIELDS = 4  # of a row's penalty: where its counts are, presence, frequency, repetition; drafted tokens follow
IN_PROMPT = tl.constexpr(naive.IN_PROMPT)
ONE = tl.constexpr(2.0**32)  # the highest weight as an integer


def argmax(logits: Tensor) -> Tensor:
    """naive.argmax."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, "the logits of a row lie side by side"
    parts = triton.cdiv(vocab, PART)
    values = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    _part_kernel[(parts, rows)](logits, values, tokens, logits.stride(0), vocab, parts, PART=PART, num_warps=8)
    return best_of_parts(values, tokens)


def best_of_parts(values: Tensor, tokens: Tensor) -> Tensor:
    """The highest of every part [rows, parts], and its token -> the row's token int64 [rows]."""
    rows, parts = values.shape
    out = torch.empty(rows, dtype=torch.int64, device=values.device)
    _best_kernel[(rows,)](values, tokens, out, parts, BLOCK=triton.next_power_of_2(parts), num_warps=1)
    return out


@triton.jit
def seen(value):
    """A NaN becomes infinite, so that the highest of a row tells whether a token can be drawn from it."""
    return tl.where(value == value, value, float("inf"))


@triton.jit
def _unless_broken(token, top):
    return tl.where(tl.abs(top) < float("inf"), token, -1)


@triton.jit
def _part_kernel(logits, values, tokens, logit_row, vocab, parts, PART: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * PART + tl.arange(0, PART)
    value = tl.load(logits + row * logit_row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    best, which = tl.max(seen(value), axis=0, return_indices=True)  # the lowest index among equals
    tl.store(values + row * parts + part, best)
    tl.store(tokens + row * parts + part, (part * PART + which).to(tl.int64))


@triton.jit
def _best_kernel(values, tokens, out, parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    value = tl.load(values + row * parts + at, mask=at < parts, other=float("-inf"))
    best, which = tl.max(value, axis=0, return_indices=True)
    tl.store(out + row, _unless_broken(tl.load(tokens + row * parts + which), best))


def sample(logits: Tensor, settings: Tensor) -> Tensor:
    """naive.sample; settings float32 [5, rows] on the host.

    Rows of one kind of filter are drawn together, and no kind's way depends on who else is in the batch.
    """
    temperature, top_k = settings[0], settings[1]
    narrow = (top_k > 0) & (top_k <= MOST) | (temperature == 0)
    wide = ~narrow & (top_k > 0)
    drawn = None
    for kind, draw_rows in ((narrow, draw_narrow), (~narrow & ~wide, draw_open), (wide, _draw_sorted)):
        if bool(kind.all()):
            return draw_rows(logits, settings)
        if bool(kind.any()):
            rows = kind.nonzero()[:, 0]
            at = rows.to(logits.device, non_blocking=True)
            if drawn is None:
                drawn = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
            drawn[at] = draw_rows(logits[at], settings[:, rows])
    assert drawn is not None, "there is at least one row"
    return drawn


def _draw_sorted(logits: Tensor, settings: Tensor) -> Tensor:
    vocab = logits.shape[1]
    return naive.draw(*naive.highest(logits, vocab), _settings_on(logits.device, settings), vocab)


def _settings_on(device: torch.device, settings: Tensor) -> Tensor:
    return _sent(settings.contiguous(), device)


def keep_allowed(logits: Tensor, masks: Tensor, rows: Sequence[int], own: bool = False) -> Tensor:
    """naive.keep_allowed; masks on the host."""
    count, vocab = logits.shape
    assert logits.stride(1) == 1, "the logits of a row lie side by side"
    which = [-1] * count  # by row of logits: its mask
    for number, row in enumerate(rows):
        which[row] = number
    out = logits if own else torch.empty((count, vocab), dtype=logits.dtype, device=logits.device)
    _keep_kernel[(triton.cdiv(vocab, PART), count)](
        logits, _sent(masks, logits.device), _sent(torch.tensor(which, dtype=torch.int32), logits.device), out,
        logits.stride(0), out.stride(0), vocab, masks.shape[1], PART=PART, num_warps=8,
    )  # fmt: skip
    return out


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, without a wait: torch keeps pinned memory from its next user until the copy has run."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@triton.jit(do_not_specialize=["words"])
def _keep_kernel(logits, masks, which, out, logit_row, out_row, vocab, words, PART: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * PART + tl.arange(0, PART)
    inside = at < vocab
    value = tl.load(logits + row * logit_row + at, mask=inside)
    mask = tl.load(which + row).to(tl.int64)
    known = inside & (mask >= 0) & (at // 32 < words)
    word = tl.load(masks + mask * words + at // 32, mask=known, other=0)
    stays = (mask < 0) | (((word >> (at % 32)) & 1) == 1) | (value != value)
    tl.store(out + row * out_row + at, tl.where(stays, value, float("-inf")), mask=inside)


# Penalties


def penalise(logits: Tensor, penalties: Sequence[Penalty | None]) -> Tensor:
    """naive.penalise, with one upload and one launch for all rows."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, "the logits of a row lie side by side"
    drafted = max((len(penalty.drafted) for penalty in penalties if penalty is not None), default=0)
    orders = np.zeros((rows, FIELDS + drafted), dtype=np.int64)
    orders[:, FIELDS:] = -1
    for order, penalty in zip(orders, penalties, strict=True):
        if penalty is not None:
            order[0] = penalty.counts.data_ptr()
            order[1:FIELDS] = np.array(penalty[2:], dtype=np.float32).view(np.int32)
            order[FIELDS : FIELDS + len(penalty.drafted)] = penalty.drafted
    out = torch.empty((rows, vocab), dtype=logits.dtype, device=logits.device)
    _penalise_kernel[(triton.cdiv(vocab, PART), rows)](
        logits, _sent(torch.from_numpy(orders), logits.device), out, logits.stride(0), vocab, drafted,
        FIELDS=FIELDS, PART=PART, num_warps=8,
    )  # fmt: skip
    return out


@triton.jit
def _setting(order, field):
    return tl.load(order + field).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def penalised(value, entry, answered, presence, frequency, repetition):
    """Logits of tokens that stand `answered` times in the answer; entry: of the counts."""
    repeated = tl.where(value > 0.0, value / repetition, value * repetition)
    value = tl.where((entry >= IN_PROMPT) | (answered > 0), repeated, value)
    return value - frequency * answered.to(tl.float32) - tl.where(answered > 0, presence, 0.0)


@triton.jit(do_not_specialize=["drafted"])
def _penalise_kernel(logits, orders, out, logit_row, vocab, drafted, FIELDS: tl.constexpr, PART: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * PART + tl.arange(0, PART)
    inside = at < vocab
    value = tl.load(logits + row * logit_row + at, mask=inside)
    order = orders + row * (FIELDS + drafted)
    counts = tl.load(order)
    if counts != 0:
        entry = tl.load(counts.to(tl.pointer_type(tl.int32)) + at, mask=inside, other=0)
        answered = entry & (IN_PROMPT - 1)
        for place in range(drafted):
            answered += (at == tl.load(order + FIELDS + place)).to(tl.int32)
        value = penalised(value, entry, answered, _setting(order, 1), _setting(order, 2), _setting(order, 3))
    tl.store(out + row * vocab + at, value, mask=inside)


def count_drawn(drawn: Tensor, counts: Sequence[Tensor | None]) -> None:
    """naive.count_drawn, behind the draw and without a wait for it."""
    addresses = torch.tensor([0 if row is None else row.data_ptr() for row in counts], dtype=torch.int64, device="cpu")
    _count_kernel[(len(counts),)](drawn, _sent(addresses, drawn.device), num_warps=1)


@triton.jit
def _count_kernel(drawn, addresses):
    row = tl.program_id(0)
    token, address = tl.load(drawn + row), tl.load(addresses + row)
    if (address != 0) & (token >= 0):
        entry = address.to(tl.pointer_type(tl.int32)) + token
        tl.store(entry, tl.load(entry) + 1)


# Few candidates: the best of every run of the vocabulary, the best of those, and the draw among them


def draw_narrow(logits: Tensor, settings: Tensor) -> Tensor:
    """Rows with 0 < top_k ≤ MOST, or temperature 0."""
    most = int(settings[1].clamp(max=MOST).max())
    return draw_best(logits, _settings_on(logits.device, settings), width_for(most))


def width_for(top_k: int) -> int:
    """Candidates that are selected where the highest top-k of a batch is this."""
    return max(16, triton.next_power_of_2(top_k))


def draw_best(logits: Tensor, settings: Tensor, width: int) -> Tensor:
    """The draw among the `width` highest logits of every row, a power of two; settings on the device."""
    assert logits.stride(1) == 1, "the logits of a row lie side by side"
    return draw_keys(_best_of_runs(logits, logits.shape[1], logits.stride(0), width, first=True), settings, width)


def draw_keys(keys: Tensor, settings: Tensor, width: int) -> Tensor:
    """The draw among the `width` highest of every row's keys int64 [rows, count]."""
    while keys.shape[1] > FINAL:
        keys = _best_of_runs(keys, keys.shape[1], keys.shape[1], width, first=False)
    rows, count = keys.shape
    out = torch.empty(rows, dtype=torch.int64, device=keys.device)
    _draw_narrow_kernel[(rows,)](
        keys, settings, out, rows, count,
        BLOCK=max(width, triton.next_power_of_2(count)), WIDTH=width, num_warps=4,
    )  # fmt: skip
    return out


def _best_of_runs(source: Tensor, count: int, row: int, width: int, first: bool) -> Tensor:
    """Keys int64 [rows, runs · width]; row: from one row of the source to the next."""
    run = run_of(width)
    runs = triton.cdiv(count, run)
    keys = torch.empty((source.shape[0], runs * width), dtype=torch.int64, device=source.device)
    _best_of_run_kernel[(runs, source.shape[0])](
        source, keys, row, count, runs, FIRST=first, RUN=run, WIDTH=width, num_warps=4
    )
    return keys


def run_of(width: int) -> int:
    """Logits, or keys, of which one program keeps the `width` highest."""
    return max(RUN, 4 * width)


@triton.jit
def key_of(logit, token):
    bits = (seen(logit) + 0.0).to(tl.int32, bitcast=True)  # adding zero makes one zero of two
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit(do_not_specialize=["runs"])
def _best_of_run_kernel(
    source, keys, source_row, count, runs, FIRST: tl.constexpr, RUN: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The WIDTH highest of every run, as integers in the order (logit, then lower id)."""
    run, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = run * RUN + tl.arange(0, RUN)
    inside = at < count
    if FIRST:
        logit = tl.load(source + row * source_row + at, mask=inside, other=float("-inf")).to(tl.float32)
        key = tl.where(inside, key_of(logit, at), LOWEST)
    else:
        key = tl.load(source + row * source_row + at, mask=inside, other=LOWEST)
    to = keys + (row * runs + run) * WIDTH + tl.arange(0, WIDTH)
    tl.store(to, tl.topk(key, WIDTH))


@triton.jit(do_not_specialize=["rows", "count"])
def _draw_narrow_kernel(keys, settings, out, rows, count, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(settings + row), tl.load(settings + rows + row)
    top_p, min_p = tl.load(settings + 2 * rows + row), tl.load(settings + 3 * rows + row)
    uniform = tl.load(settings + 4 * rows + row)
    at = tl.arange(0, BLOCK)
    key = tl.topk(tl.load(keys + row * count + at, mask=at < count, other=LOWEST), WIDTH)
    rank = tl.arange(0, WIDTH)
    bits = (key >> 32).to(tl.int32)
    value = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    value = tl.where(key == LOWEST, float("-inf"), value)
    token = 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
    greedy = temperature == 0.0
    top = tl.max(value, axis=0)
    weight = tl.where(value == top, 1.0, tl.exp((value - top) / tl.where(greedy, 1.0, temperature)))
    weight = tl.where(rank < tl.where(greedy, 1.0, top_k), weight, 0.0)
    before = tl.cumsum(weight, axis=0) - weight
    reach = tl.where(top_p < 1.0, top_p, 2.0) * tl.sum(weight, axis=0)  # twice the whole is never reached
    weight = tl.where((rank == 0) | (before < reach), weight, 0.0)
    weight = tl.where((rank == 0) | (weight >= min_p), weight, 0.0)
    # cumulated in the order of the vocabulary: what stands at this token and those before it
    earlier = token[:, None] <= token[None, :]
    cumulated = tl.sum(tl.where(earlier, weight[:, None], 0.0), axis=0)
    target = uniform * tl.max(cumulated, axis=0)
    drawn = tl.min(tl.where((cumulated > target) & (weight > 0.0), token, 0x7FFFFFFF), axis=0)
    tl.store(out + row, _unless_broken(drawn.to(tl.int64), top))


# All of the vocabulary: bracket the cut, then draw in the order of the vocabulary


def draw_open(logits: Tensor, settings: Tensor) -> Tensor:
    """Rows without top-k."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, "the logits of a row lie side by side"
    device = logits.device
    settings = _settings_on(device, settings)
    parts = triton.cdiv(vocab, OPEN_PART)
    block = triton.next_power_of_2(parts)
    peaks = torch.empty((rows, parts), dtype=torch.float32, device=device)
    masses = torch.empty((rows, parts), dtype=torch.float32, device=device)
    edges = torch.empty((rows, parts), dtype=torch.int32, device=device)
    tables = torch.empty((rows, LEVELS, 32), dtype=torch.int64, device=device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    shape = {"PART": OPEN_PART, "BLOCK": block, "LEVELS": LEVELS}
    row = logits.stride(0)
    _peak_kernel[(parts, rows)](logits, peaks, tables, row, vocab, parts, PART=OPEN_PART, LEVELS=LEVELS, num_warps=4)
    for level in range(LEVELS):
        _level_kernel[(parts, rows)](
            logits, settings, peaks, tables, row, vocab, parts, rows, level, **shape, num_warps=8
        )
    _mass_kernel[(parts, rows)](
        logits, settings, peaks, tables, masses, edges, row, vocab, parts, rows, **shape, num_warps=4
    )
    _pick_kernel[(rows,)](
        logits, settings, peaks, tables, masses, edges, out, row, vocab, parts, rows, **shape, num_warps=4
    )
    return out


@triton.jit(do_not_specialize=["parts"])
def _peak_kernel(
    logits, peaks, tables, logit_row, vocab, parts, PART: tl.constexpr, LEVELS: tl.constexpr
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * PART + tl.arange(0, PART)
    value = tl.load(logits + row * logit_row + at, mask=at < vocab, other=float("-inf"))
    tl.store(peaks + row * parts + part, tl.max(seen(value), axis=0))
    if part == 0:
        for level in tl.static_range(LEVELS):
            tl.store(tables + (row * LEVELS + level) * 32 + tl.arange(0, 32), tl.zeros([32], tl.int64))


@triton.jit
def _top(peaks, row, parts, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    return tl.max(tl.load(peaks + row * parts + at, mask=at < parts, other=float("-inf")), axis=0)


@triton.jit
def _distances(logits, row, logit_row, part, vocab, top, temperature, PART: tl.constexpr):
    """How far below the highest logit, in nats; infinite behind the end."""
    at = part * PART + tl.arange(0, PART)
    value = tl.load(logits + row * logit_row + at, mask=at < vocab, other=float("-inf"))
    return tl.where(value == top, 0.0, (top - value) / tl.where(temperature == 0.0, 1.0, temperature))


@triton.jit
def _bracket(tables, row, top_p, levels, LEVELS: tl.constexpr):
    """After so many levels: where the bracket of the cut begins, its width, the mass before it, what the cut must
    reach, and the mass inside."""
    lane = tl.arange(0, 32)
    table = tables + row * LEVELS * 32
    whole = tl.sum(tl.load(table + lane), axis=0)
    reach = (tl.where(top_p < 1.0, top_p, 2.0) * whole.to(tl.float32)).to(tl.int64)  # twice the whole is never reached
    low, width, above, inside = 0.0, 32.0, whole - whole, whole
    for level in range(levels):
        mass = tl.load(table + level * 32 + lane)
        before = above + tl.cumsum(mass, axis=0) - mass
        chosen = tl.maximum(tl.sum((before < reach).to(tl.int32), axis=0) - 1, 0)
        width = width / 32.0
        low += chosen.to(tl.float32) * width
        above += tl.sum(tl.where(lane < chosen, mass, 0), axis=0)
        inside = tl.sum(tl.where(lane == chosen, mass, 0), axis=0)
    return low, width, above, reach, inside


@triton.jit(do_not_specialize=["parts", "rows", "level"])
def _level_kernel(
    logits, settings, peaks, tables, logit_row, vocab, parts, rows, level,
    PART: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature, top_p = tl.load(settings + row), tl.load(settings + 2 * rows + row)
    top = _top(peaks, row, parts, BLOCK)
    distance = _distances(logits, row, logit_row, part, vocab, top, temperature, PART)
    low, width, _, _, _ = _bracket(tables, row, top_p, level, LEVELS)
    if level == 0:
        width = 32.0
    step = (distance - low) * (32.0 / width)
    bucket = tl.where((step >= 0.0) & (step < 32.0), step, 32.0).to(tl.int32)
    weight = tl.exp(-distance)
    lane = tl.arange(0, 32)
    sums = tl.sum(tl.where(bucket[:, None] == lane[None, :], weight[:, None], 0.0), axis=0)
    mass = (sums * ONE).to(tl.int64)
    tl.atomic_add(tables + (row * LEVELS + level) * 32 + lane, mass, mask=mass > 0, sem="relaxed")


@triton.jit(do_not_specialize=["parts", "rows"])
def _mass_kernel(
    logits, settings, peaks, tables, masses, edges, logit_row, vocab, parts, rows,
    PART: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Per part: the weight of what surely stays, and how many lie in the last bracket."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    temperature, top_p = tl.load(settings + row), tl.load(settings + 2 * rows + row)
    min_p = tl.load(settings + 3 * rows + row)
    top = _top(peaks, row, parts, BLOCK)
    distance = _distances(logits, row, logit_row, part, vocab, top, temperature, PART)
    low, width, _, _, _ = _bracket(tables, row, top_p, LEVELS, LEVELS)
    weight = tl.exp(-distance)
    stays = (distance < low) & (weight >= min_p)
    edge = (distance >= low) & (distance < low + width)
    tl.store(masses + row * parts + part, tl.sum(tl.where(stays, weight, 0.0), axis=0))
    tl.store(edges + row * parts + part, tl.sum(edge.to(tl.int32), axis=0))


@triton.jit(do_not_specialize=["parts", "rows"])
def _pick_kernel(
    logits, settings, peaks, tables, masses, edges, out, logit_row, vocab, parts, rows,
    PART: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature, top_p = tl.load(settings + row), tl.load(settings + 2 * rows + row)
    min_p, uniform = tl.load(settings + 3 * rows + row), tl.load(settings + 4 * rows + row)
    at = tl.arange(0, BLOCK)
    mass = tl.load(masses + row * parts + at, mask=at < parts, other=0.0)
    edge_count = tl.load(edges + row * parts + at, mask=at < parts, other=0)
    top = _top(peaks, row, parts, BLOCK)
    low, width, above, reach, inside = _bracket(tables, row, top_p, LEVELS, LEVELS)
    # Logits in the last bracket are as good as equal: of these the lowest ids stay, as many as it takes to reach.
    count = tl.maximum(tl.sum(edge_count, axis=0), 1)
    edge_weight = inside.to(tl.float32) / ONE / count
    wanted = (reach - above).to(tl.float32) / ONE / tl.maximum(edge_weight, 1e-30)
    kept = tl.maximum(tl.minimum(tl.ceil(wanted - 1e-4), count.to(tl.float32)), tl.where(low == 0.0, 1.0, 0.0))
    kept = tl.where(edge_weight >= tl.minimum(min_p, 1.0 - 1e-6), kept, 0.0).to(tl.int32)
    edges_before = tl.cumsum(edge_count, axis=0) - edge_count
    mass += tl.minimum(tl.maximum(kept - edges_before, 0), edge_count).to(tl.float32) * edge_weight
    cumulated = tl.cumsum(mass, axis=0)
    target = uniform * tl.max(cumulated, axis=0)
    last = tl.max(tl.where(mass > 0.0, at, 0), axis=0)
    part = tl.minimum(tl.min(tl.where(cumulated > target, at, BLOCK), axis=0), last)
    passed = tl.sum(tl.where(at < part, mass, 0.0), axis=0)
    room = kept - tl.sum(tl.where(at < part, edge_count, 0), axis=0)
    distance = _distances(logits, row, logit_row, part, vocab, top, temperature, PART)
    weight = tl.exp(-distance)
    edge = (distance >= low) & (distance < low + width)
    rank = tl.cumsum(edge.to(tl.int32), axis=0)
    stays = ((distance < low) & (weight >= min_p)) | (edge & (rank <= room))
    weight = tl.where(stays, weight, 0.0)
    inner = tl.arange(0, PART)
    reached = stays & (passed + tl.cumsum(weight, axis=0) > target)
    final = tl.max(tl.where(stays, inner, 0), axis=0)  # where rounding lets none exceed
    drawn = tl.minimum(tl.min(tl.where(reached, inner, PART), axis=0), final)
    tl.store(out + row, _unless_broken((part * PART + drawn).to(tl.int64), top))

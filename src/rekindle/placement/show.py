"""A plan for people, and a plan for programs."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import Any

from rekindle.placement.types import Item, Plan, StagePlan, pages_for
from rekindle.placement.units import gib
from rekindle.spec import PAGE, ModelSpec

WIDTH = 80  # characters of a line …
BAR = 64  # … and at most of a bar

# letter, what it stands for, the items under it; a mixer's own names stand under S and A
LEGEND: tuple[tuple[str, str, frozenset[str]], ...] = (
    (
        "W",
        "weights",
        frozenset({"embedding", "mixers", "dense ffn", "routers and shared experts", "final norm", "head"}),
    ),
    ("E", "hot experts", frozenset({"hot experts"})),
    ("R", "expert cache", frozenset({"expert cache"})),
    ("K", "KV pool", frozenset({"KV pool"})),
    (
        "S",
        "state",
        frozenset(
            {
                "padding slot and page",
                "rewind rows",
                "captures in flight",
            }
        ),
    ),
    ("D", "drafter", frozenset({"drafter", "features"})),
    (
        "A",
        "work memory",
        frozenset(
            {
                "page tables",
                "page staging",
                "page keys",
                "expert staging",
                "activations",
                "logits",
                "recorded draws",
                "expand scratch",
                "recorded steps",
            }
        ),
    ),
    ("M", "runtime and margin", frozenset({"kernels and runtime", "margin"})),
)
BESIDE = "B"  # what else lies in the RAM that a stage lives in
LEFT = "·"
SLOWER = "*"  # marks figures of several sequences that are below that of one
TIE = "\N{NO-BREAK SPACE}"


def show_plan(plan: Plan, width: int = WIDTH, ram_note: str = "") -> str:
    """Table, picture, expected speeds, reasons and alternatives, in lines of at most `width` characters."""
    wishes = plan.wishes
    head = (
        f"{plan.spec.name}: {wishes.sequences} × {wishes.context:,} tokens, {wishes.kv_type} KV, "
        f"{wishes.kv_mode} mode, RAM {gib(plan.machine.ram)}"
        f"{f' ({ram_note})' if ram_note else ''}"
    )
    blocks = [_folded(head, width), *_table(plan, width), _picture(plan, width), *_speeds(plan, width)]
    if plan.reasons:
        blocks.append("\n".join(["why", *(_folded(reason, width, 2) for reason in plan.reasons)]))
    if plan.alternatives:
        lines = (_folded(f"{other.name}: {other.changes}", width, 2) for other in plan.alternatives)
        blocks.append("\n".join(["or else", *lines]))
    return "\n\n".join(blocks)


def _folded(text: str, width: int, indent: int = 0) -> str:
    return textwrap.fill(
        text, width, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2), break_on_hyphens=False
    )


def _table(plan: Plan, width: int) -> list[str]:
    """One, or several below each other where the devices do not fit one line."""
    header = ["", *(stage.device.name for stage in plan.stages), "RAM"]
    rows = [["layers", *(str(stage.span) for stage in plan.stages), ""]]
    rows += [_item_row(name, plan) for name in _names(plan)]
    rows.append(["total", *(gib(stage.total) for stage in plan.stages), gib(plan.host_total)])
    lefts = ("" if stage.device.host else gib(stage.left) for stage in plan.stages)  # RAM is shown once, for all
    rows.append(["left", *lefts, gib(plan.host_left)])
    if plan.spec.ffn.is_moe:
        rows.append(["experts hot / cold", *(f"{s.hot_count:,} / {s.cold:,}" for s in plan.stages), ""])
    rows.append(["KV tokens", *(f"{s.pool_tokens:,}" for s in plan.stages), f"{_host_tokens(plan):,}"])
    if any(stage.slot_pages for stage in plan.stages):
        most = pages_for(plan.wishes.context)
        alone = (f"{min(most, stage.pages_beside(1)) * PAGE:,}" for stage in plan.stages)
        rows.append(["for one that runs alone", *alone, ""])
    return _align([header, *rows], width)


def _speeds(plan: Plan, width: int) -> list[str]:
    """What lies on the devices at some contexts, and how fast decode is expected to be there."""
    if not plan.expected:
        return []
    several = max(each.sequences for pair in plan.expected for each in pair if each is not None)
    header = ["context", "experts hot", "KV here", "over the link", "1 sequence "]
    header += [f"{several} sequences "] if several > 1 else []
    rows, linked = [header], False
    for alone, together in plan.expected:
        hot = f"{alone.hot:,}" if plan.spec.ffn.is_moe else "–"
        here = f"{alone.kv_tokens_on_device:,}"
        speeds = [f"{each.tokens_per_second:.0f} tok/s" if each else "does not fit" for each in (alone, together)]
        slower = together is not None and together.tokens_per_second < alone.tokens_per_second
        linked |= slower and together is not None and together.link_bytes > 0
        speeds[1] += SLOWER if slower else " "
        place = f"{alone.context:,}" if alone.context else "empty"
        rows.append([place, hot, here, gib(alone.link_bytes), *speeds[: len(header) - 4]])
    blocks = [_folded(_speeds_said(plan, several), width), *_align(rows, width)]
    if any(row[-1].endswith(SLOWER) for row in rows):
        why = "a step of a few rows reads its weights more slowly than a step of one"
        if linked:
            why = "KV, or experts whose place it has got, come over the link; with fewer --sequences the others wait"
        blocks.append(_folded(f"{SLOWER} slower than one alone: all {several} run in every step, and {why}", width))
    return blocks


def _speeds_said(plan: Plan, several: int) -> str:
    said = "expected of decode; what lies on the devices and comes over the link in a step is of one sequence"
    if several > 1:
        said += f"; the speed of {several} sequences is that of all together, each at that context"
    if plan.spec.ffn.is_moe:
        said += "; routing that favours no expert" if plan.wishes.counts is None else "; routing as it was counted"
    return said


def _item_row(name: str, plan: Plan) -> list[str]:
    cells = [stage.bytes_of(name) for stage in plan.stages]
    cells.append(sum(item.bytes for item in plan.host_items if item.name == name))
    return [name, *(gib(size) if size else "" for size in cells)]


def _names(plan: Plan) -> list[str]:
    """Every item of the plan, in the order of its first mention."""
    items = [item for stage in plan.stages for item in stage.items] + list(plan.host_items)
    return list(dict.fromkeys(item.name for item in items))


def _host_tokens(plan: Plan) -> int:
    return max(stage.host_pages for stage in plan.stages) * PAGE


def _align(rows: list[list[str]], width: int) -> list[str]:
    """Every table has the first column and as many of the others, in order, as fit the line."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    tables, first = [], 1
    while first < len(widths):
        last = first + 1
        while last < len(widths) and widths[0] + sum(2 + wide for wide in widths[first : last + 1]) <= width:
            last += 1
        shown = [row for row in rows if any(row[first:last])]
        cells = [[row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(first, last))] for row in shown]
        tables.append("\n".join("  ".join(row).rstrip() for row in cells))
        first = last
    return tables


def _picture(plan: Plan, width: int) -> str:
    names, sizes = ([len(text) for text in texts] for texts in zip(*map(_labels, plan.stages), strict=True))
    cells = min(BAR, width - max(names) - max(sizes) - 4)
    bars = [bar(stage, plan.spec, plan.left_of(stage), cells) for stage in plan.stages]
    lines = []
    for drawn, (name, size) in zip(bars, map(_labels, plan.stages), strict=True):
        lines.append(f"{name.ljust(max(names))} [{drawn}] {size}")
    meanings = {letter: words for letter, words, _ in LEGEND} | {BESIDE: "others in RAM", LEFT: "left"}
    legend = ", ".join(
        f"{letter} {words}".replace(" ", TIE) for letter, words in meanings.items() if letter in "".join(bars)
    )
    return "\n".join([*lines, _folded(legend, width, max(names) + 2).replace(TIE, " ")])


def _labels(stage: StagePlan) -> tuple[str, str]:
    """What stands left and right of a bar."""
    return stage.device.name, gib(stage.device.budget)


def bar(stage: StagePlan, spec: ModelSpec, left: int, length: int = BAR) -> str:
    """`length` characters; each cell shows the use of the byte in its middle."""
    mixer_names = {
        "S": frozenset(name for mixer in spec.distinct_mixers for name in mixer.slot_bytes()),
        "A": frozenset(name for mixer in spec.distinct_mixers for name in mixer.work_bytes(1, 1)),
    }
    edges: list[tuple[int, str]] = []
    filled = 0
    for letter, _, names in LEGEND:
        drawn = names | mixer_names.get(letter, frozenset())
        filled += sum(item.bytes for item in stage.items if item.name in drawn)
        edges.append((filled, letter))
    assert filled == stage.total, f"the legend names {filled} bytes of {stage.total}"
    edges.append((stage.device.budget - left, BESIDE))
    cells = []
    for cell in range(length):
        middle = (2 * cell + 1) * stage.device.budget // (2 * length)
        cells.append(next((letter for edge, letter in edges if middle < edge), LEFT))
    return "".join(cells)


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Plain values only."""
    return {
        "model": plan.spec.name,
        "context": plan.wishes.context,
        "sequences": plan.wishes.sequences,
        "kv_type": plan.wishes.kv_type,
        "kv_mode": plan.wishes.kv_mode,
        "hot_experts": plan.hot,
        "cold_experts": plan.cold,
        "pool_may_fill": plan.pool_may_fill,
        "live_tokens": plan.live_pages * PAGE,
        "stages": [_stage_as_json(stage, plan.left_of(stage)) for stage in plan.stages],
        "host": {
            "ram": plan.machine.ram,
            "items": _items_as_json(plan.host_items),
            "total": plan.host_total,
            "left": plan.host_left,
        },
        "expected": [asdict(each) for pair in plan.expected for each in pair if each],
        "reasons": list(plan.reasons),
        "alternatives": [{"name": other.name, "changes": other.changes} for other in plan.alternatives],
    }


def _stage_as_json(stage: StagePlan, left: int) -> dict[str, Any]:
    return {
        "device": stage.device.name,
        "kind": stage.device.kind,
        "budget": stage.device.budget,
        "span": [stage.span.start, stage.span.stop],
        "items": _items_as_json(stage.items),
        "total": stage.total,
        "left": left,
        "slots": stage.slots,
        "pool_pages": stage.pool_pages,
        "full_pages": stage.full_pages,
        "host_pages": stage.host_pages,
        "page_bytes": stage.page_bytes,
        "slabs": stage.slabs,
        "hot": [list(ids) for ids in stage.hot],
        "expert_cache_slots": list(stage.expert_cache_slots),
        "lendable": list(stage.lendable),
        "slot_pages": stage.slot_pages,
        "cold": stage.cold,
    }


def _items_as_json(items: tuple[Item, ...]) -> list[dict[str, Any]]:
    return [{"name": item.name, "bytes": item.bytes} for item in items]

"""A plan for people, and a plan for programs."""

from __future__ import annotations

from typing import Any

from rekindle.placement.types import Item, Plan, StagePlan
from rekindle.placement.units import gib
from rekindle.spec import PAGE

BAR = 64  # characters

# letter, what it stands for, the items under it
LEGEND: tuple[tuple[str, str, frozenset[str]], ...] = (
    (
        "W",
        "weights",
        frozenset({"embedding", "mixers", "dense ffn", "routers and shared experts", "final norm", "head"}),
    ),
    ("E", "hot experts", frozenset({"hot experts"})),
    ("R", "spare ring", frozenset({"spare ring"})),
    ("K", "KV pool", frozenset({"KV pool"})),
    (
        "S",
        "state",
        frozenset(
            {
                "recurrent state",
                "conv windows",
                "padding slot and page",
                "rewind rows",
                "rewind bases",
                "captures in flight",
            }
        ),
    ),
    ("D", "drafter", frozenset({"drafter"})),
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
                "expand scratch",
                "attention partials",
                "delta scratch",
            }
        ),
    ),
    ("M", "runtime and margin", frozenset({"kernels and runtime", "margin"})),
)
LEFT = "·"


def show_plan(plan: Plan) -> str:
    """Table, picture, reasons and alternatives."""
    wishes = plan.wishes
    head = (
        f"{plan.spec.name}: {wishes.sequences} × {wishes.context:,} tokens, {wishes.kv_type} KV, "
        f"{wishes.kv_mode} mode, RAM {gib(plan.machine.ram)}"
    )
    blocks = [head, _table(plan), _picture(plan)]
    if plan.reasons:
        blocks.append("\n".join(["why", *(f"  {reason}" for reason in plan.reasons)]))
    if plan.alternatives:
        lines = (f"  {other.name}: {other.changes}" for other in plan.alternatives)
        blocks.append("\n".join(["or else", *lines]))
    return "\n\n".join(blocks)


def _table(plan: Plan) -> str:
    header = ["", *(stage.device.name for stage in plan.stages), "RAM"]
    rows = [["layers", *(str(stage.span) for stage in plan.stages), ""]]
    rows += [_item_row(name, plan) for name in _names(plan)]
    rows.append(["total", *(gib(stage.total) for stage in plan.stages), gib(plan.host_total)])
    rows.append(["left", *(gib(stage.left) for stage in plan.stages), gib(plan.host_left)])
    rows.append(["experts hot / cold", *(f"{s.hot_count:,} / {s.cold:,}" for s in plan.stages), ""])
    rows.append(["KV tokens", *(f"{s.pool_tokens:,}" for s in plan.stages), f"{_host_tokens(plan):,}"])
    return _align([header, *rows])


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


def _align(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _picture(plan: Plan) -> str:
    width = max(len(stage.device.name) for stage in plan.stages)
    bars = [f"{stage.device.name.ljust(width)} [{bar(stage)}] {gib(stage.device.budget)}" for stage in plan.stages]
    legend = ", ".join([*(f"{letter} {words}" for letter, words, _ in LEGEND), f"{LEFT} left"])
    return "\n".join([*bars, f"{' ' * width}  {legend}"])


def bar(stage: StagePlan) -> str:
    """BAR characters; each cell goes to whoever holds the byte in its middle."""
    edges: list[tuple[int, str]] = []
    filled = 0
    for letter, _, names in LEGEND:
        filled += sum(item.bytes for item in stage.items if item.name in names)
        edges.append((filled, letter))
    assert filled == stage.total, f"the legend names {filled} bytes of {stage.total}"
    cells = []
    for cell in range(BAR):
        middle = (2 * cell + 1) * stage.device.budget // (2 * BAR)
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
        "pool_is_on": plan.pool_is_on,
        "live_tokens": plan.live_pages * PAGE,
        "stages": [_stage_as_json(stage) for stage in plan.stages],
        "host": {
            "ram": plan.machine.ram,
            "items": _items_as_json(plan.host_items),
            "total": plan.host_total,
            "left": plan.host_left,
        },
        "reasons": list(plan.reasons),
        "alternatives": [{"name": other.name, "changes": other.changes} for other in plan.alternatives],
    }


def _stage_as_json(stage: StagePlan) -> dict[str, Any]:
    return {
        "device": stage.device.name,
        "kind": stage.device.kind,
        "budget": stage.device.budget,
        "span": [stage.span.start, stage.span.stop],
        "items": _items_as_json(stage.items),
        "total": stage.total,
        "left": stage.left,
        "slots": stage.slots,
        "pool_pages": stage.pool_pages,
        "full_pages": stage.full_pages,
        "host_pages": stage.host_pages,
        "page_bytes": stage.page_bytes,
        "slabs": stage.slabs,
        "hot": [list(ids) for ids in stage.hot],
        "ring_slots": list(stage.ring_slots),
        "cold": stage.cold,
    }


def _items_as_json(items: tuple[Item, ...]) -> list[dict[str, Any]]:
    return [{"name": item.name, "bytes": item.bytes} for item in items]

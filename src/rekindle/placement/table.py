"""How many experts a context limit costs: by three ways of reserving KV. `python -m rekindle.placement.table`"""

from __future__ import annotations

from rekindle.errors import DoesNotFit
from rekindle.placement.advice import hot_with_full_kv
from rekindle.placement.place import Placer
from rekindle.placement.shapes import known_shapes
from rekindle.placement.types import Device, Machine, Wishes
from rekindle.placement.units import gib
from rekindle.spec import PAGE

GIB = 1 << 30
MODEL = "35B-A3B"
MIXES = ("Q3_K_M", "Q4_K_M")
BUDGETS = (16, 20, 24)  # GiB
CONTEXTS = tuple(8192 << i for i in range(8))  # to 1,048,576
RAM = 64 * GIB
HEADER = (
    "| mix | GiB | context | KV, all layers | KV, attention layers "
    "| cold, all layers | cold, no rule | cold, rule | pool tokens |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def cold_expert_table() -> str:
    """Cold experts of the 35B-A3B with KV reserved for all 40 layers, for the 10 that have any, and for the pool."""
    rows = [_row(mix, budget, context) for mix in MIXES for budget in BUDGETS for context in CONTEXTS]
    return "\n".join([HEADER, *rows])


def _row(mix: str, budget: int, context: int) -> str:
    spec, sizes = known_shapes(MODEL, mix)
    machine = Machine((Device("gpu", "cuda", budget * GIB),), RAM)
    placer = Placer(machine, spec, sizes, Wishes(context, expert_cache_share=0))  # cold: never on the device
    (candidate,) = placer.stage_candidates()
    page = candidate.candidates.page_bytes
    page_of_all = max(mixer.page_bytes(placer.wishes.kv_type) for mixer in spec.mixers) * spec.layers
    all_layers, no_rule = (
        _cold(sizes.experts, hot_with_full_kv(placer, candidate, size)) for size in (page_of_all, page)
    )
    cold, pool = _ruled(placer)
    full = placer.wishes.full_pages
    cells = (
        mix,
        str(budget),
        f"{context:,}",
        gib(full * page_of_all),
        gib(full * page),
        all_layers,
        no_rule,
        cold,
        pool,
    )
    return f"| {' | '.join(cells)} |"


def _cold(experts: int, hot: int | None) -> str:
    return "does not fit" if hot is None else f"{experts - hot:,}"


def _ruled(placer: Placer) -> tuple[str, str]:
    try:
        plan = placer.place()
    except DoesNotFit:
        return "does not fit", ""
    (stage,) = plan.stages
    return f"{plan.cold:,}", f"{stage.pool_pages * PAGE:,}" if stage.pool_may_fill else "off"


if __name__ == "__main__":
    print(cold_expert_table())

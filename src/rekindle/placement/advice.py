"""Why a plan is as it is, and which plans stand next to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rekindle.errors import DoesNotFit
from rekindle.placement.buy import hot_of
from rekindle.placement.place import Draft, Placer
from rekindle.placement.reserve import Weigher, weight_bytes
from rekindle.placement.types import Alternative, Machine, Plan, Sizes, StagePlan, Wishes
from rekindle.placement.units import gib, plural
from rekindle.spec import PAGE, ModelSpec

SHORTEST_CONTEXT = 4096  # no shorter context is worth proposing


def reasons(placer: Placer, plan: Plan) -> tuple[str, ...]:
    return tuple(_reasons(placer, plan))


def _reasons(placer: Placer, plan: Plan) -> Iterator[str]:
    if len(plan.stages) > 1:
        spans = " ".join(map(str, plan.spans))
        how = "by memory first, then by speed" if plan.wishes.split is None else "as asked"
        yield f"layers are split {spans}, {how}"
    for draft, stage in zip(placer.drafts(), plan.stages, strict=True):
        yield _pool_reason(placer, draft, stage)
        if stage.cold:
            yield _cold_reason(placer, draft, stage)
        if stage.device.is_cpu:
            yield from _type_reason(placer, stage)
    if plan.snapshot_ram < plan.wishes.cache_ram:
        yield (
            f"snapshots get {gib(plan.snapshot_ram)} of RAM, not the {gib(plan.wishes.cache_ram)} asked for: "
            f"of {gib(plan.machine.ram)} the rest is taken"
        )
    if plan.live_pages < plan.wishes.full_pages:
        yield (
            f"devices and RAM together hold {plan.live_pages * PAGE:,} tokens of KV, "
            f"not every sequence can reach {plan.wishes.context:,} at once"
        )


def _pool_reason(placer: Placer, draft: Draft, stage: StagePlan) -> str:
    name, tokens = stage.device.name, f"{stage.pool_tokens:,} tokens"
    if not stage.page_bytes:
        return f"{name}: no attention layer, so no KV"
    if not stage.pool_is_on:
        asked = placer.wishes.pool
        needless = f"; --pool {asked:,} is not needed" if asked is not None and asked < stage.pool_tokens else ""
        full = f"full KV ({tokens}, all sequences together)"
        return f"{name}: everything fits with {full}, so nothing is paged out{needless}"
    if placer.wishes.doubles_pool and not stage.cold and stage.pool_pages.bit_count() == 1:
        tokens += " (the largest power of two that fits, so that the next start knows this one's snapshots)"
    more = gib((stage.full_pages - stage.pool_pages) * stage.page_bytes)
    hot = hot_with_full_kv(placer, draft)
    if hot is None:
        return f"{name}: pool of {tokens}, because full KV would take {more} more and not fit at all"
    gained = stage.hot_count - hot
    if gained > 0:
        kept = plural(gained, "more expert")
        return f"{name}: pool of {tokens} keeps {kept} hot; full KV would take {more} more"
    return f"{name}: pool of {tokens}; full KV would take {more} more"


def _type_reason(placer: Placer, stage: StagePlan) -> Iterator[str]:
    """A CPU keeps no quantised weights."""
    here, kept = (
        weight_bytes(sizes, Weigher(placer.spec, sizes).weigh(stage.span), stage.span.stop == placer.spec.layers)
        for sizes in (placer.sizes.on(stage.device), placer.sizes)
    )
    if here != kept:
        dtype = {2: "bfloat16", 4: "float32"}[placer.wishes.compute_bytes]
        yield f"{stage.device.name}: weights become {dtype} on a CPU, {gib(here)} instead of {gib(kept)} on a GPU"


def _cold_reason(placer: Placer, draft: Draft, stage: StagePlan) -> str:
    budget = draft.budget_for(placer.target, draft.shelf.expert_bytes)
    ring = sum(stage.ring_slots)
    spare = f", {plural(ring, 'spare ring slot')} follow the routing" if ring else ""
    return (
        f"{stage.device.name}: {stage.cold:,} of {plural(stage.cold + stage.hot_count, 'expert')} are cold{spare}; "
        f"a budget of {gib(budget)} would keep all hot"
    )


def hot_with_full_kv(placer: Placer, draft: Draft, page_bytes: int | None = None) -> int | None:
    """Experts that stay hot if KV is reserved for the context limit first; None if that does not fit at all.

    `page_bytes` other than the stage's own answers for another way of counting KV.
    """
    size = draft.shelf.page_bytes if page_bytes is None else page_bytes
    shelf = replace(draft.shelf, page_bytes=size, least=draft.shelf.full, target=draft.shelf.full)
    bought = draft.buy(shelf)
    if bought is None:
        return None
    used, share = placer.spec.ffn.used, placer.wishes.ring_share
    return sum(hot_of(n, shelf.layers[i].experts, used, share) for i, n in bought.resident.items())


def alternatives(machine: Machine, spec: ModelSpec, sizes: Sizes, wishes: Wishes) -> tuple[Alternative, ...]:
    """The nearest other plans, with what each changes. Works for wishes that do not fit, too."""
    base = _try(machine, spec, sizes, wishes)
    if base is not None and not base.cold and not base.pool_is_on:
        return ()  # nothing is missing
    return tuple(_alternatives(machine, spec, sizes, wishes, base))


def _alternatives(
    machine: Machine, spec: ModelSpec, sizes: Sizes, wishes: Wishes, base: Plan | None
) -> Iterator[Alternative]:
    for context in _shorter(wishes.context):
        plan = _try(machine, spec, sizes, replace(wishes, context=context))
        if plan is not None and _is_better(base, plan):
            yield Alternative(f"context {context:,}", _difference(base, plan))
            break
    if wishes.kv_type != "q8" and spec.attention.head_dim % 32 == 0:
        plan = _try(machine, spec, sizes, replace(wishes, kv_type="q8"))
        if plan is not None:
            yield Alternative("q8 KV", _difference(base, plan))
    if wishes.sequences > 1:
        fewer = wishes.sequences // 2
        plan = _try(machine, spec, sizes, replace(wishes, sequences=fewer))
        if plan is not None:
            yield Alternative(plural(fewer, "sequence"), _difference(base, plan))
    yield from _larger_budgets(Placer(machine, spec, sizes, wishes))


def _is_better(base: Plan | None, plan: Plan) -> bool:
    if base is None:
        return True
    return plan.hot > base.hot if base.cold else not plan.pool_is_on


def _larger_budgets(placer: Placer) -> Iterator[Alternative]:
    """What the machine would need, with the spans of this plan."""
    drafts = placer.drafts()
    for name, pages in (("all experts hot", placer.target), ("full KV", placer.wishes.full_pages)):
        needs = [(draft.device, draft.budget_for(pages, draft.shelf.expert_bytes)) for draft in drafts]
        short = [f"{device.name} {gib(budget)}" for device, budget in needs if budget > device.budget]
        if short and (name == "full KV" or placer.spec.ffn.is_moe):
            yield Alternative(f"budget for {name}", f"needs {', '.join(short)}")


def _shorter(context: int) -> Iterator[int]:
    """Powers of two below the context, longest first."""
    power = 1 << (context - 1).bit_length()
    while power >= 2 * SHORTEST_CONTEXT:
        power //= 2
        if power < context:
            yield power


def _try(machine: Machine, spec: ModelSpec, sizes: Sizes, wishes: Wishes) -> Plan | None:
    try:
        return Placer(machine, spec, sizes, wishes).place()
    except DoesNotFit:
        return None


def _difference(base: Plan | None, plan: Plan) -> str:
    pool = f"pool {plan.pool_pages * PAGE:,} tokens" if plan.pool_is_on else "full KV, the pool is off"
    if base is None:
        cold = f", {plural(plan.cold, 'cold expert')}" if plan.spec.ffn.is_moe else ""
        return f"fits: {pool}{cold}"
    if not plan.spec.ffn.is_moe:
        return pool
    gained = plan.hot - base.hot
    if not gained:
        return f"as many hot experts; {pool}"
    more = "more" if gained > 0 else "fewer"
    return f"{abs(gained):,} {more} hot ({plural(plan.cold, 'cold expert')} left); {pool}"

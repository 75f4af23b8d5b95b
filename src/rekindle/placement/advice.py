"""Why a plan is as it is, and which plans stand next to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rekindle.errors import DoesNotFit
from rekindle.placement.buy import hot_of
from rekindle.placement.place import Draft, Placer
from rekindle.placement.types import Alternative, Device, Machine, Plan, Sizes, StagePlan, Wishes, pages_for
from rekindle.placement.units import at_least, gib, plural
from rekindle.spec import PAGE, ModelSpec, Span

SHORTEST_CONTEXT = 4096  # no shorter context is worth proposing


def reasons(placer: Placer, plan: Plan) -> tuple[str, ...]:
    return tuple(_reasons(placer, plan))


def _reasons(placer: Placer, plan: Plan) -> Iterator[str]:
    if len(plan.stages) > 1:
        spans = " ".join(map(str, plan.spans))
        how = "by memory first, then by speed" if plan.wishes.split is None else "as asked"
        yield f"layers are split {spans}, {how}"
    for draft, stage in zip(placer.drafts(plan.spans), plan.stages, strict=True):
        yield _pool_reason(placer, draft, stage)
        yield from _link_reason(plan.wishes, stage)
        if stage.cold:
            yield _cold_reason(placer, draft, stage, plan.spans)
        if stage.device.is_cpu:
            yield from placer.expansion(stage.device, stage.span)
    if gib(plan.snapshot_ram) != gib(plan.wishes.cache_ram):
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
        return f"{name}: full KV fits ({tokens}, all sequences together), so nothing is paged out{needless}"
    if placer.wishes.power_of_two_pool and not stage.cold and stage.pool_pages.bit_count() == 1:
        tokens += f" (the largest power of two that fits{_for_the_next_start(placer)})"
    more = gib((stage.full_pages - stage.pool_pages) * stage.page_bytes)
    hot = hot_with_full_kv(placer, draft)
    if hot is None:
        return f"{name}: pool of {tokens}, because full KV would take {more} more and not fit at all"
    gained = stage.hot_count - hot
    if gained > 0:
        kept = plural(gained, "more expert")
        return f"{name}: pool of {tokens} keeps {kept} hot; full KV would take {more} more"
    return f"{name}: pool of {tokens}; full KV would take {more} more"


def _for_the_next_start(placer: Placer) -> str:
    """A split that is chosen anew at each start may give a stage other layers, and then its pool does not matter."""
    lasting = len(placer.machine.devices) == 1 or placer.wishes.split is not None
    return ", so that the next start knows this one's snapshots" if lasting else ""


def _link_reason(wishes: Wishes, stage: StagePlan) -> Iterator[str]:
    """What a small pool costs: exact mode attends every page, and reads those beyond the pool where they lie."""
    beyond = (pages_for(wishes.context) - stage.pool_pages) * stage.page_bytes
    if beyond > 0 and wishes.kv_mode == "exact" and not stage.device.host:
        name = stage.device.name
        yield f"{name}: a sequence at the context limit reads up to {gib(beyond)} of KV over the link per token"


def _cold_reason(placer: Placer, draft: Draft, stage: StagePlan, spans: tuple[Span, ...]) -> str:
    budget = draft.budget_for(placer.target, draft.shelf.expert_bytes)
    ring = sum(stage.ring_slots)
    spare = f", {plural(ring, 'spare ring slot')} follow the routing" if ring else ""
    cold = f"{stage.device.name}: {stage.cold:,} of {plural(stage.cold + stage.hot_count, 'expert')} are cold{spare}"
    enough = f"a budget of {at_least(budget)}" if budget > stage.device.budget else "its budget"
    return f"{cold}; {enough}{_fixed(spans)} would keep all hot"


def _fixed(spans: tuple[Span, ...]) -> str:
    """A split that is chosen anew may give a device other layers, and no more experts than the others have room for."""
    return f" with --split {','.join(str(len(span)) for span in spans)}" if len(spans) > 1 else ""


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
    placer = Placer(machine, spec, sizes, wishes)
    return neighbours(placer, _try(placer, wishes, None))


def neighbours(placer: Placer, base: Plan | None) -> tuple[Alternative, ...]:
    """The alternatives to a plan; None is one that does not fit."""
    if base is not None and not base.cold and not base.pool_is_on:
        return ()  # nothing is missing
    return tuple(_neighbours(placer, base))


def _neighbours(placer: Placer, base: Plan | None) -> Iterator[Alternative]:
    spec, wishes = placer.spec, placer.wishes
    for context in _shorter(wishes.context):
        plan = _try(placer, replace(wishes, context=context), base)
        if plan is not None and _is_better(base, plan):
            yield Alternative(f"context {context:,}", _difference(base, plan))
            break
    if wishes.kv_type != "q8" and spec.attention.head_dim % 32 == 0:
        plan = _try(placer, replace(wishes, kv_type="q8"), base)
        if plan is not None and _gains(base, plan):
            yield Alternative("q8 KV", _difference(base, plan))
    if wishes.sequences > 1:
        fewer = wishes.sequences // 2
        plan = _try(placer, replace(wishes, sequences=fewer), base)
        if plan is not None and _gains(base, plan):
            yield Alternative(plural(fewer, "sequence"), _difference(base, plan))
    yield from _larger_budgets(placer, base)


def _is_better(base: Plan | None, plan: Plan) -> bool:
    if base is None:
        return True
    return plan.hot > base.hot if base.cold else not plan.pool_is_on


def _gains(base: Plan | None, plan: Plan) -> bool:
    if base is None:
        return True
    return plan.hot > base.hot or plan.pool_pages > base.pool_pages or plan.pool_is_on < base.pool_is_on


def _larger_budgets(placer: Placer, base: Plan | None) -> Iterator[Alternative]:
    """What the machine would need, with the spans of this plan."""
    spans = placer.spans() if base is None else base.spans
    cold = placer.spec.ffn.is_moe if base is None else base.cold > 0
    paged = base is None or base.pool_is_on
    full = placer.wishes.full_pages
    if cold and not (paged and placer.target == full):  # else it is the same budget
        yield from _larger_budget(placer, spans, "all experts hot", placer.target)
    if paged:  # pages beyond the target come behind the last expert
        yield from _larger_budget(placer, spans, "full KV and all experts hot" if cold else "full KV", full)


def _larger_budget(placer: Placer, spans: tuple[Span, ...], name: str, pages: int) -> Iterator[Alternative]:
    """So many pages, and every expert hot; given back to the plan it is enough."""
    needs = [(draft.device, draft.budget_for(pages, draft.shelf.expert_bytes)) for draft in placer.drafts(spans)]
    short = {device.name: budget for device, budget in needs if budget > device.budget and not placer.is_ram(device)}
    devices = (replace(device, budget=short.get(device.name, device.budget)) for device in placer.machine.devices)
    larger = placer.on(replace(placer.machine, devices=tuple(devices)))
    ram = larger.ample_ram(spans, pages)
    said = [f"{device} {at_least(budget)}" for device, budget in short.items()]
    said += [f"RAM {at_least(ram)}"] if ram > placer.machine.ram and placer.has_host_stage else []
    if said:
        yield Alternative(f"budget for {name}", f"needs {', '.join(said)}{_fixed(spans)}")


def _shorter(context: int) -> Iterator[int]:
    """Powers of two below the context, longest first."""
    power = 1 << (context - 1).bit_length()
    while power >= 2 * SHORTEST_CONTEXT:
        power //= 2
        if power < context:
            yield power


def way_out(machine: Machine, spec: ModelSpec, sizes: Sizes, wishes: Wishes) -> str | None:
    """What would make room for wishes that do not fit, of what the user has already: another split, or the CPU."""
    if wishes.split is not None:
        wishes = replace(wishes, split=None)
        if _try(Placer(machine, spec, sizes, wishes), wishes, None) is not None:
            return "with --split auto it fits"
    if any(device.host for device in machine.devices) or len(machine.devices) >= spec.layers:
        return None
    cpu = Device("cpu", "cpu", machine.ram, host=True)
    wider = Machine((*machine.devices, cpu), machine.ram)
    if _try(Placer(wider, spec, sizes, wishes), wishes, None) is None:
        return None
    return f"with --devices {','.join(device.name for device in wider.devices)} it fits"


def _try(placer: Placer, wishes: Wishes, base: Plan | None) -> Plan | None:
    """Other wishes on the same machine; where RAM is short the split of the base does."""
    try:
        return Placer(placer.machine, placer.spec, placer.sizes, wishes).place(base.spans if base else None)
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
        return f"as many hot experts; {pool}" if base.cold else pool
    more = "more" if gained > 0 else "fewer"
    return f"{abs(gained):,} {more} hot ({plural(plan.cold, 'cold expert')} left); {pool}"

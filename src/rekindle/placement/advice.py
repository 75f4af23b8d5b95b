"""Why a plan is as it is, and which plans stand next to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rekindle.errors import BadConfig, DoesNotFit
from rekindle.placement.allocate import hot_of
from rekindle.placement.lending import lendable_pages
from rekindle.placement.place import Placer, describe_expansion
from rekindle.placement.stage import StageCandidate
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
    for candidate, stage in zip(placer.stage_candidates(plan.spans), plan.stages, strict=True):
        yield _pool_reason(placer, candidate, stage, plan.wishes.pool)
        yield from _link_reason(placer, stage)
        if stage.cold:
            yield _cold_reason(placer, candidate, stage, plan.spans)
        if expansion := describe_expansion(placer.spec, placer.sizes, placer.wishes, stage.device, stage.span):
            yield expansion
    yield from _snapshot_reason(plan)
    if plan.live_pages < plan.wishes.full_pages:
        yield (
            f"devices and RAM together hold {plan.live_pages * PAGE:,} tokens of KV, "
            f"not every sequence can reach {plan.wishes.context:,} at once"
        )


def _snapshot_reason(plan: Plan) -> Iterator[str]:
    got, asked = plan.snapshot_ram, plan.wishes.cache_ram
    if asked is None:
        each = plan.snapshot_bytes.conversation(plan.wishes.context)
        yield (
            f"snapshots get {gib(got)} of RAM: {got / each:.1f} conversations at the context limit, of {gib(each)} each"
        )
    elif gib(got) != gib(asked):
        yield (
            f"snapshots get {gib(got)} of RAM, not the {gib(asked)} asked for: "
            f"of {gib(plan.machine.ram)} the rest is taken"
        )


def _pool_reason(placer: Placer, candidate: StageCandidate, stage: StagePlan, pool: int | None) -> str:
    """pool: tokens that were asked for."""
    name, tokens = stage.device.name, f"{stage.pool_tokens:,} tokens"
    if not stage.page_bytes:
        return f"{name}: no attention layer, so no KV"
    if not stage.pool_may_fill:
        return f"{name}: full KV fits ({tokens}, all sequences together), so nothing is paged out"
    if placer.wishes.power_of_two_pool and not stage.cold and stage.pool_pages.bit_count() == 1:
        tokens += f" (the largest power of two that fits{_for_the_next_start(placer)})"
    more = gib((stage.full_pages - stage.pool_pages) * stage.page_bytes)
    hot = hot_with_full_kv(placer, candidate)
    asked = ", as asked" if pool is not None else ""
    if pool is not None and stage.pool_pages < min(stage.full_pages, pages_for(pool)):
        return f"{name}: pool of {tokens}, the most that fits of the {pool:,} asked for"
    if hot is None and asked:
        return f"{name}: pool of {tokens}{asked}; full KV would not fit"
    if hot is None:
        return f"{name}: pool of {tokens}, because full KV would take {more} more, and would not fit"
    gained = stage.hot_count - hot
    if gained > 0 and not stage.device.is_cpu:  # where all are, they are neither hot nor cold
        kept = plural(gained, "more expert")
        return f"{name}: pool of {tokens} keeps {kept} hot; full KV would take {more} more"
    return f"{name}: pool of {tokens}{asked}; full KV would take {more} more"


def _for_the_next_start(placer: Placer) -> str:
    """A split that is chosen anew at each start may give a stage other layers, and then its pool does not matter."""
    lasting = len(placer.machine.devices) == 1 or placer.wishes.split is not None
    return ", so that the next start knows this one's snapshots" if lasting else ""


def _link_reason(placer: Placer, stage: StagePlan) -> Iterator[str]:
    """What a small pool costs: exact mode attends every page, and reads those that find no room where they lie."""
    name, wishes, room = stage.device.name, placer.wishes, stage.pages_beside(1)
    if stage.slot_pages:
        each, alone = f"{stage.slot_pages * PAGE:,} tokens", f"{min(room, pages_for(wishes.context)) * PAGE:,}"
        yield f"{name}: a slot without a sequence lends its memory to KV, {each}: one sequence alone has {alone}"
    if stage.lendable:
        layers = [placer.sizes.on(stage.device).layers[layer] for layer in stage.span.layers]
        room += lendable_pages(stage.lendable, layers, stage.page_bytes)
        experts = plural(sum(stage.lendable), "hot expert")
        yield f"{name}: KV of conversations that outgrow the pool gets the slots of up to {experts}, until they end"
    elif wishes.lends and not stage.slot_pages:
        why = "snapshots need the RAM that lent experts would take: --ram" if stage.cold else "no expert is cold"
        yield f"{name}: --live-memory changes nothing here: {why}"
    beyond = (pages_for(wishes.context) - room) * stage.page_bytes
    if beyond > 0 and wishes.kv_mode == "exact" and not stage.device.host:
        yield f"{name}: a sequence at the context limit reads up to {gib(beyond)} of KV over PCIe per token"


def _cold_reason(placer: Placer, candidate: StageCandidate, stage: StagePlan, spans: tuple[Span, ...]) -> str:
    budget = candidate.budget_for(placer.target, candidate.candidates.expert_bytes)
    cached = sum(stage.expert_cache_slots)
    spare = f", {plural(cached, 'expert cache slot')} follow the routing" if cached else ""
    cold = f"{stage.device.name}: {stage.cold:,} of {plural(stage.cold + stage.hot_count, 'expert')} are cold{spare}"
    enough = f"a budget of {at_least(budget)}" if budget > stage.device.budget else "its budget"
    return f"{cold}; {enough}{_fixed(spans)} would keep all hot"


def _fixed(spans: tuple[Span, ...]) -> str:
    """A split that is chosen anew may give a device other layers, and no more experts than the others have room for."""
    return f" with --split {','.join(str(len(span)) for span in spans)}" if len(spans) > 1 else ""


def hot_with_full_kv(placer: Placer, candidate: StageCandidate, page_bytes: int | None = None) -> int | None:
    """Experts that stay hot if KV is reserved for the context limit first; None if that does not fit at all.

    `page_bytes` other than the stage's own answers for another way of counting KV.
    """
    size = candidate.candidates.page_bytes if page_bytes is None else page_bytes
    candidates = replace(
        candidate.candidates, page_bytes=size, least=candidate.candidates.full, target=candidate.candidates.full
    )
    allocation = candidate.allocate(candidates)
    if allocation is None:
        return None
    used, share = placer.spec.ffn.used, placer.wishes.expert_cache_share
    return sum(hot_of(n, candidates.layers[i].experts, used, share) for i, n in allocation.resident.items())


def alternatives(machine: Machine, spec: ModelSpec, sizes: Sizes, wishes: Wishes) -> tuple[Alternative, ...]:
    """The nearest other plans, with what each changes. Works for wishes that do not fit, too."""
    placer = Placer(machine, spec, sizes, wishes)
    return neighbours(placer, _try(placer, wishes, None))


def neighbours(placer: Placer, base: Plan | None) -> tuple[Alternative, ...]:
    """The alternatives to a plan; None is one that does not fit."""
    if base is not None and not base.cold and not _is_short_of_pages(placer, base):
        return ()  # nothing is missing
    return tuple(_neighbours(placer, base))


def _is_short_of_pages(placer: Placer, base: Plan) -> bool:
    """Whether the pool may fill, though nobody asked for a small one."""
    return base.pool_may_fill and placer.wishes.pool is None


def _neighbours(placer: Placer, base: Plan | None) -> Iterator[Alternative]:
    spec, wishes = placer.spec, placer.wishes
    for context in _shorter(wishes.context):
        plan = _try(placer, replace(wishes, context=context), base)
        if plan is not None and _is_better(base, plan):
            yield Alternative(f"context {context:,}", _difference(base, plan))
            break
    if wishes.kv_type != "q8" and _can_store(spec, "q8"):
        plan = _try(placer, replace(wishes, kv_type="q8"), base)
        if plan is not None and _gains(base, plan):
            yield Alternative("q8 KV", _difference(base, plan))
    if wishes.sequences > 1:
        fewer = wishes.sequences // 2
        plan = _try(placer, replace(wishes, sequences=fewer), base)
        if plan is not None and _gains(base, plan):
            yield Alternative(plural(fewer, "sequence"), _difference(base, plan))
    yield from _larger_budgets(placer, base)


def _can_store(spec: ModelSpec, kv_type: str) -> bool:
    """Whether the pages of every layer can be of that type."""
    try:
        return any(mixer.page_bytes(kv_type) for mixer in spec.distinct_mixers)
    except BadConfig:
        return False


def _is_better(base: Plan | None, plan: Plan) -> bool:
    if base is None:
        return True
    return plan.hot > base.hot if base.cold else not plan.pool_may_fill


def _gains(base: Plan | None, plan: Plan) -> bool:
    if base is None:
        return True
    return plan.hot > base.hot or plan.pool_pages > base.pool_pages or plan.pool_may_fill < base.pool_may_fill


def _larger_budgets(placer: Placer, base: Plan | None) -> Iterator[Alternative]:
    """What the machine would need, with the spans of this plan."""
    spans = placer.spans() if base is None else base.spans
    cold = placer.spec.ffn.is_moe if base is None else base.cold > 0
    paged = base is None or _is_short_of_pages(placer, base)
    full = placer.wishes.full_pages
    if cold and not (paged and placer.target == full):  # else it is the same budget
        yield from _larger_budget(placer, spans, "all experts hot", placer.target)
    if paged:  # pages beyond the target come after the last expert
        yield from _larger_budget(placer, spans, "full KV and all experts hot" if cold else "full KV", full)


def _larger_budget(placer: Placer, spans: tuple[Span, ...], name: str, pages: int) -> Iterator[Alternative]:
    """`pages` pages, and every expert hot; a plan with that budget has both."""
    needs = [
        (candidate.device, candidate.budget_for(pages, candidate.candidates.expert_bytes))
        for candidate in placer.stage_candidates(spans)
    ]
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
    """Other wishes on the same machine; where RAM is short the split of the base does. Where slots are lent and experts
    are not, RAM was short of copies of them, which other wishes may leave room for."""
    if wishes.lends_slots and not wishes.lends:
        lending = _try(placer, replace(wishes, lends=True), base)
        if lending is not None and lending.lends_everywhere:
            return lending
    try:
        return Placer(placer.machine, placer.spec, placer.sizes, wishes).place(base.spans if base else None)
    except DoesNotFit:
        return None


def _difference(base: Plan | None, plan: Plan) -> str:
    grows = " at first" if any(any(stage.lendable) for stage in plan.stages) else ""
    pool = f"pool {plan.pool_pages * PAGE:,} tokens{grows}" if plan.pool_may_fill else "full KV, the pool is off"
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

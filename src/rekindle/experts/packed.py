"""Experts quantised in planes, on a GPU: slots on the device, cold ones in pinned host memory in the same planes."""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.buffers import staged_experts
from rekindle.experts.cpu_experts import CpuExperts, LayerCpuExperts
from rekindle.experts.host import HostExecutor, rows_of
from rekindle.experts.memory import HostMemory
from rekindle.experts.planes import Stacks, by_expert, host_bytes, load_part, make_parts, make_pieces, one_expert
from rekindle.experts.residency import Residency
from rekindle.experts.staging import Staging
from rekindle.experts.stored import StoredExperts, Three
from rekindle.kernels.device_memory import DeviceMemory
from rekindle.kernels.matmul.naive import packed_values
from rekindle.kernels.moe import SharedExpert
from rekindle.kernels.moe.cold import Missing
from rekindle.kernels.moe.expert_threads import describe

TURNS, CACHED_ROWS = 8, 16  # a batch goes through the expert cache in up to TURNS turns, or CACHED_ROWS rows
NEARLY_ALL = 8  # pairs for each expert of a layer with which nearly every one is needed, also of those used least


class PackedWeights:
    recordable = True

    def __init__(
        self, stored: StoredExperts, residency: Residency, device: torch.device, staging: Staging | None = None,
        keep: int = 0, shared: DeviceMemory | None = None,
    ) -> None:  # fmt: skip
        self._residency = residency
        self._cold = [expert for expert in range(stored.count) if expert not in set(residency.hot)]  # by place
        self._memory = HostMemory(sum(host_bytes(part, len(self._cold)) for part in stored.parts), device)
        gate, up, down = (load_part(part, residency, self._cold, device, self._memory, shared) for part in stored.parts)
        self.stacks: Stacks = (gate[0], up[0], down[0])
        self.host_stacks: Stacks = (gate[1], up[1], down[1])
        self.expert_bytes = sum(stack.nbytes for stack in self.host_stacks) // len(self._cold)
        places = torch.full((stored.count,), -1, dtype=torch.int32)
        places[torch.tensor(self._cold)] = torch.arange(len(self._cold), dtype=torch.int32)
        self.places = places.to(device)  # expert -> where it lies in host memory
        self.at_place = torch.tensor(self._cold, dtype=torch.int32, device=device)
        self._staging = staging or Staging(self.stacks, staged_experts(stored.count), device)
        self._to_cache = make_pieces(self.host_stacks, self.stacks, len(residency.hot), device)
        self._parts = make_parts(self.host_stacks, self.stacks, device)
        self._to_staging = [make_pieces(self.host_stacks, part, 0, device) for part in self._staging.parts]
        # Kept, since another stream than the one that reads them may write them, also in a recorded step.
        self._load = torch.empty(self._groups * self._staging.slots, dtype=torch.int32, device=device)
        self._where = torch.empty_like(self.places)
        self.host_executor = HostExecutor(self._values, keep)
        self._described = describe(self.host_stacks)
        self.cpu_experts: LayerCpuExperts | None = None

    def most_rows(self, at_once: int) -> int:
        """With more rows the staging area moves fewer bytes."""
        return max(at_once, min(TURNS * at_once, CACHED_ROWS))

    @property
    def staging(self) -> Staging:
        return self._staging

    @property
    def cold(self) -> int:
        return len(self._cold)

    @property
    def _groups(self) -> int:
        """That cold experts pass through the staging area in, at most."""
        return -(-len(self._cold) // self._staging.slots)

    def slot_planes(self) -> list[Tensor]:
        return [plane for stack in self.stacks for plane in by_expert(stack)]

    def take_in(self, load: Tensor) -> None:
        _gpu().fetch(self._to_cache, load, self.places)

    def run_row(self, h: Tensor, router: Tensor, used: int, tally: Tensor, shared: SharedExpert) -> Tensor | None:
        """[1, hidden], from choosing on, in as many launches as if all experts were hot."""
        if not h.is_cuda or self._parts is None:
            return None
        from rekindle.experts.triton import route_row
        from rekindle.kernels.moe.triton import moe_missing, takes_missing

        if not takes_missing(h, *self.stacks, shared):
            return None
        cpu = self.cpu_experts
        mailbox, answer = (None, None) if cpu is None else (cpu.mailbox, cpu.answer)
        slots, sources, weights = route_row(h, router, used, self._residency, tally, self.places, mailbox)
        missing = Missing(sources, self._parts, answer)
        return moe_missing(h, slots, weights, *self.stacks, shared, missing)

    @property
    def cpu_reads_types(self) -> bool:
        """CPU threads can compute with its quantised types."""
        return self._described is not None

    def use_cpu_experts(self, cpu_experts: CpuExperts) -> None:
        """From now on the CPU takes its share of every step through the expert cache."""
        assert self._described is not None, "CPU threads cannot read the layer's types"
        self.cpu_experts = LayerCpuExperts(cpu_experts, self._described, self.places)

    def fill_staging(self) -> int:
        """The first cold experts in host memory, into one part of the staging area; gives their bytes."""
        some = self.at_place[: self._staging.slots]
        _gpu().fetch_aside(self._to_staging[0], some, self.places)
        return len(some) * self.expert_bytes

    def take_in_staging(self, load: Tensor) -> None:
        """Put expert load[i], unless it is -1, into slot i of one part of the staging area, as a cache would."""
        assert len(load) <= self._staging.slots, f"{len(load)} experts for {self._staging.slots} slots"
        _gpu().fetch(self._to_staging[0], load, self.places)

    def swap(self, slot: int, goes: int, comes: int) -> None:
        """The expert that goes takes the host place of the one that comes. All in the order of the stream."""
        place = self._cold.index(comes)
        _gpu().exchange(self._to_cache, place, slot - len(self._residency.hot))
        self._cold[place] = goes
        self.places[goes] = place
        self.places[comes] = -1
        self.at_place[place] = goes

    def begin(self) -> None:
        """A forward whose cold experts pass through the staging area begins: they may be on their way from here on."""
        self._staging.order.begin()

    def stream(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """float32 [rows, hidden]. Cold experts arrive in a part of the staging area while others work.

        With very many pairs all that are missing are brought, whatever was chosen: then the copies of a layer begin
        while the layers before it compute. Where the device holds few of the cold ones, whole groups are copied, which
        keeps no processor of the device busy.
        """
        order, first, by_engine = self._staging.order, self._residency.slots, self._copies_whole(ids.numel())
        where = self._by_place() if by_engine else self._list_missing(ids)
        slots = where.index_select(0, ids.flatten()).view(ids.shape)
        pairs = self._sorted(h, slots, weights, first + len(self._load))
        pairs.run(self.stacks, 0)
        for group, load in enumerate(self._load.split(self._staging.slots)):
            part = order.turn()
            with order.copying(part):
                if by_engine:
                    self._copy_group(part, group * len(load))
                else:
                    _gpu().fetch_aside(self._to_staging[part], load, self.places)
            with order.computing(part):
                pairs.run(self._staging.parts[part], first + group * len(load))
        return pairs.shares.view(*ids.shape, -1).sum(1)

    def _copies_whole(self, pairs: int) -> bool:
        return pairs >= 2 * self._residency.experts and self._residency.holds_few_cold

    def _by_place(self) -> Tensor:
        """The slot of each expert; behind all slots, of one that is missing its place in host memory."""
        table = self._residency.table
        return torch.where(table < 0, self.places + self._residency.slots, table)

    def _list_missing(self, ids: Tensor) -> Tensor:
        """The missing experts that are brought, into `_load`; gives the slot of each expert, behind all slots its place
        in that list."""
        order, kernels = self._staging.order, _gpu()
        if ids.numel() >= NEARLY_ALL * self._residency.experts:
            with order.ahead():  # no table changes within such a forward
                kernels.list_missing(self._residency, None, self._load, self._where)
        else:
            kernels.list_missing(self._residency, self._needed(ids), self._load, self._where)
            order.begin()
        return self._where

    def _needed(self, ids: Tensor) -> Tensor:
        """int32 [experts]: 1 for those that are chosen."""
        needed = torch.zeros(self._residency.experts, dtype=torch.int32, device=ids.device)
        return needed.index_fill_(0, ids.flatten().long(), 1)

    def _copy_group(self, part: int, first: int) -> None:
        for far, near in zip(self.host_stacks, self._staging.parts[part], strict=True):
            for source, target in zip(by_expert(far), by_expert(near), strict=True):
                some = source[first : first + self._staging.slots]
                target[: len(some)].copy_(some, non_blocking=True)

    def host(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """float32 [rows, hidden]. What is on the device runs there while the CPU does the rest."""
        slots, away = self._residency.slots_of(ids), (self._needed(ids) > 0) & (self._residency.table < 0)
        x, chosen, missing = h.float().cpu(), ids.cpu(), away.nonzero().flatten().tolist()
        pairs = self._sorted(h, slots, weights, self._residency.slots)
        pairs.run(self.stacks, 0)
        for expert in missing:
            row, place = rows_of(chosen, expert)
            share = self.host_executor.share(x.index_select(0, row), expert).to(h.device, non_blocking=True)
            pair = (row * ids.shape[1] + place).to(h.device, non_blocking=True)
            pairs.shares.index_copy_(0, pair, share * weights.flatten().index_select(0, pair)[:, None])
        return pairs.shares.view(*ids.shape, -1).sum(1)

    def _sorted(self, h: Tensor, slots: Tensor, weights: Tensor, count: int) -> SlotPairs:
        return SlotPairs(h, slots, weights, count, self._residency.experts, self.stacks[0].rows)

    def _values(self, expert: int) -> Three:
        place = self._cold.index(expert)
        gate, up, down = (packed_values(one_expert(stack, place)) for stack in self.host_stacks)
        return gate, up, down


class SlotPairs:
    """Pairs sorted by slot, for products with stacks that each hold some of the slots."""

    def __init__(self, h: Tensor, slots: Tensor, weights: Tensor, count: int, experts: int, width: int) -> None:
        """slots [rows, used]: below `count`, or -1. experts: of the layer, wherever they lie; each `width` wide."""
        from rekindle.kernels.moe import groups
        from rekindle.kernels.moe.grouping import group
        from rekindle.kernels.moe.triton import MANY_ROWS

        self._h, self._weights, self._used = h.contiguous(), weights, slots.shape[1]
        self._expanding = h.shape[0] >= MANY_ROWS
        self._order, self._starts = group(slots, count)
        self._tile = groups.group_config(h.device, -(-2 * slots.numel() // experts), self._expanding)
        self._inner = self._h.new_empty(slots.numel(), width)
        self.shares = torch.empty(slots.numel(), h.shape[1], dtype=torch.float32, device=h.device)

    def run(self, stacks: Stacks, first: int) -> None:
        """Writes the weighted shares of the pairs whose slots, counted from `first`, are the stacks'."""
        from rekindle.kernels.moe.groups import run_grouped

        gate, up, down = stacks
        if not gate.experts:  # there is no hot expert, and no cache
            return
        pairs, tile, expanding = (self._order, self._starts, self._weights), self._tile, self._expanding
        run_grouped(self._h, *pairs, self._inner, [gate, up], self._used, tile, expanding, first)
        run_grouped(self._inner, *pairs, self.shares, [down], self._used, tile, expanding, first)


def _gpu():  # type: ignore[no-untyped-def]
    from rekindle.experts import triton

    return triton

"""Experts quantised in planes, on a GPU: slots on the device, cold ones in pinned host memory in the same planes."""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.buffers import STAGED_EXPERTS
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
ELSEWHERE = -(1 << 30)  # a place that no group of the staging area has


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
        self._staging = staging or Staging(self.stacks, min(STAGED_EXPERTS, stored.count), device)
        self._to_cache = make_pieces(self.host_stacks, self.stacks, len(residency.hot), device)
        self._parts = make_parts(self.host_stacks, self.stacks, device)
        self._to_staging = [make_pieces(self.host_stacks, half, 0, device) for half in self._staging.halves]
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
        """The first cold experts in host memory, into one half of the staging area; gives their bytes."""
        some = self.at_place[: self._staging.slots]
        self.take_in_staging(some)
        return len(some) * self.expert_bytes

    def take_in_staging(self, load: Tensor) -> None:
        """Put expert load[i], unless it is -1, into slot i of one half of the staging area."""
        _gpu().fetch(self._to_staging[0], load, self.places)

    def swap(self, slot: int, goes: int, comes: int) -> None:
        """The expert that goes takes the host place of the one that comes. All in the order of the stream."""
        place = self._cold.index(comes)
        _gpu().exchange(self._to_cache, place, slot - len(self._residency.hot))
        self._cold[place] = goes
        self.places[goes] = place
        self.places[comes] = -1
        self.at_place[place] = goes

    def stream(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """float32 [rows, hidden]. Cold experts arrive in one half of the staging area while the other works.

        Many pairs need nearly all of them: then whole groups are copied, which keeps no processor of the device busy;
        not where the expert cache holds a good part of them already.
        """
        slots = self._residency.slots_of(ids)
        places = self.places.index_select(0, ids.flatten()).view(ids.shape).masked_fill(slots >= 0, ELSEWHERE)
        load = self._missing(ids)
        nearly_all = ids.numel() >= 2 * self._residency.experts and 8 * self._residency.cache_slots <= len(self._cold)
        shares = torch.empty(ids.numel(), h.shape[1], dtype=torch.float32, device=h.device)
        order, staged = self._staging.order, self._staging.slots
        order.begin(load)
        self._run(h, slots, weights, self.stacks, shares)
        for first in range(0, len(self._cold), staged):
            half = order.turn()
            with order.copying(half):
                if nearly_all:
                    self._copy_group(half, first)
                else:
                    _gpu().fetch(self._to_staging[half], load[first : first + staged], self.places)
            with order.computing(half):
                self._run(h, places - first, weights, self._staging.halves[half], shares)
        return shares.view(*ids.shape, -1).sum(1)

    def _copy_group(self, half: int, first: int) -> None:
        for far, near in zip(self.host_stacks, self._staging.halves[half], strict=True):
            for source, target in zip(by_expert(far), by_expert(near), strict=True):
                some = source[first : first + self._staging.slots]
                target[: len(some)].copy_(some, non_blocking=True)

    def host(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """float32 [rows, hidden]. What is on the device runs there while the CPU does the rest."""
        slots = self._residency.slots_of(ids)
        shares = torch.zeros(ids.numel(), h.shape[1], dtype=torch.float32, device=h.device)
        x, chosen, missing = h.float().cpu(), ids.cpu(), self._missing(ids).cpu()
        self._run(h, slots, weights, self.stacks, shares)
        for expert in missing[missing >= 0].tolist():
            row, place = rows_of(chosen, expert)
            share = self.host_executor.share(x.index_select(0, row), expert).to(h.device, non_blocking=True)
            pair = (row * ids.shape[1] + place).to(h.device, non_blocking=True)
            shares.index_copy_(0, pair, share * weights.flatten().index_select(0, pair)[:, None])
        return shares.view(*ids.shape, -1).sum(1)

    def _missing(self, ids: Tensor) -> Tensor:
        """Per host place: the expert that lies there if it is needed and not on the device, else -1."""
        needed = torch.zeros(self._residency.experts, dtype=torch.bool, device=ids.device)
        needed.index_fill_(0, ids.flatten().long(), True)
        missing = needed & (self._residency.table < 0)
        return self.at_place.masked_fill(~missing.index_select(0, self.at_place), -1)

    def _run(self, h: Tensor, slots: Tensor, weights: Tensor, stacks: Stacks, shares: Tensor) -> None:
        if stacks[0].experts:  # there is a hot expert, or a cache
            run_slots(h, slots, weights, stacks, shares, self._residency.experts)

    def _values(self, expert: int) -> Three:
        place = self._cold.index(expert)
        gate, up, down = (packed_values(one_expert(stack, place)) for stack in self.host_stacks)
        return gate, up, down


def run_slots(h: Tensor, slots: Tensor, weights: Tensor, stacks: Stacks, shares: Tensor, experts: int) -> None:
    """Writes the weighted shares of the pairs whose slot is one of the stacks'; the others stay as they are. experts:
    of the layer, wherever they lie."""
    from rekindle.kernels.moe import groups
    from rekindle.kernels.moe.grouping import group
    from rekindle.kernels.moe.triton import MANY_ROWS

    gate, up, down = stacks
    h, used, expanding = h.contiguous(), slots.shape[1], h.shape[0] >= MANY_ROWS
    order, starts = group(slots, gate.experts)
    inner = torch.empty(slots.numel(), gate.rows, dtype=h.dtype, device=h.device)
    tile = groups.group_config(h.device, -(-2 * slots.numel() // experts), expanding)
    groups.run_grouped(h, order, starts, weights, inner, [gate, up], used, tile, expanding)
    groups.run_grouped(inner, order, starts, weights, shares, [down], used, tile, expanding)


def _gpu():  # type: ignore[no-untyped-def]
    from rekindle.experts import triton

    return triton

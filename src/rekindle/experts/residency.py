"""Which of a layer's experts are on the device, and in which slot.

Slots [0, hot) hold the experts that placement chose. The slots after them are the expert cache: it takes in cold
experts on use, and evicts the least recently used. Its last slots can be lent: each holds an expert that stays (it is
pinned), or nothing while its memory is used for something else. The tables are tensors on the device and are read and
changed there, in the order of the stream: a forward needs no answer from the host to find its experts, so it can be
part of a recorded step, which goes on while slots change hands.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NEVER = 1 << 62  # the step of the last use of a slot that no newcomer gets


class Residency:
    def __init__(
        self, hot: Sequence[int], cache_slots: int, experts: int, device: torch.device, pinned: Sequence[int] = ()
    ) -> None:
        """pinned: the experts in the last slots of the cache, which can be lent."""
        known = [*hot, *pinned]
        assert len(set(known)) == len(known), f"an expert is hot twice: {sorted(known)}"
        assert len(pinned) <= cache_slots, f"{len(pinned)} experts are pinned in a cache of {cache_slots} slots"
        slots = len(hot) + cache_slots
        assert slots <= experts, f"{len(hot)} hot experts and a cache of {cache_slots} are more than {experts}"
        self.hot = list(hot)  # expert in slot 0, 1, …; the host's own copy, which only swaps change
        self.pinned: list[int | None] = list(pinned)  # expert in each slot that can be lent; None: it is lent
        self.cache_slots = cache_slots
        self.experts = experts
        self.table = torch.full((experts,), -1, dtype=torch.int32)  # expert -> slot or -1
        self.table[torch.tensor(self.hot, dtype=torch.long)] = torch.arange(len(hot), dtype=torch.int32)
        self.table[torch.tensor(pinned, dtype=torch.long)] = torch.arange(slots - len(pinned), slots, dtype=torch.int32)
        self.table = self.table.to(device)
        self.owner = torch.full((cache_slots,), -1, dtype=torch.int32)  # cache slot -> expert or -1
        self.owner[self.kept :] = torch.tensor(pinned, dtype=torch.int32)
        self.owner = self.owner.to(device)
        self.used_at = torch.zeros(cache_slots, dtype=torch.int64)  # step of the last use
        self.used_at[self.kept :] = NEVER
        self.used_at = self.used_at.to(device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)  # 32 bits would be full after a month

    @property
    def holds_few_cold(self) -> bool:
        """Whether so few of the cold experts have a slot that whole groups of them may be copied as they lie."""
        return 8 * self.cache_slots <= self.experts - len(self.hot)

    @property
    def slots(self) -> int:
        return len(self.hot) + self.cache_slots

    @property
    def kept(self) -> int:
        """Slots of the cache that follow the routing, and are never lent."""
        return self.cache_slots - len(self.pinned)

    @property
    def staying(self) -> list[int]:
        """The experts that are on the device whatever is used: hot ones and pinned ones."""
        return [*self.hot, *(expert for expert in self.pinned if expert is not None)]

    def slot_of_staying(self) -> dict[int, int]:
        pinned = enumerate(self.pinned, start=len(self.hot) + self.kept)
        return {expert: slot for slot, expert in (*enumerate(self.hot), *pinned) if expert is not None}

    def slots_of(self, ids: Tensor) -> Tensor:
        """The slot of each id, -1 where it is not on the device."""
        return self.table.index_select(0, ids.flatten()).view(ids.shape)

    def admit(self, ids: Tensor, tally: Tensor, takes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Make room for every id. Needs a cache that keeps at least as many slots as there are ids.

        Gives the slot of each id, and per cache slot the expert whose weights must be put there first, or -1: missing
        experts take the oldest slots in the order of the ids. Adds the ids to the tally. Of n missing experts
        takes[n] are left to the CPU, each time others: their ids have slot -1.
        """
        pairs, slots = ids.numel(), self.kept
        assert pairs <= slots, f"{pairs} pairs may need more slots than the cache's {slots}"
        if ids.is_cuda:
            from rekindle.experts.triton import admit as on_device

            return on_device(self, ids, tally, takes)
        return self._admit(ids, tally, takes)

    def _admit(self, ids: Tensor, tally: Tensor, takes: Tensor | None) -> tuple[Tensor, Tensor]:
        flat = ids.flatten().long()
        tally.index_add_(0, flat, torch.ones_like(flat, dtype=tally.dtype))
        self.step += 1
        hit = torch.isin(self.owner, flat) & (self.used_at < NEVER)
        missing = torch.tensor(list(dict.fromkeys(flat[self.table[flat] < 0].tolist())), dtype=torch.long)
        turn = (torch.arange(len(missing), device=ids.device) + self.step) % max(1, len(missing))
        missing = missing[turn >= (0 if takes is None else takes[len(missing)])]
        age = torch.where(hit, self.step, self.used_at)
        oldest = torch.argsort(age, stable=True)[: len(missing)]  # never a hit: those were used in this very step
        load = torch.full_like(self.owner, -1)
        load[oldest] = missing.int()
        leaving = self.owner[oldest]
        self.table[leaving[leaving >= 0].long()] = -1
        self.owner[oldest] = missing.int()
        self.table[missing] = (oldest + len(self.hot)).int()
        self.used_at.copy_(torch.where(hit | (load >= 0), self.step, self.used_at))
        return self.slots_of(ids), load

    def make_room(self, ids: Tensor) -> Tensor:
        """The oldest cache slot is emptied for the missing expert that most pairs chose; the answer is as in `admit`.

        Slots that were used become young. The tables name the newcomer only after `finish_loading`.
        """
        votes = torch.zeros(self.experts, dtype=torch.int32, device=ids.device)
        votes.index_add_(0, ids.flatten(), torch.ones_like(ids).flatten())
        self.step += 1
        hit = (self.owner >= 0) & (votes.index_select(0, self.owner.clamp_min(0)) > 0) & (self.used_at < NEVER)
        self.used_at.copy_(torch.where(hit, self.step, self.used_at))
        wanted = torch.where(self.table < 0, votes, 0)
        newcomer = torch.where(wanted.max() > 0, wanted.argmax(), -1).int()
        oldest = torch.arange(self.cache_slots, device=ids.device) == self.used_at.argmin()
        takes = oldest & (newcomer >= 0)
        leaves = torch.isin(torch.arange(self.experts, device=ids.device), self.owner.masked_fill(~takes, -1))
        self.table.masked_fill_(leaves, -1)
        self.owner.masked_fill_(takes, -1)
        return torch.where(takes, newcomer, -1).int()

    def finish_loading(self, load: Tensor) -> None:
        """The experts in `load` have arrived in their cache slots."""
        came = load >= 0
        self.owner.copy_(torch.where(came, load, self.owner))
        self.used_at.copy_(torch.where(came, self.step, self.used_at))
        slots = torch.arange(self.cache_slots, dtype=torch.int32, device=load.device) + len(self.hot)
        at = (load[None, :] == torch.arange(self.experts, device=load.device)[:, None]).int()  # [experts, cache slots]
        self.table.copy_(torch.where(at.any(1), (at * slots).sum(1).int(), self.table))

    def swap(self, goes: int, comes: int) -> int:
        """A hot expert and a cold one change places in the tables; gives the slot, whose weights the caller changes."""
        slot = self.hot.index(goes)
        self.hot[slot] = comes
        in_cache = self.owner == comes  # its copy there is not needed any more
        self.owner.masked_fill_(in_cache, -1)
        self.used_at.masked_fill_(in_cache, 0)
        self.table[goes] = -1
        self.table[comes] = slot
        return slot

    # Slots that change hands: counted from the first one that can be lent

    def lend(self, slots: range) -> None:
        """The memory of these slots is another's from now on."""
        assert None not in [self.pinned[i] for i in slots], f"slots {slots} are lent already"
        at = slice(self.kept + slots.start, self.kept + slots.stop)
        everyone = torch.arange(self.experts, device=self.owner.device)
        self.table.masked_fill_((everyone[:, None] == self.owner[None, at]).any(1), -1)
        self.owner[at] = -1
        self.pinned[slots.start : slots.stop] = [None] * len(slots)

    def pin(self, slots: range, experts: Sequence[int]) -> Tensor:
        """These experts, which are not among those that stay, take the place of what was in the slots; the answer is as
        in `admit`."""
        assert not set(self.staying) & set(experts), f"{experts} stay on the device already"
        at, device = slice(self.kept + slots.start, self.kept + slots.stop), self.owner.device
        comes = torch.tensor(experts, dtype=torch.int32, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        in_cache = (self.owner[:, None] == comes[None, :]).any(1)  # their copies there are not needed any more
        self.used_at.masked_fill_(in_cache, 0)
        self.owner.masked_fill_(in_cache, -1)
        everyone = torch.arange(self.experts, device=device)
        self.table.masked_fill_((everyone[:, None] == self.owner[None, at]).any(1), -1)
        self.owner[at] = comes
        first = len(self.hot) + at.start
        self.table.index_copy_(
            0, comes.long(), torch.arange(first, first + len(experts), dtype=torch.int32, device=device)
        )
        self.pinned[slots.start : slots.stop] = experts
        load = torch.full_like(self.owner, -1)
        load[at] = comes
        return load

    def check(self) -> None:
        """Every slot has at most one expert, both tables agree, and nothing was lost."""
        table, owner = self.table.tolist(), self.owner.tolist()
        expected = dict(enumerate(self.hot)) | {
            len(self.hot) + i: expert for i, expert in enumerate(owner) if expert >= 0
        }
        found = {slot: expert for expert, slot in enumerate(table) if slot >= 0}
        assert found == expected, f"the table says {found}, the slots hold {expected}"
        assert sum(slot >= 0 for slot in table) == len(found), f"two experts share a slot: {table}"
        pinned = [-1 if expert is None else expert for expert in self.pinned]
        assert owner[self.kept :] == pinned, f"slots that can be lent hold {owner[self.kept :]}, not {pinned}"
        ages = self.used_at.tolist()
        assert [age == NEVER for age in ages] == [i >= self.kept for i in range(len(ages))], f"last uses are {ages}"

"""The CPU's part in a step through the expert cache: CPU threads compute some of the missing experts while the others
come over PCIe."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rekindle.errors import CpuExpertsLost
from rekindle.experts.memory import HostMemory
from rekindle.kernels.moe.cold import ColdAnswer
from rekindle.kernels.moe.expert_threads import ExpertThreads, Mailbox, start_expert_threads


class CpuExperts:
    """The expert threads and their mailbox, shared by all layers of a stage: they run one after another."""

    def __init__(self, threads: ExpertThreads, memory: HostMemory, device: torch.device) -> None:
        self.threads = threads
        self._memory = memory  # of the mailbox; pinned as long as this lives
        self.lost = threads.box.lost.numpy()  # read between forwards; as a tensor that would take a microsecond
        self.number = torch.zeros(1, dtype=torch.int32, device=device)  # of the last request
        self.count = torch.zeros(1, dtype=torch.int32, device=device)  # pairs of the last step that the CPU took
        self.gone = torch.zeros(1, dtype=torch.int32, device=device)  # as `lost`, for the device: it waits only once
        self.answer = torch.zeros(threads.box.hidden, dtype=torch.float32, device=device)  # to a step of one row
        self.takes = torch.zeros(threads.box.pairs + 1, dtype=torch.int32, device=device)  # of n missing experts
        self.link_share = 1.0  # of the missing experts, that the CPU leaves to the link when there are many

    @classmethod
    def start(
        cls, rows: int, pairs: int, hidden: int, width: int, device: torch.device, threads: int | None = None
    ) -> CpuExperts | None:
        memory = HostMemory(Mailbox.nbytes(rows, pairs, hidden), device)
        started = start_expert_threads(Mailbox(rows, pairs, hidden, memory.take), width, threads)
        return None if started is None else cls(started, memory, device)


@dataclass(slots=True, eq=False)
class LayerCpuExperts:
    """The CPU threads of a stage, for one of its layers."""

    stage: CpuExperts
    layer: Tensor  # the layer's planes in host memory, described to the threads
    places: Tensor  # expert -> place in them

    @property
    def box(self) -> Mailbox:
        return self.stage.threads.box

    @property
    def takes(self) -> Tensor:
        return self.stage.takes

    @property
    def mailbox(self) -> tuple[Tensor | int, ...]:
        """The arguments of a kernel that writes a request, in its order."""
        own, box = self.stage, self.box
        parts = (part.data_ptr() for part in (box.asked, box.head, box.place, box.row, box.weight, box.x))
        return own.takes, self.layer.data_ptr(), own.count, *parts, own.number, own.gone

    @property
    def answer(self) -> ColdAnswer:
        own, box = self.stage, self.box
        addresses = (part.data_ptr() for part in (box.done, box.lost, box.out))
        return ColdAnswer(own.count, own.number, own.gone, own.answer, *addresses)

    def ask(self, h: Tensor, ids: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """Pairs without a slot go to the CPU; gives the weights, 0 for those."""
        from rekindle.experts.triton import ask

        return ask(self.mailbox, self.places, h, ids, slots, weights)

    def collect(self, total: Tensor) -> None:
        """Add what the CPU has computed meanwhile."""
        from rekindle.experts.triton import collect

        collect(self.answer, total)

    def check(self) -> None:
        """Threads that did not answer once are never asked again: StageLost would let the engine retry for ever."""
        if self.stage.lost[0]:
            raise CpuExpertsLost(
                "the device asked the CPU for cold experts, whose threads did not answer; restart the server"
            )

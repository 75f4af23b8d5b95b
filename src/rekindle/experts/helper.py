"""The CPU's part in a step through the ring: while some missing experts come over the link, a crew computes others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rekindle.errors import CrewLost
from rekindle.experts.memory import HostMemory
from rekindle.kernels.moe.cold import Answer
from rekindle.kernels.moe.crew import Crew, Mailbox, start_crew


class Helper:
    """A crew and its mailbox, shared by all layers of a stage: they run one after another."""

    def __init__(self, crew: Crew, memory: HostMemory, device: torch.device) -> None:
        self.crew = crew
        self._memory = memory  # of the mailbox: the device may write there as long as this lives
        self.lost = crew.box.lost.numpy()  # looked at between forwards; as a tensor that would take a microsecond
        self.number = torch.zeros(1, dtype=torch.int32, device=device)  # of the last request
        self.count = torch.zeros(1, dtype=torch.int32, device=device)  # pairs of the last step that the CPU took
        self.gone = torch.zeros(1, dtype=torch.int32, device=device)  # as `lost`, for the device: it waits only once
        self.answer = torch.zeros(crew.box.hidden, dtype=torch.float32, device=device)  # to a step of one row
        self.takes = torch.zeros(crew.box.pairs + 1, dtype=torch.int32, device=device)  # of n missing experts, takes[n]

    @classmethod
    def start(
        cls, rows: int, pairs: int, hidden: int, width: int, device: torch.device, threads: int | None = None
    ) -> Helper | None:
        memory = HostMemory(Mailbox.nbytes(rows, pairs, hidden), device)
        crew = start_crew(Mailbox(rows, pairs, hidden, memory.take), width, threads)
        return None if crew is None else cls(crew, memory, device)


@dataclass(slots=True, eq=False)
class LayerHelper:
    """The helper as one layer sees it."""

    helper: Helper
    layer: Tensor  # the layer's planes in host memory, described to the crew
    places: Tensor  # expert -> place in them

    @property
    def box(self) -> Mailbox:
        return self.helper.crew.box

    @property
    def takes(self) -> Tensor:
        return self.helper.takes

    @property
    def mailbox(self) -> tuple[Tensor | int, ...]:
        """What a kernel that asks must know, in the order in which it takes it."""
        own, box = self.helper, self.box
        parts = (part.data_ptr() for part in (box.asked, box.head, box.place, box.row, box.weight, box.x))
        return own.takes, self.layer.data_ptr(), own.count, *parts, own.number, own.gone

    @property
    def answer(self) -> Answer:
        own, box = self.helper, self.box
        addresses = (part.data_ptr() for part in (box.done, box.lost, box.out))
        return Answer(own.count, own.number, own.gone, own.answer, *addresses)

    def ask(self, h: Tensor, ids: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """Pairs without a slot go to the CPU; gives the weights for all others."""
        from rekindle.experts.triton import ask

        return ask(self.mailbox, self.places, h, ids, slots, weights)

    def collect(self, total: Tensor) -> None:
        """Add what the CPU has computed since."""
        from rekindle.experts.triton import collect

        collect(self.answer, total)

    def check(self) -> None:
        """Once lost, they stay lost: not StageLost, after which the engine would try again for ever."""
        if self.helper.lost[0]:
            raise CrewLost(
                "the device asked the CPU for cold experts, whose threads did not answer; restart the server"
            )

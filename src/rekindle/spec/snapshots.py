"""What snapshots of a model take, from its numbers alone."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.spec.base import F32, PAGE
from rekindle.spec.model import ModelSpec

NEWEST = 3  # snapshots a conversation may need next: its answer, its prompt's end, the last message of it
TOKEN = 4  # bytes of a token id


@dataclass(frozen=True, slots=True)
class SnapshotBytes:
    """Bytes of snapshots in a tier. Those of one conversation share their pages."""

    state: int  # in every snapshot: state of a fixed size in all layers, the logits, and a drafter's context at most
    page: int  # of PAGE tokens, in all layers

    def at(self, position: int) -> int:
        """One snapshot, alone, of so many tokens."""
        return self.state + self._growing(position)

    def conversation(self, position: int) -> int:
        """What a conversation of so many tokens keeps: its pages, its newest states and that of its system prompt, each
        with a page that was still open and with its tokens."""
        return self.at(position) + NEWEST * (self.state + self.page + TOKEN * position)

    def longest(self, budget: int) -> int:
        """The most tokens whose snapshot fits, in whole pages."""
        return max(0, budget - self.state) // self._growing(PAGE) * PAGE

    def _growing(self, position: int) -> int:
        return -(-position // PAGE) * (self.page + PAGE * TOKEN)


def snapshot_bytes(spec: ModelSpec, kv_type: str, drafter: int = 0) -> SnapshotBytes:
    """drafter: bytes of its context, 0 where there is none."""
    state = sum(sum(mixer.slot_bytes().values()) for mixer in spec.mixers) + F32 * spec.vocab + drafter
    return SnapshotBytes(state, sum(mixer.page_bytes(kv_type) for mixer in spec.mixers))

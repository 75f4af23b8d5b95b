"""Audits as runs of the engine: in idle time a restored snapshot's tokens are computed again, cold."""

from __future__ import annotations

import torch

from rekindle.engine.audit import Audit, Auditor
from rekindle.engine.endings import Endings
from rekindle.engine.inbox import Inbox
from rekindle.engine.roster import Roster
from rekindle.engine.sequence import Sequence
from rekindle.engine.types import Request, Sampling
from rekindle.prompt import Prompt
from rekindle.snapshots.types import Snapshot, wait_for
from rekindle.stages import Pipeline


class AuditRuns:
    def __init__(
        self, pipeline: Pipeline, auditor: Auditor, roster: Roster, inbox: Inbox, endings: Endings, grid: int
    ) -> None:
        self._pipeline = pipeline
        self._auditor = auditor
        self._roster = roster
        self._inbox = inbox
        self._endings = endings
        self._grid = grid

    @property
    def due(self) -> bool:
        """Whether a snapshot is to be audited."""
        return self._auditor.waits

    def start(self) -> bool:
        """Enqueue the run of the next audit, as background work. False if no snapshot is to be audited."""
        audit = self._auditor.take()
        if audit is None:
            return False
        run = _make_run(audit)
        self._inbox.count_in(run.request.namespace)
        self._roster.enqueue(run)
        return True

    def conclude(self, sequence: Sequence, audit: Audit, logits: torch.Tensor) -> None:
        """The cold run is complete: compare its state and its last row of logits with the snapshot's."""
        parts = self._pipeline.capture(sequence.slot).result()
        wait_for(parts)
        self._endings.release(sequence)
        tokens, stretches = audit.snapshot.tokens, tuple(sequence.stretches)
        logits = logits.detach().to("cpu", torch.float32)
        self._auditor.judge(audit, Snapshot(tokens, parts, logits, self._grid, stretches))


def _make_run(audit: Audit) -> Sequence:
    tokens = tuple(audit.snapshot.tokens.tolist())
    request = Request(
        "audit", Prompt(tokens), Sampling(), 0, stop_tokens=frozenset(), sink=lambda event: None, background=True
    )
    return Sequence(request, list(tokens), max_tokens=0, prefill_end=len(tokens), audit=audit)

"""The engine: one thread that turns requests into events.

Its loop receives what other threads ask for, admits sequences to slots, schedules and launches steps, and collects the
results of the oldest step. Each verb has a file of its own:

    receive    inbox, intake (a request becomes a sequence)
    admit      admission, restore, loader (reads from slow tiers), twins (waiting for one another's prefix)
    schedule   scheduler, chunks, pace, shared_pace, drafting (what is proposed), ahead (blocks that the device knows
               before the host), forcing (tokens that must come)
    launch     launch, flight (a step under way), sampler, recorded_draws (on a GPU), to_host
    collect    results, publisher (captures → snapshots), account, sums
    end        endings, recovery (a stage was lost), audit and audit_runs (restores computed again)

roster knows every live sequence (sequence, state); router shares requests among replicas.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence as Sequential
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from rekindle.engine.account import Totals
from rekindle.engine.admission import Admission
from rekindle.engine.ahead import launch_behind, launch_pass
from rekindle.engine.audit import Auditor
from rekindle.engine.audit_runs import AuditRuns
from rekindle.engine.drafting import NO_DRAFTS, Drafts, Measures, Proposer
from rekindle.engine.endings import Endings
from rekindle.engine.flight import Flight, Flights
from rekindle.engine.inbox import Inbox
from rekindle.engine.intake import make_sequence
from rekindle.engine.kept_slots import KeptSlots
from rekindle.engine.launch import Launcher
from rekindle.engine.pace import Pace
from rekindle.engine.publisher import Publisher
from rekindle.engine.recorded_draws import RecordedDraws
from rekindle.engine.recovery import Recovery
from rekindle.engine.restore import Restorer
from rekindle.engine.results import Collector
from rekindle.engine.roster import Roster
from rekindle.engine.sampler import warm_up_draws
from rekindle.engine.scheduler import BLOCK_ROWS, Scheduler
from rekindle.engine.sequence import Sequence
from rekindle.engine.shared_pace import SharedPace
from rekindle.engine.to_host import DrawnTokens
from rekindle.engine.twins import Twins
from rekindle.engine.types import CacheReport, EngineStatus, Request
from rekindle.hurry import hurrying
from rekindle.kernels.sampling import argmax
from rekindle.prefix import PrefixCache
from rekindle.prompt import MOST_OF_A_KIND, Prompt
from rekindle.speculative.cost import Costs, GpuCosts
from rekindle.speculative.width import MOST
from rekindle.stages import Pipeline
from rekindle.stages.graphs import GraphRecorder
from rekindle.stages.layout import SHARED, SHARERS, round_up

LINGER = 0.003  # seconds in which a client that was just answered often asks again: captures wait for it …
LOOK = 0.0005  # … and between two looks at copies that are under way
BESIDE = 0.001  # seconds between two looks at a long chunk, which takes fifty times as long
AT_FIRST = max(SHARERS)  # requests that come into slots before a device without work gets a step: no more can share it


@dataclass(frozen=True, slots=True)
class EngineSettings:
    context: int  # tokens of prompt and answer together
    queue: int = 256  # requests that may wait for a slot
    async_steps: int = 0  # steps launched before the token of the last one is known; 0 leaves it to the pipeline
    grid: int = 512  # prefill chunk; the same edges give the same bits
    turns: bool = False  # chunks and decode steps take turns (GPUs of this process); else they share batches
    max_gap: float | None = None  # seconds between two tokens of an answer while prompts come in; None: no target
    shorter_gap: float | None = None  # the same where a chunk cannot pause and is made shorter; None: as long
    audit: int = 0  # one in this many restores is computed again, cold, and compared; 0 audits nothing
    drawable: int | None = None  # ids below it may be drawn, others are padding; None: the vocabulary is not known
    drafts: Drafts = NO_DRAFTS  # what proposes tokens for the target to verify
    measure_drafts: bool = False  # blocks are as wide as measured times say that they pay


class Engine:
    """Live sequences over one pipeline. What follows `_run` happens on the engine's thread, the rest on any."""

    def __init__(self, pipeline: Pipeline, prefixes: PrefixCache, settings: EngineSettings) -> None:
        assert settings.async_steps <= 1, "a step two ahead would consume a token that no step has drawn"
        self.pipeline = pipeline
        self.prefixes = prefixes
        self.settings = settings
        self._degraded: str | None = None
        self._wire()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def _wire(self) -> None:
        pipeline, prefixes, settings = self.pipeline, self.prefixes, self.settings
        grid, async_steps = settings.grid, settings.async_steps or pipeline.async_steps
        pace = _pace(settings)
        drafter = pipeline.drafter
        chained = drafter is not None and drafter.chained
        costs = None
        if settings.measure_drafts:
            costs = Costs(chained) if pipeline.on_cpu else GpuCosts(chained, round_up)
        longest = MOST if drafter is None else drafter.longest
        self._measures = Measures(costs, pipeline.async_steps > 0, longest, fault=lambda: pipeline.drafter_fault)
        ahead = partial(launch_pass, pipeline.propose_ahead, device=pipeline.logits_device)
        ask = pipeline.propose if drafter is not None else None
        behind = partial(launch_behind, pipeline.propose_behind, device=pipeline.logits_device)
        proposer = Proposer(ask, costs, *((ahead, behind) if pipeline.drafts_ahead else ()))
        reach = drafter.reach if drafter is not None else 0
        block_rows = None if pipeline.on_cpu else BLOCK_ROWS
        self._scheduler = scheduler = Scheduler(
            grid, pipeline.depth, async_steps, pace, block_rows, proposer, reach, pipeline.can_pause
        )
        on_cpu = all(stage.device == "cpu" for stage in pipeline.stages)
        # Elsewhere a launch is all of the work, or a wait for another process; several stages fill a slot behind the
        # batches that they run, and the token loop waits for them.
        self._launching = hurrying if pipeline.async_steps or len(pipeline.stages) > 1 else nullcontext()
        filling = hurrying if pipeline.async_steps else nullcontext()

        self._totals = Totals()
        self._flights = Flights()  # the launcher appends, the collector takes the oldest
        self._inbox = inbox = Inbox(settings.queue)
        self._roster = roster = Roster(pipeline.slots, scheduler, KeptSlots(prefixes.held))
        self._publisher = publisher = Publisher(pipeline, prefixes, grid)
        self._auditor = Auditor(prefixes, settings.audit, on_cpu)
        self._endings = endings = Endings(pipeline, publisher, roster, inbox)
        self._audits = AuditRuns(pipeline, self._auditor, roster, inbox, endings, grid)
        self._launcher = Launcher(pipeline, scheduler, self._flights, roster, publisher, endings, grid)
        self._collector = Collector(
            pipeline, self._flights, roster, publisher, self._audits, endings, self._totals, pace, costs
        )
        self._restorer = Restorer(
            pipeline, prefixes, roster, publisher, self._auditor, endings, self._note_loaded, grid, settings.drawable
        )
        twins = Twins(prefixes, publisher, roster)
        self._admission = Admission(
            roster, inbox, self._restorer, twins, self._collector, endings, self._totals, filling
        )
        self._kept_out = False  # requests came into no slots in the last step, for the sake of a chunk
        self._recovery = Recovery(pipeline, self._flights, roster, publisher, endings, inbox)

    # From any thread

    def start(self) -> Engine:
        self._thread.start()
        return self

    def make_ready(self, vocab: int) -> None:
        """On a GPU, before the start: run the sampler and the copies of logits once, so that no request waits for their
        compilation, and record draws."""
        device = self.pipeline.logits_device
        if device.type == "cuda":
            with torch.cuda.device(device):
                logits = torch.zeros(1, vocab, device=device)[:, : self.settings.drawable]
                warm_up_draws(logits)
                DrawnTokens(argmax(logits)).on_host()
                self._publisher.make_ready(logits[0])
                draws = RecordedDraws(GraphRecorder(device), device, logits.shape[1], self.pipeline.slots)
                draws.make_ready()
                self._launcher.draw = self._restorer.draw = draws

    def submit(self, request: Request) -> None:
        """Take the request, or refuse it at once with the reason."""
        pages = self.pipeline.pages().total
        sequence = make_sequence(request, self.settings.context, pages, self.settings.drawable)
        sequence.account.cache = CacheReport(self.prefixes.by_tier())
        sequence.draft = self.settings.drafts.of(sequence.max_tokens, self._measures)
        if request.rules is not None:
            sequence.guide = request.rules.begin(request.stop_tokens)
        self._inbox.submit(lambda: self._admission.enqueue(sequence), request.namespace)

    def cancel(self, request_id: str) -> None:
        """Stop the request at the next step; it gets its Finished event. Unknown ids are ignored: it has ended."""
        self._inbox.put(lambda: self._roster.cancel(request_id))

    def keep(self, prompt: Prompt, seconds: float, namespace: str) -> None:
        """Keep the snapshots at the prompt's marks for so long before others. Those still being copied are waited for,
        on the engine's thread."""
        self._inbox.put(lambda: self._keep(prompt, seconds, namespace))

    def _keep(self, prompt: Prompt, seconds: float, namespace: str) -> None:
        self._publisher.publish_captured(prompt.key, namespace)
        for mark in prompt.marks[-MOST_OF_A_KIND:]:
            self.prefixes.keep(prompt.key[:mark], seconds, namespace)

    def kept_length(self, tokens: Sequential[int] | np.ndarray, namespace: str) -> int:
        """How much of a prompt lies in a slot that the engine keeps."""
        return self._roster.kept.known_length(tokens, namespace)

    def status(self) -> EngineStatus:
        return EngineStatus(
            running=len(self._roster.running),
            waiting=self._inbox.waiting,
            slots=self.pipeline.slots,
            pages=self.pipeline.pages(),
            computed_tokens=self._totals.computed,
            restored_tokens=self._totals.restored,
            generated_tokens=self._totals.generated,
            audits=self._auditor.audits,
            audit_mismatches=self._auditor.mismatches,
            cache=self.prefixes.stats(),
            work=self.pipeline.work(),
            broken=self._inbox.broken,
            degraded=self._degraded,
            draining=self._inbox.draining,
        )

    def degrade(self, reason: str) -> None:
        """Go on answering, but capture and publish nothing more: the loaded weights are no longer those of the file."""
        self._degraded = reason
        self._publisher.close()

    def drain(self) -> None:
        """Refuse new requests; those taken before run to their end, background work is cancelled."""
        self._inbox.drain()
        self._inbox.put(self._roster.cancel_background)

    def end_requests(self) -> None:
        """Refuse new requests, and end every other as cancelled after the step under way. Waits for nothing."""
        self._inbox.stop()

    def wait_for_end(self) -> None:
        """After `end_requests`: until every request has had its last event."""
        self._thread.join()

    def stop(self) -> None:
        """End every request, publish what is under way, and stop the thread."""
        self.end_requests()
        self.wait_for_end()
        self._restorer.stop()
        self._publisher.stop()
        self.prefixes.close()
        self.pipeline.stop()

    def _note_loaded(self, sequence: Sequence) -> None:
        self._inbox.put(lambda: self._admission.take_loaded(sequence))

    # On the engine's thread

    def _run(self) -> None:
        going = True
        while going:
            with self._recovery.surviving():
                going = self._receive()
                self._step() if going else self._wind_up()

    def _receive(self) -> bool:
        """Run what other threads asked for, and wait for it in idle time. False when it is time to stop."""
        return self._inbox.receive(idle=self._is_idle())

    def _step(self) -> None:
        begun = self._publisher.unfinished
        self._endings.cancel_marked()
        if not self._runs_long:  # others come in while the device has more to do
            self._admission.admit(AT_FIRST)
            self._launch()
        if self._scheduler.takes_no_more:
            self._admission.ask_twins()
            self._launch()
        self._kept_out = self._next_waits_for_results and not self._kept_out
        if not self._kept_out:
            self._admission.admit()
        self._launch()
        self._collector.let_go()
        self._admit_beside_chunk()
        self._collector.collect()
        # Captures of the step that was collected wait for the next: its tokens are followed by others first. Where
        # nothing runs a request may come any moment.
        begun = begun or (self._publisher.unfinished and self._runs_long) or self._publisher.can_pay
        if begun and self._roster.running:
            self._launch()  # it takes longer than a step
            self._collector.let_go()
            self._publisher.finish()
            self._publisher.capture_owed()
        self._publisher.publish_ready()

    @property
    def _next_waits_for_results(self) -> bool:
        """Whether a chunk that takes no more prompts along could be launched once the oldest step, which is over, has
        been looked at. Nobody is kept out for it twice in a row: while long prompts come in it may always be so."""
        return self._scheduler.takes_no_more and bool(self._flights) and self._flights[0].is_over is True

    def _admit_beside_chunk(self) -> None:
        """While a long chunk is all that the device has, and nobody answers, requests that come get their slots. The
        next chunk is launched as soon as eight prompts share it, else when this one is over and before its results are
        looked at: the device would stand still meanwhile. But where it brings a first token, and no crowd waits, they
        come first: the second token would wait for a whole chunk."""
        while (chunk := self._long_chunk) is not None and chunk.is_over is False:
            if not self._inbox.comes_within(BESIDE):
                continue
            if not self._inbox.receive(idle=False):
                return
            self._endings.cancel_marked()
            self._admission.admit()
            if self._scheduler.is_crowded:
                self._launch()
        if chunk is not None and (self._scheduler.is_crowded or not chunk.drawing):
            self._launch()

    @property
    def _long_chunk(self) -> Flight | None:
        """Which is all that the device has, while nobody answers."""
        only = self._flights[0] if len(self._flights) == 1 else None
        if not isinstance(only, Flight) or only.batch.rows <= SHARED:
            return None
        return only if not any(sequence.decoding for sequence in self._roster.running) else None

    @property
    def _runs_long(self) -> bool:
        """Whether the device is busy for some time: with a chunk, or a block."""
        return any(flight.batch.rows > len(flight.batch.segments) for flight in self._flights)

    def _launch(self) -> None:
        with self._launching:
            while self._launcher.launch_next():
                pass

    def _wind_up(self) -> None:
        """The end: results under way are collected, every request gets its last event, captures are published."""
        self._launcher.end_pause()
        self._collector.collect_all()
        self._endings.cancel_all()
        self._publisher.drain()
        self._endings.give_up_kept()

    @property
    def busy(self) -> bool:
        """Whether some sequence runs. From any thread."""
        return bool(self._roster.running)

    @property
    def has_requests(self) -> bool:
        """Whether some sequence runs, or waits for its slot or for its snapshot. From any thread."""
        return self.busy or bool(self._roster.line)

    def _is_idle(self) -> bool:
        """Whether nothing can be done until a command arrives. Idle time is used for captures, then for an audit."""
        if self._roster.running or self._flights or self._roster.may_admit:
            return False
        if self._publisher.unfinished and not self._audits.due and self._inbox.comes_within(LINGER):
            return False
        while self._publisher.awaits_any:  # copies are under way: a request that comes meanwhile does not wait for them
            self._publisher.capture_owed()
            # An audit compares what has been published; a whole crowd's copies are no matter of a moment.
            waits = self._audits.due and not self._publisher.owes
            self._publisher.drain() if waits else self._publisher.finish()
            self._publisher.publish_ready()
            if self._publisher.awaits_any and self._inbox.comes_within(LOOK):
                return False
        return bool(self._roster.line) or not self._audits.start()


def _pace(settings: EngineSettings) -> Pace | SharedPace | None:
    if settings.max_gap is None:
        return None
    if settings.turns:
        return Pace(settings.max_gap, settings.grid, settings.shorter_gap)
    return SharedPace(settings.max_gap, settings.grid)

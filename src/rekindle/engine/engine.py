"""The token loop: take requests, restore what is known, run the rest, hand out tokens, capture at boundaries."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Sequential
from dataclasses import dataclass, replace

import numpy as np
import torch

from rekindle.batch import DRAWN, Batch
from rekindle.engine.admission import Admission
from rekindle.engine.audit import Audit, Auditor
from rekindle.engine.flight import Flight, Result
from rekindle.engine.publisher import Publisher
from rekindle.engine.sampler import are_drawable, draw, logprob_of, logprobs_of
from rekindle.engine.scheduler import Scheduler
from rekindle.engine.sequence import Phase, Sequence
from rekindle.engine.types import (
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    Request,
    Sampling,
    Started,
    Token,
)
from rekindle.errors import (
    BadLogits,
    BadRequest,
    PoolFull,
    PromptTooLong,
    QueueFull,
    RekindleError,
    StageLost,
    Stopping,
)
from rekindle.prefix import PrefixCache
from rekindle.prefix.cache import CacheStats
from rekindle.prompt import BoundaryKind, Prompt
from rekindle.snapshots.types import Snapshot, wait_for
from rekindle.spec import PAGE
from rekindle.stages import Pipeline
from rekindle.stages.types import Ahead, PageCount

log = logging.getLogger("rekindle.engine")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    context: int  # tokens of prompt and answer together
    queue: int = 256  # requests that may wait for a slot
    run_ahead: int = 0  # steps handed over before their token is known; 0 leaves it to the pipeline
    grid: int = 512  # prefill chunk; the same edges give the same bits
    audit: int = 0  # one in so many restores is computed again, cold, and compared; 0 audits nothing


@dataclass(frozen=True, slots=True)
class EngineStatus:
    running: int
    waiting: int
    slots: int
    pages: PageCount
    computed_tokens: int  # prompt tokens that ran through a forward
    restored_tokens: int
    generated_tokens: int
    audits: int
    audit_mismatches: int
    cache: CacheStats
    work: Counter[str]  # how the stages of this process have worked, by "kind:how"
    broken: str | None = None  # why nothing can run any more


class Engine:
    """Owns the live sequences. All below `_run` happens on one thread; `submit` and `cancel` may come from any."""

    def __init__(self, pipeline: Pipeline, prefixes: PrefixCache, settings: EngineSettings) -> None:
        self.pipeline = pipeline
        self.prefixes = prefixes
        self.settings = settings
        assert settings.run_ahead <= 1, "a step two ahead would consume a token that nobody has seen"
        self._scheduler = Scheduler(settings.grid, pipeline.depth, settings.run_ahead or pipeline.run_ahead)
        self._publisher = Publisher(pipeline, prefixes, settings.grid)
        on_cpu = all(stage.device == "cpu" for stage in pipeline.stages)
        self._auditor = Auditor(prefixes, settings.audit, on_cpu)
        self._admission = Admission(pipeline, prefixes, self._publisher, self._auditor, self._note_loaded)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._free_slots = list(range(pipeline.slots - 1, -1, -1))
        self._flights: deque[Flight] = deque()
        self._by_id: dict[str, Sequence] = {}
        self._waiting_count = 0  # guarded by the lock: what submit() promises and admission takes back
        self._lock = threading.Lock()
        self._computed = self._restored = self._generated = 0
        self._stopping = False
        self._broken: str | None = None  # why nothing can run any more
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # What others call

    def start(self) -> Engine:
        self._thread.start()
        return self

    def submit(self, request: Request) -> None:
        """Take the request, or refuse it at once with the reason."""
        sequence = self._make_sequence(request)
        with self._lock:
            if self._stopping:
                raise Stopping("the server is stopping and takes no more requests")
            if self._waiting_count >= self.settings.queue:
                raise QueueFull(f"{self._waiting_count} requests are waiting, the queue holds {self.settings.queue}")
            if self._broken is not None:
                raise StageLost(f"the engine cannot run any more: {self._broken}")
            self._waiting_count += 1
            self._commands.put(
                lambda: self._enqueue(sequence)
            )  # inside the lock, so that nothing stands behind the stop

    def cancel(self, request_id: str) -> None:
        """Stop the request at the next step; it gets its Finished event. Unknown ids are ignored: it has ended."""
        self._commands.put(lambda: self._mark_cancelled(request_id))

    def _note_loaded(self, sequence: Sequence) -> None:
        self._commands.put(lambda: self._take_loaded(sequence))

    def status(self) -> EngineStatus:
        return EngineStatus(
            running=len(self._running),
            waiting=self._waiting_count,
            slots=self.pipeline.slots,
            pages=self.pipeline.pages(),
            computed_tokens=self._computed,
            restored_tokens=self._restored,
            generated_tokens=self._generated,
            audits=self._auditor.audits,
            audit_mismatches=self._auditor.mismatches,
            cache=self.prefixes.stats(),
            work=self.pipeline.work(),
            broken=self._broken,
        )

    def end_requests(self) -> None:
        """Take nothing more, and end every request as cancelled after the step under way. Waits for nothing."""
        with self._lock:
            self._stopping = True
            self._commands.put(None)

    def wait_for_end(self) -> None:
        """After `end_requests`: until everybody has had a last event."""
        self._thread.join()

    def stop(self) -> None:
        """End every request, publish what is under way, and stop the thread."""
        self.end_requests()
        self.wait_for_end()
        self._admission.stop()
        self.prefixes.close()
        self.pipeline.stop()

    def _make_sequence(self, request: Request) -> Sequence:
        length, pages = len(request.prompt.tokens), self.pipeline.pages().total
        if length == 0:
            raise BadRequest("the prompt is empty", field="prompt")
        if length >= self.settings.context:
            raise PromptTooLong(f"the prompt has {length} tokens, the context holds {self.settings.context}")
        if -(-(length + 1) // PAGE) > pages:
            raise PromptTooLong(f"the prompt has {length} tokens, the KV pool holds {pages * PAGE}")
        room = min(self.settings.context, pages * PAGE) - length
        return Sequence(request, list(request.prompt.tokens), min(request.max_tokens, room), prefill_end=length)

    # The loop

    def _run(self) -> None:
        going = True
        while going:
            try:
                try:
                    going = self._take_commands()
                    self._step() if going else self._wind_up()
                except StageLost as error:
                    self._outlive(error)
            except Exception as error:
                log.exception("the engine's step failed; ending the requests it held")
                self._fail_everything(error)

    def _wind_up(self) -> None:
        """The end: what is under way comes back, everyone gets an answer, what was captured is published."""
        while self._flights:
            self._settle(self._flights.popleft())
        self._cancel_everything()
        self._publisher.drain()

    def _cancel_everything(self) -> None:
        for sequence in [*self._running, *self._waiting]:
            self._finish(sequence, FinishReason.CANCELLED)

    def _step(self) -> None:
        self._drop_cancelled()
        self._admit()
        while len(self._flights) < self._scheduler.in_flight and self._launch():
            pass
        if self._flights:
            self._settle(self._flights.popleft())
        self._publisher.publish_ready()

    def _take_commands(self) -> bool:
        """Run what others asked for; sleep when there is nothing to do. False when it is time to stop."""
        idle = not self._running and not self._flights and not self._may_admit()
        if idle:
            self._publisher.drain()
            idle = bool(self._waiting) or not self._start_audit()
        while True:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            idle = False

    def _enqueue(self, sequence: Sequence) -> None:
        """In order of arrival, but whatever is in the background stands behind everyone else."""
        self._by_id[sequence.request.id] = sequence
        place = len(self._waiting)
        if not sequence.background:
            place = next((i for i, other in enumerate(self._waiting) if other.background), place)
            self._yield_background_slot()
        self._waiting.insert(place, sequence)

    def _yield_background_slot(self) -> None:
        """Background work gives up its slot to whoever has none; what it has captured so far stays published."""
        if not self._free_slots:
            background = [s for s in self._running if s.background]
            if background:
                background[-1].cancelled = True

    def _mark_cancelled(self, request_id: str) -> None:
        if (sequence := self._by_id.get(request_id)) is not None:
            sequence.cancelled = True

    def _drop_cancelled(self) -> None:
        for sequence in [*self._running, *self._waiting]:
            if sequence.cancelled and sequence.in_flight == 0:
                self._finish(sequence, FinishReason.CANCELLED)

    # Admission: a slot, and everything that is already known about the prompt

    def _admit(self) -> None:
        """In order of arrival. Whoever waits for the disk keeps a slot free, and those behind may go before it."""
        reserved = 0
        for sequence in tuple(self._waiting):
            if len(self._free_slots) == reserved:
                return
            if sequence.background and any(not s.background for s in self._running):
                return
            if sequence.loading is None:
                if self._admission.twin_is_ahead(sequence, self._scheduler.prefilling):
                    return
                if not self._place(sequence, self._free_slots[-1]):
                    return  # pages are short
            reserved += sequence.loading is not None

    def _place(self, sequence: Sequence, slot: int) -> bool:
        """Start it, or have it read from disk; False while pages are short. What goes wrong is its own matter."""
        try:
            if self._admission.place(sequence, slot, alone=not self._running):
                self._start(sequence)
            elif sequence.loading is None:
                return False
        except StageLost:
            raise
        except PoolFull as error:
            if self._running:
                return False  # they will leave pages behind
            self._give_up(sequence, slot, PromptTooLong(f"the KV pool cannot take the state to restore: {error}"))
        except Exception as error:
            self._give_up(sequence, slot, error)
        return True

    def _give_up(self, sequence: Sequence, slot: int, error: Exception) -> None:
        """It could not start: the slot is emptied of what had been restored."""
        if sequence.slot < 0:
            self._close_somehow(slot)
        self._fail([sequence], error)

    def _may_admit(self) -> bool:
        """Whether somebody waits for something else than the disk, or a slot kept free for whoever does."""
        loading = sum(sequence.loading is not None for sequence in self._waiting)
        return loading < min(len(self._waiting), len(self._free_slots))

    def _start(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self._take_slot(sequence)
        self._running.append(sequence)
        self._scheduler.add(sequence)
        if sequence.position == len(sequence.tokens):
            self._draw_first(sequence)

    def _take_slot(self, sequence: Sequence) -> None:
        sequence.slot = self._free_slots.pop()
        sequence.phase = Phase.PREFILL if sequence.prefill_left else Phase.DECODE
        if not sequence.admitted_at:
            sequence.admitted_at = time.monotonic()
            with self._lock:
                self._waiting_count -= 1
            self._restored += sequence.cache.restored
            self._emit(sequence, Started(sequence.cache))

    def _take_loaded(self, sequence: Sequence) -> None:
        try:
            self._admission.take_loaded(sequence)
        except Exception as error:
            self._fail([sequence], error)

    # Pages

    def _launch(self) -> bool:
        """Hand one batch to the pipeline. False when nothing is to be run, or nothing fits until others settle."""
        if self._flights and self._flights[-1].failed:
            return False  # what it left behind is settled before anything runs on top of it
        reserved = sum(_pages_in_flight(flight) for flight in self._flights)
        free = self.pipeline.pages().free - reserved
        short = False

        def fits(sequence: Sequence, end: int) -> bool:
            nonlocal free, short
            needed = sequence.pages_needed(end)
            if needed > free:
                short = True
                return False
            free -= needed
            return True

        decoding = [s for s in self._running if s.phase is Phase.DECODE and not s.cancelled]
        chosen = self._scheduler.next_batch(decoding, fits)
        if chosen is None:
            if short and not self._flights:
                self._set_aside_youngest()
                return True
            return False
        self._hand_over(*chosen)
        return True

    def _hand_over(self, batch: Batch, owners: list[Sequence]) -> None:
        flight = Flight(batch, tuple(owners), self.pipeline.forward(batch, self._ahead_of(batch, owners)))
        for segment, sequence in zip(batch.segments, owners, strict=True):
            sequence.in_flight += 1
            how = sequence.how(alone=len(owners) == 1)
            sequence.record(segment.position, segment.end, how, self.settings.grid)
            sequence.position = segment.end
            if sequence.phase is Phase.PREFILL and segment.end in sequence.kinds:
                self._publisher.capture(sequence, segment.end, sequence.kinds[segment.end])
        if flight.output.done() and flight.output.exception() is None:
            flight.draw()  # the device goes on to draw while the host does other things
        self._flights.append(flight)

    def _ahead_of(self, batch: Batch, owners: list[Sequence]) -> Ahead | None:
        """Where the rows whose token is not known yet find it: in what the last flight draws."""
        rows = [row for row, segment in batch.row_starts() if segment.tokens == (DRAWN,)]
        if not rows:
            return None
        last = self._flights[-1]
        assert last.drawn is not None, "the step before has not drawn"
        waiting = [owner for segment, owner in zip(batch.segments, owners, strict=True) if segment.tokens == (DRAWN,)]
        return Ahead(last.drawn.tokens, tuple(rows), tuple(last.drawing.index(owner) for owner in waiting))

    def _set_aside_youngest(self) -> None:
        """Pages are short: the youngest sequence leaves its slot with all its state, and returns when there is room."""
        if background := [s for s in self._running if s.background]:
            self._finish(background[-1], FinishReason.CANCELLED)  # nobody waits for it
            return
        victim = max(self._running, key=lambda s: s.submitted_at)
        parts = self.pipeline.capture(victim.slot).result()
        victim.parked = Snapshot(
            tokens=np.asarray(victim.tokens[: victim.position], dtype=np.int32),
            parts=parts,
            logits=None,
            grid=self.settings.grid,
            stretches=tuple(victim.stretches),
        )
        log.info("pages are short: request %s waits at %d tokens", victim.request.id, victim.position)
        self._leave_slot(victim)
        victim.logits = None
        victim.phase = Phase.WAITING
        self._waiting.appendleft(victim)

    # Settling: what came back from the pipeline

    def _settle(self, flight: Flight) -> None:
        error = flight.output.exception()
        if isinstance(error, StageLost):
            self._outlive(error)
            return
        if isinstance(error, Exception):
            self._fail(flight.owners, error)
            return
        flight.draw()
        for result in flight.results():
            segment, sequence, rows, _ = result
            sequence.in_flight -= 1
            sequence.settled = segment.end
            sequence.sparse |= segment.slot in flight.output.result().skipping
            if sequence.phase is Phase.PREFILL:
                self._settle_chunk(result)
            if len(rows) and segment.end >= sequence.prefill_end:
                sequence.logits = rows[-1]
            if sequence.phase is Phase.ENDING and sequence.in_flight == 0:
                self._let_go(sequence)
        drawn = flight.drawn
        if drawn is not None:
            for sequence, token in zip(flight.drawing, drawn.on_host(), strict=True):
                if sequence.phase is Phase.DECODE and not sequence.cancelled:
                    self._take_token(sequence, token)

    def _settle_chunk(self, result: Result) -> None:
        segment, sequence, rows, scores = result
        if sequence.audit is not None:
            if segment.end == sequence.prompt_length and not sequence.cancelled:
                self._conclude_audit(sequence, sequence.audit, rows[-1])
            return
        self._computed += len(segment)
        draws = sequence.max_tokens > 0 and sequence.request.prompt_logprobs is None  # whoever draws finds out anyway
        if not draws and len(rows) and (not are_drawable(rows) or scores.isnan().any()):
            self._fail_for_logits(sequence, segment.end)
            return
        if len(rows) and segment.end in sequence.kinds:
            self._publisher.give_logits(sequence, segment.end, rows[-1])
        if sequence.request.prompt_logprobs is not None:
            self._score_prompt(result)
        if segment.end < sequence.prefill_end:
            return
        self._scheduler.remove(sequence)
        sequence.phase = Phase.DECODE
        sequence.logits = rows[-1]
        if sequence.max_tokens == 0:
            self._finish(sequence, FinishReason.LENGTH)

    def _draw_first(self, sequence: Sequence) -> None:
        """The first token of a prompt that was restored whole: its logits were captured with it, nothing runs."""
        assert sequence.logits is not None, "a hit as long as the prompt brings its logits"
        if sequence.max_tokens == 0:
            self._finish(sequence, FinishReason.LENGTH)
        else:
            token = draw(sequence.logits[None], [sequence], [sequence.position])
            self._take_token(sequence, int(token))

    def _take_token(self, sequence: Sequence, token: int) -> None:
        if token < 0:
            self._fail_for_logits(sequence, len(sequence.tokens))
            return
        request = sequence.request
        if not sequence.first_token_at:
            sequence.first_token_at = time.monotonic()
        self._generated += 1
        if token in request.stop_tokens and not request.ignore_stop_tokens:
            self._finish(sequence, FinishReason.STOP, stop_token=token)
            return
        sequence.tokens.append(token)
        top = sequence.sampling.logprobs
        row = sequence.logits
        self._emit(sequence, Token(token, logprob_of(row, token, top) if top is not None and row is not None else None))
        if request.stop_when is not None and request.stop_when(token):
            self._finish(sequence, FinishReason.STOP)
        elif sequence.answer_length >= sequence.max_tokens:
            self._finish(sequence, FinishReason.LENGTH)

    def _score_prompt(self, result: Result) -> None:
        """Every row scores the prompt token behind it. Told once, when complete."""
        segment, sequence, rows, found = result
        told = logprobs_of(found, segment.tokens[1:], segment.top)
        if segment.end < sequence.prompt_length:
            told.append(logprob_of(rows[-1], sequence.tokens[segment.end], segment.top))
        # told[i] is of the token at segment.position + 1 + i; of a chunk that runs again they are there already
        scores, stop = sequence.prompt_scores, sequence.prompt_length - 1 - segment.position
        scores += told[len(scores) - segment.position : max(0, stop)]
        if segment.end == sequence.prefill_end and not sequence.prompt_told:
            sequence.prompt_told = True
            self._emit(sequence, PromptLogprobs((None, *scores)))

    # Audits: restored snapshots computed again in idle time

    def _start_audit(self) -> bool:
        audit = self._auditor.take()
        if audit is None:
            return False
        tokens = tuple(audit.snapshot.tokens.tolist())
        request = Request(
            "audit", Prompt(tokens), Sampling(), 0, stop_tokens=frozenset(), sink=lambda event: None, background=True
        )
        with self._lock:
            self._waiting_count += 1
        self._enqueue(Sequence(request, list(tokens), max_tokens=0, prefill_end=len(tokens), audit=audit))
        return True

    def _conclude_audit(self, sequence: Sequence, audit: Audit, logits: torch.Tensor) -> None:
        parts = self.pipeline.capture(sequence.slot).result()
        wait_for(parts)
        self._end(sequence)
        tokens, stretches = audit.snapshot.tokens, tuple(sequence.stretches)
        logits = logits.detach().to("cpu", torch.float32)
        self._auditor.judge(audit, Snapshot(tokens, parts, logits, self.settings.grid, stretches))

    # Ends

    def _finish(self, sequence: Sequence, reason: FinishReason, stop_token: int | None = None) -> None:
        if sequence.phase in (Phase.ENDED, Phase.ENDING):
            return
        completion_tokens = sequence.answer_length + (stop_token is not None)
        if sequence.in_flight:
            # A step handed over ahead consumes the last token, even a stop token: it is part of the state's key.
            sequence.phase = Phase.ENDING
            sequence.tokens += [stop_token] if stop_token is not None else []
        elif sequence.phase is Phase.DECODE and reason is not FinishReason.CANCELLED:
            self._let_go(sequence)
        else:
            self._end_somehow(sequence)
        self._emit(
            sequence,
            Finished(
                reason=reason,
                stop_token=stop_token,
                prompt_tokens=sequence.prompt_length,
                completion_tokens=completion_tokens,
                cache=replace(
                    sequence.cache,
                    published=max(0, sequence.captured - sequence.cache.restored),
                    sparse=sequence.sparse,
                ),
                timings=sequence.timings(time.monotonic()),
            ),
        )

    def _let_go(self, sequence: Sequence) -> None:
        """Capture the state behind the answer, where an append-only client goes on, and leave the slot."""
        assert sequence.logits is not None, "a finished answer has the logits after its last token"
        self._publisher.capture(sequence, sequence.position, BoundaryKind.ANSWER)
        self._publisher.give_logits(sequence, sequence.position, sequence.logits)
        self._end_somehow(sequence)

    def _fail(self, sequences: Sequential[Sequence], error: Exception) -> None:
        if not isinstance(error, RekindleError):
            log.error("a request failed", exc_info=error)
        for sequence in sequences:
            if sequence.phase is not Phase.ENDED:
                if sequence.phase is not Phase.ENDING:
                    self._emit(sequence, Failed(error))
                self._end_somehow(sequence)

    def _fail_for_logits(self, sequence: Sequence, position: int) -> None:
        """No token could be drawn; a stage may know why."""
        elsewhere = "".join(f"; or the shard of {stage}, see its log" for stage in self.pipeline.elsewhere)
        error: Exception = BadLogits(
            f"the logits after {position} tokens are no numbers, so no token can be drawn or scored: "
            f"the weights are damaged, or a device is at fault{elsewhere}"
        )
        try:
            self.pipeline.settle()
        except RekindleError as known:
            error = known
        log.error("request %s failed: %s", sequence.request.id, error)
        self._fail([sequence], error)

    def _end_somehow(self, sequence: Sequence) -> None:
        """End it even if its stage cannot be told: then the engine is broken, says so, and takes nothing more."""
        try:
            self._end(sequence)
        except Exception as error:
            self._say_broken(error)
            self._end(sequence)

    def _close_somehow(self, slot: int) -> None:
        try:
            self.pipeline.close(slot)
        except Exception as error:
            self._say_broken(error)

    def _say_broken(self, error: Exception) -> None:
        log.error("a slot could not be closed; the engine takes no more requests", exc_info=error)
        with self._lock:
            self._broken = str(error)

    def _outlive(self, error: StageLost) -> None:
        """A stage is gone, and with it a part of every live state: bring it back and run again what must be."""
        self._flights.clear()
        if self._stopping:
            self._part_with(error)
            return
        try:
            self.pipeline.recover()
            self._publisher.abandon()
        except Exception as failure:
            self._publisher.abandon()
            lost = StageLost(f"{error}; it could not be brought back: {failure}")
            log.error("%s", lost, exc_info=None if isinstance(failure, RekindleError) else failure)
            self._fail([*self._running, *self._waiting], lost)
            return
        log.warning("%s; it is back, %d requests go on from their newest snapshot", error, len(self._running))
        for sequence in sorted(self._running, key=lambda s: s.submitted_at, reverse=True):
            answered = sequence.phase is Phase.ENDING
            self._leave_slot(sequence)
            if answered:
                self._end(sequence)
            else:
                sequence.start_over()
                self._waiting.appendleft(sequence)

    def _part_with(self, error: StageLost) -> None:
        """It was lost while the server stops, and nobody needs it again: everyone ends as cancelled."""
        log.warning("%s; it is not brought back, since the server is stopping", error)
        self._publisher.abandon()
        for sequence in self._running:
            sequence.in_flight = 0
        self._cancel_everything()

    def _fail_everything(self, error: Exception) -> None:
        self._flights.clear()
        # By id too: the step may have failed while a sequence was neither running nor waiting.
        self._fail(list(dict.fromkeys([*self._running, *self._waiting, *self._by_id.values()])), error)

    def _end(self, sequence: Sequence) -> None:
        if sequence in self._running:
            self._leave_slot(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        if not sequence.admitted_at:
            with self._lock:
                self._waiting_count -= 1
        sequence.phase = Phase.ENDED
        sequence.parked = None
        self._admission.forget(sequence)
        self._by_id.pop(sequence.request.id, None)

    def _leave_slot(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._running.remove(sequence)
        slot, sequence.slot = sequence.slot, -1
        self._free_slots.append(slot)
        self.pipeline.close(slot)

    def _emit(self, sequence: Sequence, event: Event) -> None:
        try:
            sequence.request.sink(event)
        except Exception:
            # Whoever listens is gone or broken; the others must not suffer for it.
            log.exception("the listener of request %s failed; the request is cancelled", sequence.request.id)
            sequence.cancelled = True


def _pages_in_flight(flight: Flight) -> int:
    return sum(-(-s.end // PAGE) - -(-s.position // PAGE) for s in flight.batch.segments)

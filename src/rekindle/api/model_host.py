"""The models behind one server: loaded when a request names them, unloaded when idle or when another needs the memory.

A request holds a *lease* on its model from before its prompt is rendered to the end of its answer; a model with leases
is never unloaded. One thread loads and unloads, one model at a time. Requests for a model that is not loaded wait in
one line, in order. Where the first of them needs the memory of others, these are closed, the least recently used first:
their answers go on, further requests for them join the line, and the last answer to end sets the memory free.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rekindle.api.errors import ModelNotLoaded, UnknownModel
from rekindle.api.served import ModelSource, ModelState, RunningEngine, ServedModel
from rekindle.engine.sums import ended, sum_of
from rekindle.engine.types import EngineStatus
from rekindle.errors import QueueFull, RekindleError, Stopping

log = logging.getLogger("rekindle.api")

LINE = 64  # requests that may wait for models
PATIENCE = 600.0  # seconds that a request waits for its model
REST = 30.0  # seconds after a failed load in which requests are told its reason, and no new load is tried


@dataclass(eq=False, slots=True)
class Slot:
    """One model's place in the host."""

    source: ModelSource
    served: ServedModel | None = None
    state: ModelState = ModelState.UNLOADED
    closed: bool = False  # another model needs the memory: new requests wait
    leases: int = 0
    used_at: float = 0.0  # monotonic seconds: when its last lease began or ended
    failed_at: float = 0.0
    reason: str = ""  # of the failed load
    loads: int = 0
    failures: int = 0
    load_seconds: float = 0.0  # of the last load
    retired: EngineStatus | None = None  # the counts of its engines that have been stopped

    @property
    def name(self) -> str:
        return self.source.settings.models[0]

    @property
    def is_open(self) -> bool:
        return self.state is ModelState.READY and not self.closed

    @property
    def known(self) -> list[EngineStatus]:
        """Of its engine, and what those before it have counted; empty if it was never loaded."""
        now = [] if self.served is None else [self.served.engine.status()]
        return [*now, *([] if self.retired is None else [self.retired])]


class Lease:
    """A model that stays loaded until the lease is released, which may be done more than once."""

    def __init__(self, host: ModelHost, slot: Slot, model: ServedModel) -> None:
        self.model = model
        self._host = host
        self._slot: Slot | None = slot

    def release(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._host.end_lease(slot)


@dataclass(eq=False, slots=True)
class _Waiter:
    """A request in the line."""

    slot: Slot
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Lease]

    def answer(self, outcome: Lease | RekindleError) -> None:
        """On any thread. A lease that nobody takes any more is released."""
        try:
            self.loop.call_soon_threadsafe(self._set, outcome)
        except RuntimeError:  # its loop has closed with its client
            _give_up(outcome)

    def abandon(self) -> None:
        """On its loop: nobody will read the future. A lease that is in it already is released."""
        if not self.future.cancel() and not self.future.cancelled() and self.future.exception() is None:
            self.future.result().release()

    def _set(self, outcome: Lease | RekindleError) -> None:
        if self.future.done():
            _give_up(outcome)
        elif isinstance(outcome, Lease):
            self.future.set_result(outcome)
        else:
            self.future.set_exception(outcome)


def _give_up(outcome: Lease | RekindleError) -> None:
    if isinstance(outcome, Lease):
        outcome.release()


class ModelHost:
    """Every method may be called from any thread; `lease` from an event loop."""

    def __init__(self, sources: Sequence[ModelSource], idle_seconds: float | None = None) -> None:
        """idle_seconds: after which a model that nobody uses is unloaded; None keeps it."""
        self.slots = [Slot(source) for source in sources]
        self._idle_seconds = idle_seconds
        self._changed = threading.Condition()  # guards all below, and the slots
        self._line: list[_Waiter] = []
        self._refusal: RekindleError | None = None  # for new requests, once the server stops
        self._thread = threading.Thread(target=self._run, name="models", daemon=True)

    # What clients learn

    @property
    def names(self) -> list[str]:
        """Every name of every model, in order."""
        return [name for slot in self.slots for name in slot.source.settings.models]

    def find(self, name: str | None) -> Slot:
        """The model of this name. No name is the first model's; one model answers to every name."""
        if not name or len(self.slots) == 1:
            return self.slots[0]
        return self.exactly(name)

    def exactly(self, name: str) -> Slot:
        """The model of this name. Ollama's clients may write NAME:latest for a name without a tag, others the name of
        the file."""
        untagged = name.removesuffix(":latest")
        for wanted in (name, untagged, untagged.removesuffix(".gguf")):
            for names in ("models", "unlisted"):
                for slot in self.slots:
                    if wanted in getattr(slot.source.settings, names):
                        return slot
        raise UnknownModel(f"the model {name[:200]!r} is not served here; served: {', '.join(self.names)}")

    def idle_left(self, slot: Slot) -> float | None:
        """Seconds until the model is unloaded if nobody asks for it from now on; None: then it stays."""
        if self._idle_seconds is None:
            return None
        now = time.monotonic()
        return max(0.0, self._idle_at(slot) - now) if not slot.leases else self._idle_seconds

    def statuses(self) -> dict[Slot, EngineStatus]:
        """Of every model that was loaded before; counts never go down."""
        with self._changed:
            return {slot: sum_of(known) for slot in self.slots if (known := slot.known)}

    def status(self) -> EngineStatus:
        """Sums over the models."""
        return sum_of(list(self.statuses().values()))

    @property
    def waiting(self) -> int:
        return len(self._line)

    @property
    def draining(self) -> bool:
        return self._refusal is not None

    # Leases

    def lease_at_once(self, name: str | None) -> Lease | None:
        """The model, if it is loaded and takes requests."""
        slot = self.find(name)
        with self._changed:
            return self._begin_lease(slot) if slot.is_open and self._refusal is None else None

    async def lease(self, name: str | None) -> Lease:
        """The model, loaded; waits until it is. Raises UnknownModel, ModelNotLoaded, QueueFull or Stopping.

        A caller that is cancelled while it waits leaves the line.
        """
        if (lease := self.lease_at_once(name)) is not None:
            return lease
        slot = self.find(name)
        with self._changed:
            waiter = self._join_line(slot)
        try:
            async with asyncio.timeout(PATIENCE):
                return await waiter.future
        except BaseException as error:
            self._leave_line(waiter)
            if isinstance(error, TimeoutError):
                raise ModelNotLoaded(_too_long(slot)) from None
            raise

    def _begin_lease(self, slot: Slot) -> Lease:
        assert slot.served is not None, f"{slot.name} is {slot.state} and not loaded"
        slot.leases += 1
        slot.used_at = time.monotonic()
        return Lease(self, slot, slot.served)

    def _join_line(self, slot: Slot) -> _Waiter:
        if self._refusal is not None:
            raise self._refusal
        if slot.state is ModelState.FAILED and time.monotonic() < slot.failed_at + REST:
            raise ModelNotLoaded(slot.reason)
        if len(self._line) >= LINE:
            raise QueueFull(f"{LINE} requests wait for models to be loaded; try again later")
        loop = asyncio.get_running_loop()
        waiter = _Waiter(slot, loop, loop.create_future())
        self._line.append(waiter)
        self._changed.notify_all()
        return waiter

    def _leave_line(self, waiter: _Waiter) -> None:
        waiter.abandon()
        with self._changed:
            if waiter in self._line:
                self._line.remove(waiter)
                self._changed.notify_all()

    def end_lease(self, slot: Slot) -> None:
        with self._changed:
            slot.leases -= 1
            slot.used_at = time.monotonic()
            self._changed.notify_all()

    # Start and stop

    def start(self) -> ModelHost:
        """Load the first model; raises what keeps it from being loaded."""
        self._load(self.slots[0], [])
        self._thread.start()
        return self

    def drain(self) -> None:
        """Refuse new requests and those that wait for a model; those that were taken run to their end."""
        with self._changed:
            self._refusal = Stopping("the server is stopping")
            line, self._line = self._line, []
            self._changed.notify_all()
        for waiter in line:
            waiter.answer(self._refusal)
        self._on_engines(lambda engine: engine.drain())

    def end_requests(self) -> None:
        """Every request gets its last event after the step under way. Waits for nothing."""
        self.drain()
        self._on_engines(lambda engine: engine.end_requests())

    def wait_for_end(self) -> None:
        """After `end_requests`: until every request has had its last event."""
        self._on_engines(lambda engine: engine.wait_for_end())

    def stop(self) -> None:
        """End every request, then stop every model. A load under way is waited for."""
        self.end_requests()
        if self._thread.is_alive():
            self._thread.join()
        self._on_engines(lambda engine: engine.stop())

    def _on_engines(self, verb: Callable[[RunningEngine], None]) -> None:
        with self._changed:
            engines = [slot.served.engine for slot in self.slots if slot.served is not None]
        for engine in engines:
            verb(engine)

    # On the host's thread

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                job()
            except BaseException:  # the jobs answer for what can fail in a model; requests for others need this thread
                log.exception("the thread of the models had an error and goes on")

    def _next_job(self) -> Callable[[], None] | None:
        """What is to be done next, as soon as there is something; None when it is time to stop."""
        with self._changed:
            while self._refusal is None:
                if self._line:
                    return partial(self._bring, self._line[0].slot)
                now = time.monotonic()
                idle = [slot for slot in self.slots if slot.is_open and not slot.leases]
                due = [slot for slot in idle if self._idle_at(slot) <= now]
                if due:
                    due[0].state = ModelState.UNLOADING
                    return partial(self._unload, due[0], "nobody has used it")
                self._changed.wait(min((self._idle_at(slot) - now for slot in idle), default=None))
        return None

    def _idle_at(self, slot: Slot) -> float:
        return slot.used_at + self._idle_seconds if self._idle_seconds is not None else threading.TIMEOUT_MAX

    def _bring(self, slot: Slot) -> None:
        """Load the model that the first of the line waits for, if it is still wanted when there is room."""
        try:
            if not slot.is_open and self._make_room(slot):
                self._load(slot, self._loaded())
                self._tidy(slot)
        except BaseException as error:  # a panic in a tokenizer's Rust is no Exception
            self._fail(slot, error)
        else:
            self._grant(slot)
            return
        self._tidy(slot)  # only now: the error's frames have held what was loaded

    def _tidy(self, slot: Slot) -> None:
        try:
            slot.source.tidy()
        except Exception:  # memory comes back later; whoever waits is answered now
            log.exception("memory was not given back to the system")

    def _loaded(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.served is not None]

    def _make_room(self, slot: Slot) -> bool:
        """Unload others until the model fits; False if nobody waits for it any more."""
        while (others := self._loaded()) and not slot.source.fits_beside([other.source for other in others]):
            victim = min(others, key=lambda other: (other.leases > 0, other.used_at))
            if not self._close(victim, slot):
                return False
            self._unload(victim, f"{slot.name} needs its memory")
        return True

    def _close(self, victim: Slot, slot: Slot) -> bool:
        """Wait for the last answer of `victim`, which takes no new requests meanwhile. False if nobody waits for `slot`
        any more; then nothing has changed."""
        with self._changed:
            victim.closed = True
            while victim.leases and self._is_wanted(slot):
                self._changed.wait()
            wanted = self._is_wanted(slot)
            victim.closed = False
            if wanted:
                victim.state = ModelState.UNLOADING
        if not wanted:
            self._grant(victim)
        return wanted

    def _is_wanted(self, slot: Slot) -> bool:
        return self._refusal is None and any(waiter.slot is slot for waiter in self._line)

    def _unload(self, slot: Slot, why: str) -> None:
        began = time.monotonic()
        assert slot.served is not None, f"{slot.name} is unloaded twice"
        try:
            slot.served.engine.stop()
        except BaseException:  # its requests have ended; the thread of all models must go on
            log.exception("%s was not stopped in order", slot.name)
        with self._changed:
            slot.retired = ended(sum_of(slot.known))
            slot.served, slot.state = None, ModelState.UNLOADED
        self._tidy(slot)
        log.info("%s is unloaded, since %s (%.1f s)", slot.name, why, time.monotonic() - began)

    def _load(self, slot: Slot, others: Sequence[Slot]) -> None:
        began = time.monotonic()
        slot.state = ModelState.LOADING
        served = slot.source.load([other.source for other in others])
        with self._changed:
            slot.served, slot.state, slot.used_at = served, ModelState.READY, time.monotonic()
            slot.loads += 1
            slot.load_seconds = slot.used_at - began

    def _fail(self, slot: Slot, error: BaseException) -> None:
        """Those who wait for it are told why; others notice nothing."""
        if isinstance(error, RekindleError):
            reason = slot.source.reason(error)
            log.error("the model %s could not be loaded: %s", slot.name, str(error))  # a record may outlive it
        else:
            reason = "an internal error; the server's log has the details"
            log.error("the model %s could not be loaded", slot.name, exc_info=error)
        with self._changed:
            slot.state, slot.failed_at, slot.failures = ModelState.FAILED, time.monotonic(), slot.failures + 1
            slot.reason = f"the model {slot.name} could not be loaded: {reason}"
            waiters = self._take_waiters(slot)
        for waiter in waiters:
            waiter.answer(ModelNotLoaded(slot.reason))

    def _grant(self, slot: Slot) -> None:
        """Leases for all who wait for a model that is open."""
        with self._changed:
            if not slot.is_open:
                return
            granted = [(waiter, self._begin_lease(slot)) for waiter in self._take_waiters(slot)]
        for waiter, lease in granted:
            waiter.answer(lease)

    def _take_waiters(self, slot: Slot) -> list[_Waiter]:
        taken = [waiter for waiter in self._line if waiter.slot is slot]
        self._line = [waiter for waiter in self._line if waiter.slot is not slot]
        return taken


def _too_long(slot: Slot) -> str:
    return f"the model {slot.name} was not loaded within {PATIENCE:g} seconds; it may need the memory of another"

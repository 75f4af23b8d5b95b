"""One stage inside a shard: the worker that runs a head's commands on it, in the order of their arrival."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch
import zmq

from rekindle.batch import Segment
from rekindle.errors import BadFrame, RekindleError, SnapshotMismatch
from rekindle.shards import frames
from rekindle.shards.frames import DTYPES, AnyBody, Frame, Header, Limits
from rekindle.shards.link import REPLIES
from rekindle.shards.parts import NOTHING_HELD, Held, check_parts, export_parts, import_parts, pages_of
from rekindle.shards.terms import Terms
from rekindle.snapshots.types import Part
from rekindle.stages.types import Stage, TwoPhaseRestore

log = logging.getLogger(__name__)

_PATIENCE = 4.0  # seconds

Tensors = dict[str, torch.Tensor]


class Wire(Protocol):
    """The shard's socket, as a worker sees it."""

    def fileno(self) -> int: ...
    def read(self) -> None: ...
    def send(self, message: Sequence[bytes | memoryview]) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A restore that was checked and waits for its commit."""

    id: int  # of the prepare frame
    position: int
    parts: tuple[Part, ...]


@dataclass(slots=True, eq=False)
class HeldSession:
    """One head and the stage it holds. The reader of the wire writes `heard` and `alive`, the worker all the rest."""

    id: bytes
    host: StageHost
    heard: float = field(default_factory=time.monotonic)
    alive: bool = True
    slots: set[int] = field(default_factory=set)  # that the head touched and did not close
    prepared: dict[int, Prepared] = field(default_factory=dict)  # by slot
    held: dict[int, Held] = field(default_factory=dict)  # by slot
    reach: dict[int, range] = field(default_factory=dict)  # by slot: from how far back it may go to where it stands


class StageHost:
    def __init__(
        self, name: str, stage: Stage, terms: Terms, wire: Wire, limits: Limits, vocabulary: int | None = None
    ) -> None:
        self.name = name
        self.stage = stage
        self.terms = terms
        self.session: HeldSession | None = (
            None  # of the head that holds the stage; guarded by the lock of the wire's reader
        )
        self._limits = limits
        self._vocabulary = vocabulary
        self._wire = wire
        self._line: deque[Callable[[], None] | None] = deque()
        self._wake_reader, self._wake_writer = socket.socketpair()  # another thread that queues work writes a byte
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._thread = threading.Thread(target=self._work, name=f"shard stage {name}", daemon=True)

    def start(self) -> None:
        self._waiter = select.poll()
        self._waiter.register(self._wire, select.POLLIN)
        self._waiter.register(self._wake_reader, select.POLLIN)
        self._thread.start()

    def stop(self) -> None:
        """Finish what stands in line, then stop the stage; leave a stage alone that does not come back."""
        if self._thread.ident is None:
            self.stage.stop()
            return
        self._put(None)
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            log.warning("stage %r is still at work after %g s: left behind", self.name, _PATIENCE)

    def close(self) -> None:
        """After every worker has stopped: they put work in each other's lines."""
        self._wake_reader.close()
        self._wake_writer.close()

    def put(self, session: HeldSession, header: Header, parts: Sequence[zmq.Frame]) -> None:
        self._put(lambda: self._answer(session, header, parts))

    def put_end(self, session: HeldSession, goodbye: int | None) -> None:
        self._put(lambda: self._end(session, goodbye))

    def _put(self, work: Callable[[], None] | None) -> None:
        self._line.append(work)
        if threading.current_thread() is not self._thread:
            with suppress(BlockingIOError):  # unread bytes wake the worker already
                self._wake_writer.send(b"!")

    # The worker thread

    def _work(self) -> None:
        while (work := self._next_work()) is not None:
            work()
        self.stage.stop()

    def _next_work(self) -> Callable[[], None] | None:
        """Read the wire until something stands in line."""
        self._wire.read()
        while not self._line:
            if any(ready == self._wake_reader.fileno() for ready, _ in self._waiter.poll()):
                with suppress(BlockingIOError):
                    self._wake_reader.recv(64)
            self._wire.read()
        return self._line.popleft()

    def _answer(self, session: HeldSession, header: Header, parts: Sequence[zmq.Frame]) -> None:
        if session.alive:  # the head still waits for it
            self._wire.send([session.id + REPLIES, *self.reply(session, header, parts)])

    def reply(self, session: HeldSession, header: Header, parts: Sequence[zmq.Frame]) -> list[bytes | memoryview]:
        """Run one command, in the caller's thread, and say how it went."""
        try:
            tensors = frames.import_tensors(header, parts, self._limits)
            body, results = self._run(session, header.id, header.body, tensors)
            return frames.export_frame(Frame(header.id, body, results), self._limits)
        except Exception as error:  # the head gets it, whatever it is
            if not isinstance(error, RekindleError):
                log.exception("stage %r failed", self.name)
            return frames.export_frame(Frame(header.id, _failure(error)), self._limits)

    def _end(self, session: HeldSession, goodbye: int | None) -> None:
        """Close what the head left open, so that nothing leaks."""
        for slot in sorted(session.slots):
            try:
                self.stage.close(slot)
            except Exception:
                log.exception("stage %r: slot %d could not be closed", self.name, slot)
        session.slots.clear()
        session.prepared.clear()
        session.held.clear()
        session.reach.clear()
        if goodbye is not None:
            reply = frames.export_frame(Frame(goodbye, frames.Done(self._count_pages())), self._limits)
            self._wire.send([session.id + REPLIES, *reply])

    def _run(self, session: HeldSession, frame_id: int, body: AnyBody, tensors: Tensors) -> tuple[AnyBody, Tensors]:
        if isinstance(body, frames.Forward):
            return self._forward(session, body, tensors)
        if isinstance(body, frames.Prepare):
            self._take_slot(session, body.slot)
            self._prepare(session, frame_id, body, tensors)
            return frames.Done(self._count_pages()), {}
        if tensors:
            raise BadFrame(f"{type(body).__name__.lower()} takes no tensors, the frame brings {sorted(tensors)}")
        if isinstance(body, frames.Capture):
            self._take_slot(session, body.slot)
            return self._capture(session, frame_id, body)
        if not isinstance(body, frames.Pages):
            self._change_slot(session, body)
        return frames.Done(self._count_pages()), {}

    def _count_pages(self) -> frames.PagesEntry:
        count = self.stage.pages()
        return frames.PagesEntry(count.free, count.used, count.total)

    def _forward(self, session: HeldSession, asked: frames.Forward, tensors: Tensors) -> tuple[AnyBody, Tensors]:
        batch = frames.import_batch(asked)
        for segment in batch.segments:
            self._take_slot(session, segment.slot)
            self._check_segment(session, segment)
        hidden = self._import_hidden(batch.rows, tensors)
        for segment in batch.segments:  # if the forward fails, the position of the slot is unknown
            session.reach.pop(segment.slot, None)
        output = self.stage.forward(batch, hidden)
        for segment in batch.segments:
            began = segment.position if batch.rewindable else segment.end
            session.reach[segment.slot] = range(began, segment.end)
        features = torch.stack(output.features) if output.features else None
        named = {"hidden": output.hidden, "logits": output.logits, "scores": output.scores, "features": features}
        body = frames.Output(self._count_pages(), tuple(sorted(output.skipping)))
        return body, {name: tensor for name, tensor in named.items() if tensor is not None}

    def _check_segment(self, session: HeldSession, segment: Segment) -> None:
        stands = session.reach.get(segment.slot)
        if stands is not None and segment.position != stands.stop:
            raise BadFrame(
                f"slot {segment.slot} stands at {stands.stop}, the frame's segment begins at {segment.position}"
            )
        highest = max(segment.tokens)
        if self._vocabulary is not None and highest >= self._vocabulary:
            raise BadFrame(f"the frame brings token {highest}, the vocabulary has {self._vocabulary}")

    @staticmethod
    def _check_reach(session: HeldSession, body: frames.Rewind) -> None:
        reach = session.reach.get(body.slot, range(0))
        if not reach.start <= body.position <= reach.stop:
            there = f"between {reach.start} and {reach.stop}"
            raise BadFrame(f"slot {body.slot} can be {there}, the frame goes back to {body.position}")

    def _import_hidden(self, rows: int, tensors: Tensors) -> torch.Tensor | None:
        wanted = {"hidden"} if self.terms.span.start else set()
        if tensors.keys() != wanted:
            raise BadFrame(f"a forward of {self.terms.span} takes {sorted(wanted)}, the frame brings {sorted(tensors)}")
        if not wanted:
            return None
        hidden, dtype = tensors["hidden"], DTYPES[self.terms.hidden_dtype]
        if hidden.ndim != 2 or hidden.shape[0] != rows or hidden.dtype != dtype:
            raise BadFrame(f"hidden is {list(hidden.shape)} {hidden.dtype}, the batch has {rows} rows of {dtype}")
        return hidden

    def _capture(self, session: HeldSession, frame_id: int, body: frames.Capture) -> tuple[AnyBody, Tensors]:
        held = session.held.get(body.slot, NOTHING_HELD)
        parts = self.stage.capture(body.slot)
        if (reach := session.reach.get(body.slot)) is not None:  # what was captured stays
            session.reach[body.slot] = range(reach.stop, reach.stop)
        exported = export_parts(parts, held.pages if held.id == body.since else {})
        session.held[body.slot] = Held(frame_id, pages_of(parts))
        return frames.Captured(exported.entries, self._count_pages()), exported.tensors

    def _prepare(self, session: HeldSession, frame_id: int, body: frames.Prepare, tensors: Tensors) -> None:
        parts = import_parts(body.parts, tensors, {})
        check_parts(self.terms.span, body.position, parts)
        if isinstance(self.stage, TwoPhaseRestore):
            self.stage.prepare_restore(body.slot, body.position, parts)
        session.prepared[body.slot] = Prepared(frame_id, body.position, parts)

    def _change_slot(self, session: HeldSession, body: AnyBody) -> None:
        if isinstance(body, frames.Open):
            self._take_slot(session, body.slot)
            session.held.pop(body.slot, None)
            self.stage.open(body.slot)
            session.reach[body.slot] = range(0)
        elif isinstance(body, frames.Close):
            self._take_slot(session, body.slot)
            session.held.pop(body.slot, None)
            self._abort(session, body.slot)
            session.reach.pop(body.slot, None)
            self.stage.close(body.slot)
            session.slots.discard(body.slot)
        elif isinstance(body, frames.Rewind):
            self._take_slot(session, body.slot)
            self._check_reach(session, body)
            self.stage.rewind(body.slot, body.position)
            session.reach[body.slot] = range(body.position, body.position)  # once for each block
        elif isinstance(body, frames.Commit):
            self._commit(session, body.slot)
        elif isinstance(body, frames.Abort):
            self._abort(session, body.slot)
        else:
            raise BadFrame(f"a stage is not asked by a frame of kind {type(body).__name__.lower()}")

    def _commit(self, session: HeldSession, slot: int) -> None:
        prepared = session.prepared.pop(slot, None)
        if prepared is None:
            raise SnapshotMismatch(f"slot {slot}: the head commits a restore, the shard has none prepared")
        session.held.pop(slot, None)
        session.reach.pop(slot, None)
        if isinstance(self.stage, TwoPhaseRestore):
            self.stage.commit_restore(slot)
        else:
            self.stage.restore(slot, prepared.position, prepared.parts)
        session.held[slot] = Held(prepared.id, pages_of(prepared.parts))
        session.reach[slot] = range(prepared.position, prepared.position)

    def _abort(self, session: HeldSession, slot: int) -> None:
        if session.prepared.pop(slot, None) is not None and isinstance(self.stage, TwoPhaseRestore):
            self.stage.abort_restore(slot)

    def _take_slot(self, session: HeldSession, slot: int) -> None:
        if slot >= self.terms.slots:
            raise BadFrame(f"the frame names slot {slot}, the stage has {self.terms.slots}")
        if slot not in session.slots:
            session.slots.add(slot)
            session.reach[slot] = range(0)


def _failure(error: Exception) -> frames.Failed:
    return frames.Failed(type(error).__name__[:64], str(error)[:4096])

"""The same stage in a Ray actor: the frames of a link, carried by Ray instead of sockets.

What crosses is a header in msgpack and the raw bytes of tensors, as numpy arrays that Ray's object store passes on
without copying; no class of ours is pickled. Ray tells of a dead actor, so there is no pulse here.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import ray
import torch
import zmq
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rekindle.errors import LinkRefused, RekindleError, StageLost
from rekindle.shards import frames
from rekindle.shards.client import RemoteStage
from rekindle.shards.frames import AnyBody, Frame, Limits
from rekindle.shards.host import HeldSession, StageHost
from rekindle.shards.session import Deadlines, describe, import_error
from rekindle.shards.terms import Terms, disagreements
from rekindle.stages.types import Stage

T = TypeVar("T")
Message: TypeAlias = list[bytes | np.ndarray]  # a frame's parts
Actor: TypeAlias = Any  # Ray's handle: its methods appear at run time


def pack(parts: Sequence[bytes | memoryview]) -> Message:
    return [part if isinstance(part, bytes) else np.asarray(part).reshape(-1).view(np.uint8) for part in parts]


def unpack(message: Message) -> list[zmq.Frame]:
    """Arrays from the object store can only be read; tensors want memory of their own."""
    return [zmq.Frame(part if isinstance(part, bytes) else np.array(part)) for part in message]


class _NoWire:
    """A host inside an actor answers its caller and has no socket."""

    def fileno(self) -> int:
        raise AssertionError("an actor's stage has no worker thread that would wait")

    def read(self) -> None:
        raise AssertionError("an actor's stage is called, it does not read")

    def send(self, message: Sequence[bytes | memoryview]) -> None:
        raise AssertionError("an actor's stage answers its caller")


class StageServant:
    """Inside the actor: runs the frames that the head sends, one at a time."""

    def __init__(self, stage: Stage, terms: Terms) -> None:
        self._limits = Limits()
        self._terms = terms
        self._host = StageHost("stage", stage, terms, _NoWire(), self._limits)
        self._session = HeldSession(b"ray", self._host)

    def run(self, message: Message) -> Message:
        parts = unpack(message)
        header = frames.import_header(parts, self._limits)
        if isinstance(header.body, frames.Hello):
            answer = frames.export_frame(Frame(header.id, self._greet(header.body)), self._limits)
        else:
            answer = self._host.reply(self._session, header, parts)
        return pack(answer)

    def _greet(self, hello: frames.Hello) -> AnyBody:
        if points := disagreements(self._terms, hello):
            return frames.Refused("; ".join(points))
        stage = self._host.stage
        return frames.Welcome(stage.slots, stage.device, 0.0)


class RayPending(Generic[T]):
    """A command under way in an actor."""

    def __init__(
        self, session: RaySession, id: int, what: str, ref: Any, read: Callable[[Frame], T], seconds: float
    ) -> None:
        self.id = id
        self._session, self._what, self._ref, self._read, self._seconds = session, what, ref, read, seconds
        self._result: list[T] = []  # of one, once it was read

    def done(self) -> bool:
        return bool(ray.wait([self._ref], timeout=0)[0])

    def result(self) -> T:
        if not self._result:
            frame = self._session.receive(self._ref, self._what, self._seconds)
            if isinstance(frame.body, frames.Failed):
                raise import_error(frame.body, self._session.who, self._what)
            self._result.append(self._read(frame))
        return self._result[0]


class RaySession:
    """One actor, from its start to its loss."""

    def __init__(self, actor: Actor, who: str, terms: Terms, deadline: float) -> None:
        self.id = b"ray"
        self.who = who
        self.lost: str | None = None
        self._actor = actor
        self._limits = Limits()
        self._ids = itertools.count(1)
        self._sending = threading.Lock()  # Ray keeps the order of the calls, so ids must be in that order too
        span = terms.span
        hello = frames.Hello(
            "stage",
            terms.fingerprint,
            span.start,
            span.stop,
            terms.hidden_dtype,
            terms.kv_dtype,
            terms.slots,
            pages=terms.pages,
            rewind_rows=terms.rewind_rows,
        )
        try:
            self.welcome = self._shake_hands(hello, deadline)
        except RekindleError:
            self.close()
            raise

    def _shake_hands(self, hello: frames.Hello, deadline: float) -> frames.Welcome:
        body = self.ask(hello, {}, lambda frame: frame.body, deadline).result()
        if isinstance(body, frames.Refused):
            raise LinkRefused(f"{self.who} refuses: {body.message}")
        if not isinstance(body, frames.Welcome):
            raise LinkRefused(f"{self.who}: said hello, got {describe(body)}")
        return body

    def ask(
        self, body: AnyBody, tensors: Mapping[str, torch.Tensor], read: Callable[[Frame], T], seconds: float
    ) -> RayPending[T]:
        if self.lost is not None:
            raise StageLost(f"{self.who}: no {describe(body)}: lost before ({self.lost}); recover first")
        with self._sending:
            id = next(self._ids)
            message = pack(frames.export_frame(Frame(id, body, tensors), self._limits))
            return RayPending(self, id, describe(body), self._actor.run.remote(message), read, seconds)

    def receive(self, ref: Any, what: str, seconds: float) -> Frame:
        try:
            return frames.import_frame(unpack(ray.get(ref, timeout=seconds)), self._limits)
        except GetTimeoutError:
            self.lose(f"no answer within {seconds:g} s")
        except RayTaskError as error:  # it lives, but what it was sent or what it answers broke
            raise RekindleError(f"{self.who}: {what} failed: {error.cause!r}") from error
        except RayError as error:
            lines = str(error).strip().splitlines()  # what befell it, and of a long tale the end: why it did not start
            self.lose(" … ".join(dict.fromkeys((lines[0].strip(), lines[-1].strip()))))
        raise StageLost(f"{self.who}: lost during {what}: {self.lost}")

    def lose(self, why: str) -> None:
        self.lost = self.lost or why

    def close(self) -> None:
        """The actor and all it holds go; a stage that comes back is a new one."""
        self.lose("it was stopped")
        ray.kill(self._actor)


@dataclass(frozen=True, slots=True)
class ActorMaker:
    """Starts an actor with a StageServant inside, on the node meant for it or, if that is gone, on another."""

    start: Callable[[], Actor]
    deadline: float  # seconds until it has loaded


class RayStage(RemoteStage):
    """A stage in an actor. Recovering starts a new one."""

    def __init__(self, place: str, terms: Terms, maker: ActorMaker, deadlines: Deadlines | None = None) -> None:
        self._maker = maker
        super().__init__(place, "stage", terms, deadlines=deadlines)

    def _connect(self, replaces: bytes) -> RaySession:
        return RaySession(self._maker.start(), self._who, self.terms, self._maker.deadline)

    def stop(self) -> None:
        self._session.close()

    @property
    def _who(self) -> str:
        return f"Ray actor on {self.endpoint} span {self.span}"

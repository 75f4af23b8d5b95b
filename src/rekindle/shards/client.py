"""A stage that lives elsewhere. The caller cannot tell, but for StageLost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import torch

from rekindle.batch import Batch
from rekindle.errors import BadFrame, StageLost
from rekindle.shards import frames
from rekindle.shards.frames import DTYPES, AnyBody, Frame, Limits
from rekindle.shards.link import HeadKeys
from rekindle.shards.parts import NOTHING_HELD, Held, export_parts, import_parts, pages_of
from rekindle.shards.session import Deadlines, HeadSession
from rekindle.shards.terms import Terms
from rekindle.snapshots.types import Part
from rekindle.spec import Span
from rekindle.stages.types import PageCount, PendingTokens, StageOutput

log = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Tensors = dict[str, torch.Tensor]


class Keeper(Protocol):
    """Started the shard's process, and can start it again."""

    def is_running(self) -> bool: ...
    def restart(self) -> None: ...


class PendingCall(Protocol[T_co]):
    """A command under way, as a stage sees it."""

    @property
    def id(self) -> int: ...
    def done(self) -> bool: ...
    def result(self) -> T_co: ...


class Session(Protocol):
    """One connection to a stage, from its handshake to its loss."""

    @property
    def id(self) -> bytes: ...
    @property
    def welcome(self) -> frames.Welcome: ...
    @property
    def lost(self) -> str | None: ...
    def ask(
        self, body: AnyBody, tensors: Mapping[str, torch.Tensor], read: Callable[[Frame], T], seconds: float
    ) -> PendingCall[T]: ...
    def lose(self, why: str) -> None: ...
    def close(self) -> None: ...


class RemoteStage:
    """The stage `name` of the shard at `endpoint`. Connects at once, or says why it cannot.

    Calls may come from several threads; the shard runs them in the order in which they were made. Once the shard is
    lost every call fails at once, until reconnect() finds it again, with every slot empty.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        terms: Terms,
        *,
        keys: HeadKeys | None = None,
        deadlines: Deadlines | None = None,
        limits: Limits | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.name = name
        self.terms = terms
        self._keys = keys
        self._deadlines = deadlines or Deadlines()
        self._limits = limits or Limits()
        self._held: dict[int, Held] = {}  # by slot
        self._prepared: dict[int, Held] = {}  # by slot: what will be held after the commit
        self._keeper = keeper
        self._session = self._connect(replaces=b"")
        self._pages = PageCount(0, 0, 0)
        self._do(frames.Pages())

    def _connect(self, replaces: bytes) -> Session:
        return HeadSession(
            self.endpoint, self.name, self.terms, self._keys, self._deadlines, self._limits, replaces=replaces
        )

    def reconnect(self) -> None:
        """Shake hands anew. Slots opened before are gone."""
        old = self._session
        old.lose("the head connects anew")
        old.close()
        self._held.clear()
        self._prepared.clear()
        self._session = self._connect(replaces=old.id)
        # Before it obeys us the shard closes our slots.
        self._pages = PageCount(self._pages.total, 0, self._pages.total)

    def recover(self) -> None:
        """Find the shard again; if this head started it and it has died or stays mute, start it again first."""
        if self._keeper is None:
            self.reconnect()
            return
        if self._keeper.is_running():
            try:
                self.reconnect()
                return
            except StageLost as error:
                log.warning("%s; its process is started again", error)
        self._keeper.restart()
        self.reconnect()

    @property
    def span(self) -> Span:
        return self.terms.span

    @property
    def slots(self) -> int:
        return self._session.welcome.slots

    @property
    def device(self) -> str:
        return f"{self.endpoint} ({self._session.welcome.device})"

    @property
    def lost(self) -> str | None:
        """Why the shard counts as lost, or None."""
        return self._session.lost

    # Running

    def forward(self, batch: Batch, hidden: torch.Tensor | None, pending: PendingTokens | None = None) -> StageOutput:
        assert pending is None, "tokens drawn ahead stay on the device of a stage that is alone and local"
        return self.submit(batch, hidden).result()

    def submit(self, batch: Batch, hidden: torch.Tensor | None) -> PendingCall[StageOutput]:
        """A forward under way. `hidden` must not change before its result is there."""
        tensors = {} if hidden is None else {"hidden": hidden}
        return self._ask(frames.export_batch(batch), tensors, lambda reply: self._import_output(reply, batch))

    def _import_output(self, reply: Frame, batch: Batch) -> StageOutput:
        body = reply.body
        if not isinstance(body, frames.Output):
            raise BadFrame(f"asked for a forward, got a frame of kind {type(body).__name__.lower()}")
        self._count(body.pages)
        tensors = dict(reply.tensors)
        features = self._import_features(tensors.pop("features", None), batch)
        counts = {"hidden": batch.rows, "logits": batch.logit_rows, "scores": batch.scored_rows}
        dtypes = {"hidden": DTYPES[self.terms.hidden_dtype], "logits": torch.float32, "scores": torch.float32}
        for name, tensor in tensors.items():
            if name not in dtypes:
                raise BadFrame(f"the output of a forward is {', '.join(dtypes)}, {self._who} sent {name!r}")
            if tensor.ndim != 2 or tensor.shape[0] != counts[name] or tensor.dtype != dtypes[name]:
                raise BadFrame(
                    f"{name} from {self._who} is {list(tensor.shape)} {tensor.dtype}, "
                    f"expected {counts[name]} rows of {dtypes[name]}"
                )
        hidden, logits, scores = map(tensors.get, counts)
        return StageOutput(hidden, logits, frozenset(body.skipping), scores, features)

    def _import_features(self, tensor: torch.Tensor | None, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Of the taps in this span, each [batch.feature_rows, hidden]."""
        taps, dtype = sum(layer in self.span for layer in batch.taps), DTYPES[self.terms.hidden_dtype]
        if tensor is None and not taps:
            return ()
        if (
            tensor is None
            or tensor.ndim != 3
            or tensor.shape[:2] != (taps, batch.feature_rows)
            or tensor.dtype != dtype
        ):
            brought = "nothing" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
            raise BadFrame(
                f"features from {self._who} are {brought}, expected {taps} times {batch.feature_rows} rows of {dtype}"
            )
        return tensor.unbind(0)

    # State

    def open(self, slot: int) -> None:
        self._forget(slot)
        self._do(frames.Open(slot))

    def close(self, slot: int) -> None:
        self._forget(slot)
        self._do(frames.Close(slot))

    def rewind(self, slot: int, position: int) -> None:
        self._do(frames.Rewind(slot, position))

    def capture(self, slot: int) -> Sequence[Part]:
        """Only pages that are new since the last capture or restore cross the link; the rest are the same objects."""
        held = self._held.pop(slot, NOTHING_HELD)
        parts, self._held[slot] = self._ask(
            frames.Capture(slot, held.id), {}, lambda reply: self._import_capture(reply, held)
        ).result()
        return parts

    def restore(self, slot: int, position: int, parts: Sequence[Part]) -> None:
        self.prepare_restore(slot, position, parts)
        self.commit_restore(slot)

    def prepare_restore(self, slot: int, position: int, parts: Sequence[Part]) -> None:
        """Send the parts of this span and have the shard check them; the slot stays as it is."""
        own = [part for part in parts if part.layer in self.span]
        exported = export_parts(own, {})
        pending = self._ask(frames.Prepare(slot, position, exported.entries), exported.tensors, self._import_done)
        pending.result()
        self._prepared[slot] = Held(pending.id, pages_of(own))

    def commit_restore(self, slot: int) -> None:
        self._held.pop(slot, None)
        self._do(frames.Commit(slot))
        self._held[slot] = self._prepared.pop(slot)

    def abort_restore(self, slot: int) -> None:
        self._prepared.pop(slot, None)
        self._do(frames.Abort(slot))

    def pages(self) -> PageCount:
        """As of the last answer; it does not wait for what is under way, and a lost shard's count is its last one."""
        return self._pages

    def stop(self) -> None:
        """Leave the shard, which closes our slots and stays for the next head."""
        if self._session.lost is None:
            with suppress(StageLost):  # gone already: that is what was wanted
                self._session.ask(frames.Goodbye(), {}, self._import_done, self._deadlines.goodbye).result()
            self._session.lose("the head left")
        self._session.close()

    @property
    def _who(self) -> str:
        return f"shard {self.endpoint} span {self.span}"

    def _forget(self, slot: int) -> None:
        self._held.pop(slot, None)
        self._prepared.pop(slot, None)

    def _do(self, body: AnyBody) -> None:
        self._ask(body, {}, self._import_done).result()

    def _ask(self, body: AnyBody, tensors: Tensors, read: Callable[[Frame], T]) -> PendingCall[T]:
        return self._session.ask(body, tensors, read, self._deadlines.call)

    def _import_done(self, reply: Frame) -> None:
        body = reply.body
        if not isinstance(body, frames.Done):
            raise BadFrame(f"expected a frame of kind done, got {type(body).__name__.lower()}")
        self._count(body.pages)

    def _import_capture(self, reply: Frame, held: Held) -> tuple[tuple[Part, ...], Held]:
        body = reply.body
        if not isinstance(body, frames.Captured):
            raise BadFrame(f"asked for a capture, got a frame of kind {type(body).__name__.lower()}")
        self._count(body.pages)
        parts = import_parts(body.parts, reply.tensors, held.pages)
        return parts, Held(reply.id, pages_of(parts))

    def _count(self, pages: frames.PagesEntry) -> None:
        self._pages = PageCount(pages.free, pages.used, pages.total)

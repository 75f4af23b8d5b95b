"""Every error that the world can cause, as one tree. What only we can cause is an assert.

RekindleError                  show its message to the user; the base of all
├── BadModelFile               a weight file is truncated, unknown, or a tensor has the wrong shape
├── BadConfig                  a setting is unknown, out of range, or contradicts another
├── BadRequest                 a client's field is wrong; `field` names it                    → 400
├── PromptTooLong              prompt + answer do not fit the context                          → 400
├── QueueFull                  the bounded queue is full; try again later                      → 429
├── DoesNotFit                 the plan cannot place the model in the budgets given
├── PoolFull                   no KV page is free; the engine lets the request wait, so no client sees it
├── SnapshotMismatch           a snapshot and the stage that should take it disagree
├── BadSnapshotFile            a file of the disk tier is truncated, altered or foreign
├── TierUnavailable            a tier cannot be reached now; its snapshots stay, the prompt is computed meanwhile
├── CopyFailed                 state that was captured did not reach host memory; it is not published
├── StageLost                  a shard died or missed its deadline                             → 503
├── CpuExpertsLost             CPU threads for cold experts do not answer; needs a restart    → 503
├── BadLogits                  the model gave no numbers: damaged weights, or a device at fault  → 500
├── Stopping                   the server is stopping                                          → 503
├── LinkRefused                the two ends of a link do not agree, or a key is not allowed
└── BadFrame                   a frame lies about its sizes or kinds
"""

from __future__ import annotations


class RekindleError(Exception):
    """Base of all errors whose message is written for the user."""


class BadModelFile(RekindleError):
    """A weight file cannot be used. The message names the file, the tensor and both sides."""


class BadConfig(RekindleError):
    """A setting is unknown, out of range, or contradicts another."""


class BadRequest(RekindleError):
    """A field of a request is wrong."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(BadRequest):
    """Prompt and answer together do not fit the context."""

    def __init__(
        self,
        message: str,
        field: str | None = None,
        tokens: int | None = None,
        most: int | None = None,
        counted: bool = True,
    ) -> None:
        """tokens: of the prompt, or so many at least where they were not counted to the end; most: that it may have."""
        super().__init__(message, field)
        self.tokens = tokens
        self.most = most
        self.counted = counted


class QueueFull(RekindleError):
    """The queue of waiting requests is full."""


class DoesNotFit(RekindleError):
    """The model, or the least it needs to run, does not fit the budgets given."""


class PoolFull(RekindleError):
    """No page of the KV pool is free. The engine lets the sequence wait, so it never reaches a client."""


class SnapshotMismatch(RekindleError):
    """A snapshot and the stage that should take it disagree; the message names both sides."""


class BadSnapshotFile(RekindleError):
    """A file of the disk tier is truncated, altered, or from another model or version."""


class TierUnavailable(RekindleError):
    """A tier cannot load now: its machine or its disk does not answer. What it holds may be sound and is kept."""


class CopyFailed(RekindleError):
    """Copies of a state to host memory have failed. The memory that they were to fill must not be read."""


class StageLost(RekindleError):
    """A stage stopped answering inside its deadline."""


class CpuExpertsLost(RekindleError):
    """The CPU threads that compute cold experts do not answer. Nothing brings them back but a restart."""


class BadLogits(RekindleError):
    """The model's logits are NaN or infinite, so there is no token to draw."""


class Stopping(RekindleError):
    """The server is stopping: it refuses new requests and ends the running ones."""


class LinkRefused(RekindleError):
    """The two ends of a link do not agree on protocol, model, span or key."""


class BadFrame(RekindleError):
    """A frame's header and its bytes disagree."""

"""The one place where an error becomes a status, a message and a code; dialects write them as JSON."""

from __future__ import annotations

import logging
import re
import uuid
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException

from rekindle.errors import (
    BadLogits,
    BadRequest,
    CpuExpertsLost,
    PromptTooLong,
    QueueFull,
    RekindleError,
    StageLost,
    Stopping,
)

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = "1"
LOAD_RETRY_SECONDS = "30"
LONGEST_REASON = 300  # characters


class Unauthorized(RekindleError):
    """The key is missing or wrong."""


class Forbidden(RekindleError):
    """A host or an origin that the server does not answer to."""

    def __init__(self, message: str, what: str) -> None:
        super().__init__(message)
        self.what = what


class RateLimited(RekindleError):
    """A client has used what its key allows."""

    def __init__(self, message: str, seconds: int) -> None:
        super().__init__(message)
        self.seconds = seconds  # until it is worth trying again


class NotJson(RekindleError):
    """The body is declared as something else than JSON."""


class BodyTooLarge(RekindleError):
    """The body is longer than the server takes."""


class BodyTooSlow(RekindleError):
    """The body did not arrive in time."""


class TooManyBodies(RekindleError):
    """The bodies that are being read fill their budget."""


class UnknownModel(RekindleError):
    """A client asks for a model that is not served."""


class ModelNotLoaded(RekindleError):
    """A model that is served cannot be loaded, or not now."""


class Unsupported(RekindleError):
    """What other servers do on this path, and this one does not."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An error as a client sees it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    sizes: str | None = None  # of a prompt that is too long, and of the longest, in tokens


def _sizes(error: PromptTooLong) -> str | None:
    """As Anthropic's clients read them, who then make the conversation shorter."""
    if error.most is None:
        return None
    return f"{'' if error.counted else 'at least '}{error.tokens} tokens > {error.most} maximum"


def fault_of(error: BaseException) -> Fault:
    """What the client sees of an error. An unexpected one is logged under an id, and the client sees only the id."""
    message = _sendable(str(error))
    match error:
        case PromptTooLong():
            about = "invalid_request_error", error.field, "context_length_exceeded"
            return Fault(400, message, *about, sizes=_sizes(error))
        case BadRequest():
            return Fault(400, message, "invalid_request_error", error.field)
        case Unsupported():  # no 5xx: clients would try again
            return Fault(400, message, "invalid_request_error", code="unsupported_operation")
        case Unauthorized():
            headers = {"WWW-Authenticate": "Bearer"}
            return Fault(401, message, "invalid_request_error", code="invalid_api_key", headers=headers)
        case UnknownModel():
            return Fault(404, message, "invalid_request_error", "model", "model_not_found")
        case Forbidden():
            return Fault(403, message, "invalid_request_error", code=f"{error.what}_not_allowed")
        case BodyTooSlow():
            return Fault(408, message, "invalid_request_error", code="body_timeout", headers={"Connection": "close"})
        case BodyTooLarge():
            return Fault(413, message, "invalid_request_error", code="request_too_large")
        case NotJson():
            return Fault(415, message, "invalid_request_error", code="not_json")
        case RateLimited():
            headers = {"Retry-After": str(error.seconds)}
            return Fault(429, message, "rate_limit_error", code="rate_limited", headers=headers)
        case TooManyBodies():
            headers = {"Retry-After": RETRY_AFTER_SECONDS}
            return Fault(503, message, "server_error", code="too_many_bodies", headers=headers)
        case QueueFull():
            headers = {"Retry-After": RETRY_AFTER_SECONDS}
            return Fault(429, message, "rate_limit_error", code="queue_full", headers=headers)
        case ModelNotLoaded():
            headers = {"Retry-After": LOAD_RETRY_SECONDS}
            return Fault(503, message, "server_error", "model", "model_not_loaded", headers)
        case StageLost():
            return Fault(503, message, "server_error", code="stage_lost")
        case CpuExpertsLost():
            return Fault(503, message, "server_error", code="cpu_experts_lost")
        case BadLogits():
            return Fault(500, message, "server_error", code="bad_logits")
        case Stopping():
            return Fault(503, message, "server_error", code="stopping")
        case HTTPException():  # starlette's own: unknown path, wrong method
            return Fault(
                error.status_code, _sendable(error.detail), "invalid_request_error", headers=dict(error.headers or {})
            )
    error_id = uuid.uuid4().hex[:12]
    log.error("error %s", error_id, exc_info=error)
    return Fault(500, f"internal error {error_id}; the server's log has the details", "server_error", code=error_id)


# As repr writes it. An apostrophe within a word opens nothing.
_QUOTED = re.compile(r"""(?<!\w)(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")""")


def reason_of(error: BaseException, fault: Fault) -> str:
    """Why a request was refused, for the log: the message without what its client wrote. Our own messages have that in
    quotes; what a template or a library says, which may quote a prompt in any way, they have behind a colon."""
    own = fault.message if error.__cause__ is None else fault.message.partition(": ")[0]
    return _QUOTED.sub("'…'", own)[:LONGEST_REASON]


def _sendable(message: str) -> str:
    """A message may quote the client, and half of a surrogate pair cannot be sent."""
    return message.encode("utf-8", "replace").decode("utf-8")

"""The one place where an error becomes a status and an OpenAI-shaped body."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from rekindle.errors import (
    BadLogits,
    BadRequest,
    CrewLost,
    PromptTooLong,
    QueueFull,
    RekindleError,
    StageLost,
    Stopping,
)

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = "1"


class Unauthorized(RekindleError):
    """The key is missing or wrong."""


class BodyTooLarge(RekindleError):
    """The body is longer than the server takes."""


class UnknownModel(RekindleError):
    """/v1/models/{id} was asked for a model that is not served."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An error as a client sees it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, status_code=self.status, headers=self.headers)


def fault_of(error: Exception) -> Fault:
    """What the client is told; an error we did not foresee is logged under an id and told by that id only."""
    message = str(error)
    match error:
        case PromptTooLong():
            return Fault(400, message, "invalid_request_error", error.field, "context_length_exceeded")
        case BadRequest():
            return Fault(400, message, "invalid_request_error", error.field)
        case Unauthorized():
            headers = {"WWW-Authenticate": "Bearer"}
            return Fault(401, message, "invalid_request_error", code="invalid_api_key", headers=headers)
        case UnknownModel():
            return Fault(404, message, "invalid_request_error", "model", "model_not_found")
        case BodyTooLarge():
            return Fault(413, message, "invalid_request_error", code="request_too_large")
        case QueueFull():
            headers = {"Retry-After": RETRY_AFTER_SECONDS}
            return Fault(429, message, "rate_limit_error", code="queue_full", headers=headers)
        case StageLost():
            return Fault(503, message, "server_error", code="stage_lost")
        case CrewLost():
            return Fault(503, message, "server_error", code="crew_lost")
        case BadLogits():
            return Fault(500, message, "server_error", code="bad_logits")
        case Stopping():
            return Fault(503, message, "server_error", code="stopping")
        case HTTPException():  # starlette's own: unknown path, wrong method
            return Fault(error.status_code, error.detail, "invalid_request_error", headers=dict(error.headers or {}))
    error_id = uuid.uuid4().hex[:12]
    log.error("error %s", error_id, exc_info=error)
    return Fault(500, f"internal error {error_id}; the server's log has the details", "server_error", code=error_id)

"""Problems: each error of delayd as an answer of HTTP (RFC 9457), with its native code.

Invariant: a status says who must act: 4xx the caller, 5xx and 429 nobody but time, or an operator. No error is answered
as success, and none has a trace of the code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from delayd.errors import (
    BatchMalformed,
    CallerError,
    DelaydError,
    InFlight,
    KeyPending,
    MessageTooLarge,
    NotAllowed,
    NotTrusted,
    OutcomeUnknown,
    QueueFull,
    QuotaReached,
    RequestTimedOut,
    RetryLater,
    StaleHandle,
)

MEDIA_TYPE = "application/problem+json"
STATUSES: tuple[tuple[type[DelaydError], int], ...] = (
    (MessageTooLarge, 413),
    (KeyPending, 409),
    (InFlight, 409),
    (StaleHandle, 410),
    (QueueFull, 429),
    (QuotaReached, 429),
    (BatchMalformed, 400),
    (NotAllowed, 403),
    (NotTrusted, 403),
    (CallerError, 400),
    (OutcomeUnknown, 504),
    (RequestTimedOut, 504),
    (RetryLater, 503),
)
"""The first that an error is; any other is a 500."""


class Refusal(Exception):
    """A request that the gateway itself refuses."""

    def __init__(self, status: int, code: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail, self.headers = status, code, detail, dict(headers or {})


def status_of(error: DelaydError) -> int:
    """The status of an error."""
    return next((status for kind, status in STATUSES if isinstance(error, kind)), 500)


def problem(error: Exception) -> dict[str, object]:
    """An error as the members of a problem."""
    if isinstance(error, Refusal):
        return {"type": f"urn:delayd:{error.code}", "status": error.status, "code": error.code, "detail": error.detail}
    if isinstance(error, DelaydError):
        found: dict[str, object] = {"type": f"urn:delayd:{error.code}", "status": status_of(error)}
        found |= {"code": error.code, "detail": error.message}
        if error.retry_after_ms:
            found["retry_after_ms"] = error.retry_after_ms
        if isinstance(error, QuotaReached) and error.next_free_ms:
            found["next_free_ms"] = error.next_free_ms
        return found
    return {"type": "urn:delayd:bug", "status": 500, "code": "bug", "detail": "the gateway failed; its log says how"}


def answer_problem(error: Exception) -> Response:
    """An error as a whole answer."""
    told = problem(error)
    headers = dict(error.headers) if isinstance(error, Refusal) else {}
    retry_ms = told.get("retry_after_ms")
    if isinstance(retry_ms, int):
        headers["Retry-After"] = str(math.ceil(retry_ms / 1_000))
    status = told["status"]
    assert isinstance(status, int)
    return Response(msgspec.json.encode(told), status, headers, MEDIA_TYPE)

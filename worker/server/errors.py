"""Every way in which a request can be refused, in OpenAI's error shape.

A message is written for the client: it names the field and the numbers, and never quotes an
exception, because exceptions carry paths and addresses.
"""

from __future__ import annotations

import msgspec

# The code of an error by which whatever computed the answer has gone: it says nothing about the
# request. Before the first byte it comes with a 503, later as the last event of a stream. The router
# knows from it that another worker can answer, or go on with the stream where it broke.
ENGINE_DIED = "engine_died"


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(Exception):
    """Ends one request with this status. Raised anywhere below a handler."""

    status = 500
    type = "internal_server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.body = ErrorBody(ErrorDetail(message, self.type, param, code))
        self.retry_after = retry_after


class InvalidRequest(ApiError):
    status = 400
    type = "invalid_request_error"


class InvalidField(InvalidRequest):
    """The message says which."""

    def __init__(self, field: str, message: str, *, code: str | None = None) -> None:
        super().__init__(f"{field}: {message}", param=field, code=code)


class Unauthorized(InvalidRequest):
    status = 401


class Forbidden(InvalidRequest):
    status = 403


class NotFound(InvalidRequest):
    status = 404


class RequestTimeout(InvalidRequest):
    status = 408


class ContentTooLarge(InvalidRequest):
    status = 413


class UnsupportedMediaType(InvalidRequest):
    status = 415


class TooManyRequests(ApiError):
    status = 429
    type = "rate_limit_error"


class Unavailable(ApiError):
    """The worker cannot take the request now; another one, or this one later, may."""

    status = 503
    type = "service_unavailable_error"


class InternalError(ApiError):
    """Our fault. The log has the details under the request's id."""


def of_status(status: int, reason: str) -> ErrorBody:
    """The same shape for what the HTTP library refuses by itself (404, 405, 413, ...)."""
    kind = InvalidRequest.type if status < 500 else ApiError.type
    return ErrorBody(ErrorDetail(reason, kind, None, None))

"""The errors of the API, in OpenAI's error shape.

A message is for the client. It names the field and the limits. It never quotes an exception, because exceptions contain
paths and addresses.
"""

from __future__ import annotations

import msgspec

# The code of errors after the loss of the engine. The request itself is valid: a router sends it to another worker, or
# continues its stream there. Before the first byte the error has status 503; later it is the last event of the stream.
ENGINE_DIED = "engine_died"


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(Exception):
    """Ends one request with `status`."""

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
    """An invalid value of a field. The message names the field."""

    def __init__(self, field: str, message: str, *, code: str | None = None) -> None:
        super().__init__(f"{field}: {message}", param=field, code=code)


class MissingField(InvalidField):
    """A required field that is absent or null."""

    def __init__(self, field: str) -> None:
        super().__init__(field, "must be given", code="missing_required_parameter")


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
    """The worker cannot serve the request now. Another worker may, or the same one later."""

    status = 503
    type = "service_unavailable_error"


class InternalError(ApiError):
    """A fault of the server. The log has the details under the request's id."""


def of_status(status: int, reason: str) -> ErrorBody:
    """Returns the body of an error that the HTTP library raises (404, 405, 413, ...)."""
    kind = InvalidRequest.type if status < 500 else ApiError.type
    code = {404: "unknown_path", 405: "method_not_allowed"}.get(status)  # as the router's
    return ErrorBody(ErrorDetail(reason, kind, None, code))

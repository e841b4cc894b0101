"""Errors that the HTTP library finds before the application gets a request."""

from __future__ import annotations

from aiohttp import web

from mla_router.worker.server.errors import of_status
from mla_router.worker.server.http.json_response import json_response


class Protocol(web.RequestHandler):
    """Answers bytes that are not HTTP in OpenAI's error shape, and closes the connection."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        # Logs it, and raises ConnectionError if an answer has begun
        super().handle_error(request, status, exc, message)
        reason = "Internal error"
        if message is not None:
            defect = message.partition("\n")[0].rstrip(":")  # the other lines repeat the bytes
            reason = f"Not a valid HTTP request: {defect}"
        answer = json_response(
            of_status(status, reason), status=status, headers={"Server": "mla-router"}
        )
        answer.force_close()
        return answer

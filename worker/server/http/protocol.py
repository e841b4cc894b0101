"""What the HTTP library would answer by itself, before a handler gets the request."""

from __future__ import annotations

from aiohttp import HttpVersion11, hdrs, web

from mla_router.worker.server.errors import of_status
from mla_router.worker.server.http.json_response import json_response


async def continue_upload(request: web.Request) -> None:
    """Asks for the body with 100 Continue if the client waits for that. Other expectations are ignored, as by the router."""
    waits = request.headers.get(hdrs.EXPECT, "").lower() == "100-continue"
    if waits and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun


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

"""Streams of typed events: /v1/messages and /v1/responses.

A token may make several events, or none. A continued stream makes all events again from the known tokens and drops
those that the client has received (requests/replay.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from mla_router.worker.server.http.sse import event
from mla_router.worker.server.requests.choice import Output
from mla_router.worker.server.requests.handler import RequestHandler
from mla_router.worker.server.requests.resume import TOKENS_PER_TURN

Event = dict[str, Any]  # an event with its `type`


class EventWriter:
    """Encodes the events of one answer that its client has not received."""

    def __init__(
        self,
        handler: RequestHandler,
        take: Callable[[Output], list[Event]],
        *,
        numbered: bool = False,
    ) -> None:
        """`take` returns the events of an output. `numbered`: each event has a `sequence_number`."""
        self._handler = handler
        self._take = take
        self._numbered = numbered
        self._marks = handler.marks()
        self._received = 0 if handler.replay is None else handler.replay.events
        self._made = 0
        self._finish_reason: str | None = None

    def write(self, events: Iterable[Event]) -> bytes:
        """Encodes those of `events` that the client has not received."""
        written = b""
        for body in events:
            if self._made >= self._received:
                mark = self._marks.take(0, self._finish_reason)
                name = body["type"]
                if self._numbered:
                    body = {"type": name, "sequence_number": self._made, **body}
                written += event(body, b"%bevent: %b\n" % (mark, name.encode()))
            self._made += 1
        return written

    def write_outputs(self, outputs: Iterable[Output]) -> bytes:
        """Encodes the events of new outputs."""
        written = b""
        for output in outputs:
            self._marks.add(0, output.token_ids)
            written += self._write_output(output)
        return written

    async def resume(self, *, end_events: int = 0) -> bytes:
        """Makes the events of the known tokens again, and encodes those that the client has not received.

        `end_events`: the number of events after those of the last token that the client may have received. Raises
        InvalidRequest if the client has received more events than the tokens make.
        """
        written = b""
        for place, output in enumerate(self._handler.resumed, 1):
            written += self._write_output(output)
            if place % TOKENS_PER_TURN == 0:
                await asyncio.sleep(0)
        if self._handler.replay is not None:
            ended = end_events if self._finish_reason else 0
            self._handler.replay.check_events(self._made + ended)
        return written

    def _write_output(self, output: Output) -> bytes:
        events = self._take(output)
        if output.finish is not None:
            self._finish_reason = output.finish.reason
        return self.write(events)

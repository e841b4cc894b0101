"""Turns of requests in the event loop.

The loop runs everything that is ready before it looks at its sockets again. So a thousand requests that arrive together
would be parsed and tokenized before the next token of a stream, and before the answer to a health check.
"""

from __future__ import annotations

import asyncio
from collections import deque

from aiohttp import web

PER_ITERATION = 4  # about a millisecond each


class Turns:
    """Lets up to PER_ITERATION requests go on in each iteration of the event loop, in the order of their arrival."""

    def __init__(self) -> None:
        self._free = PER_ITERATION
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False  # whether `_next` runs in the next iteration

    async def take(self) -> None:
        """Returns at once if this iteration has a turn left, else in a later iteration."""
        self._schedule()
        if self._free and not self._waiting:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._free, self._is_scheduled = PER_ITERATION, False
        while self._free and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its client has not left
                turn.set_result(None)
                self._free -= 1
        if self._free < PER_ITERATION:
            self._schedule()


TURNS = web.AppKey("turns", Turns)

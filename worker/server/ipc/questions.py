"""Questions to other processes: each has a number, which its answer repeats."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

from mla_router.worker.server.errors import Unavailable

T = TypeVar("T")


class Questions(Generic[T]):
    """The questions that have no answer yet. Only the thread of the event loop may use it."""

    def __init__(self, problem: str) -> None:
        """`problem`: the error of a question without an answer in time."""
        self._problem = problem
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[T]] = {}

    async def ask(self, post: Callable[[int], None], timeout: float | None) -> T:
        """Calls `post` with a new number above 0, and returns the answer. Raises Unavailable after `timeout` seconds; with
        None it waits without limit."""
        number = next(self._numbers)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            post(number)
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            raise Unavailable(self._problem, retry_after=1) from None
        finally:
            del self._waiting[number]

    def answer(self, number: int, value: T) -> None:
        """Answers question `number`, unless nobody waits for it."""
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(value)

    def fail(self, error: Exception) -> None:
        """Fails all questions without an answer."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)

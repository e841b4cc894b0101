"""Work for whose end the process does not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(function: Callable[..., T], *arguments: object) -> T:
    """Returns the result of `function`, or raises its exception. The function may hang, as in the read of a file whose server is
    gone: the process ends nevertheless, unlike with `asyncio.to_thread`."""
    return await asyncio.wrap_future(start_daemon_thread(function, *arguments))


def start_daemon_thread(function: Callable[..., T], *arguments: object) -> Future[T]:
    """Returns the future result of `function`, which runs in a thread of its own."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # a cancelled caller leaves it to run

    def run() -> None:
        try:
            result.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 (the caller gets it)
            result.set_exception(error)

    Thread(target=run, daemon=True).start()
    return result

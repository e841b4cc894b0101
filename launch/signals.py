"""Signals of the launcher.

SIGTERM: finish the running requests, then stop. A second SIGTERM, or Ctrl-C: stop. A second Ctrl-C: exit at once.
SIGHUP: as the first SIGTERM, however often, because a closed terminal may send it several times. With nohup it is ignored
and stays so.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

KILLED_BY_CTRL_C = 128 + signal.SIGINT


class StopSignals:
    """Sets the event `drain` or `interrupt` when a signal comes."""

    def __init__(self, kill: Callable[[], None]) -> None:
        """Handles the signals. `kill` ends all processes that would outlive this one."""
        self.drain = asyncio.Event()
        self.interrupt = asyncio.Event()
        self._kill = kill
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_term)
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self.drain.set)
        self._terminated = False

    async def any(self) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (self.drain, self.interrupt)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    def _on_term(self) -> None:
        (self.interrupt if self._terminated else self.drain).set()
        self._terminated = True

    def _on_interrupt(self) -> None:
        if self.interrupt.is_set():
            self._kill()
            os._exit(KILLED_BY_CTRL_C)  # without clean-up, which might block
        self.interrupt.set()

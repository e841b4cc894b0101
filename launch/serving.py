"""Router and workers from their start to their end: signals, draining, stopping."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING

from mla_router.launch.output import Output
from mla_router.launch.signals import StopSignals
from mla_router.launch.supervisor import Supervisor

if TYPE_CHECKING:
    from mla_router import Router

# Ctrl-C ends everything within five seconds: the workers stop by themselves, then SIGKILL.
WORKER_GRACE_S = 3.0
ROUTER_GRACE_S = 1.0
ROTATION_POLL_S = 0.1


async def serve(
    router: Router,
    supervisor: Supervisor,
    drain_s: float,
    output: Output,
    announce: Coroutine[None, None, None],
) -> int:
    """Starts the workers behind a running router, and ends both after a signal. Returns the exit status.

    `drain_s`: time limit for running requests after SIGTERM. `announce` runs at the same time. Raises GaveUpError.
    """
    signals = StopSignals(kill=supervisor.kill)
    supervisor.start()
    announcing = asyncio.create_task(announce)
    asked_to_stop = asyncio.create_task(signals.any())
    lost = asyncio.create_task(supervisor.lost())
    try:
        await asyncio.wait([asked_to_stop, lost], return_when=asyncio.FIRST_COMPLETED)
        announcing.cancel()
        if lost.done():
            await lost  # raises the reason
        if not signals.interrupt.is_set():
            output.launch("draining: no new requests, those that run are finished")
            await _drain(router, drain_s, signals)
        output.launch("stopping")
        return 0
    finally:
        # The router stops at the same time: it must not count the end of the workers as failures.
        await asyncio.gather(
            asyncio.to_thread(router.stop, ROUTER_GRACE_S), supervisor.stop(WORKER_GRACE_S)
        )
        output.launch("stopped")


async def _drain(router: Router, grace_s: float, signals: StopSignals) -> None:
    """Waits for the end of all requests, for `grace_s`, or for the signal to stop."""
    drained = asyncio.create_task(asyncio.to_thread(router.drain, grace_s))
    enough = asyncio.create_task(signals.interrupt.wait())
    await asyncio.wait([drained, enough], return_when=asyncio.FIRST_COMPLETED)
    enough.cancel()
    if drained.done():
        drained.result()
    # Else it was the signal: the following stop of the router ends its requests, and so the drain.

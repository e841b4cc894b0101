"""What every server process of a worker does alike: get ready, and answer HTTP."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from mla_router.worker.server.app import make_app
from mla_router.worker.server.ipc.scheduler_client import SchedulerClient
from mla_router.worker.server.processes.listeners import BACKLOG
from mla_router.worker.server.request_names import NamedRequests
from mla_router.worker.server.state import ServerState, Service, fingerprint_of
from mla_router.worker.server.text.answer import AnswerFormat
from mla_router.worker.server.text.tokenizer import Tokenizer

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_BAD_SETTINGS = 2  # as argparse has it: trying again will not help

ANSWERS_OUT_S = 1.0  # for handlers to write their last bytes
KEEPALIVE_S = 75.0  # longer than clients keep idle connections, so that they close them first


async def prepare(state: ServerState, client: SchedulerClient, names: NamedRequests) -> Service:
    """Load the tokenizer while the scheduler loads the weights.

    Raises TokenizerError, and ApiError if the scheduler does not answer.
    """
    config = state.config
    template = Path(config.chat_template) if config.chat_template else None
    tokenizer = await asyncio.to_thread(Tokenizer, config.tokenizer_folder, config.folder, template)
    limits = await client.ready
    # The answer shows that the sockets are connected both ways.
    await client.stats(timeout=config.watchdog_timeout)
    service = Service(
        config,
        limits,
        tokenizer,
        AnswerFormat.of(config.tool_call_parser, config.reasoning_parser, tokenizer.template.text),
        client,
        names,
        state.metrics,
        fingerprint_of(config, limits),
    )
    # What is here by now stays: a collection while streams run need not look at it again.
    gc.collect()
    gc.freeze()
    return service


@asynccontextmanager
async def serving(state: ServerState, listener: socket.socket) -> AsyncIterator[None]:
    """Answer on `listener`, which listens from now on if it has not before."""
    runner = web.AppRunner(
        make_app(state),
        # A client that leaves cancels its handler, which aborts the request. Without this its
        # tokens would be computed to the end for nobody.
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,  # small bodies that become large ones: they are refused (`app.py`)
        keepalive_timeout=KEEPALIVE_S,
        shutdown_timeout=ANSWERS_OUT_S,
    )
    await runner.setup()
    await web.SockSite(runner, listener, backlog=BACKLOG).start()
    watching = asyncio.create_task(state.watch.run())
    try:
        yield
    finally:
        watching.cancel()
        await runner.cleanup()

"""Start and HTTP service, the same in every API process of a worker."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from mla_router.worker.heartbeat_watch import CHECK_PERIOD_S
from mla_router.worker.server.app import make_app
from mla_router.worker.server.daemon_thread import in_daemon_thread
from mla_router.worker.server.http.protocol import Protocol
from mla_router.worker.server.ipc.scheduler_client import SchedulerClient
from mla_router.worker.server.media.fetch import Fetcher
from mla_router.worker.server.media.reader import MediaReader
from mla_router.worker.server.processes.accept import accept
from mla_router.worker.server.request_names import NamedRequests
from mla_router.worker.server.state import ServerState, Service, fingerprint_of
from mla_router.worker.server.text.answer import AnswerFormat
from mla_router.worker.server.text.tokenizer import Tokenizer

EXIT_STOPPED = 0
EXIT_FAILED = 1

FLUSH_S = 1.0  # time for the last bytes of running handlers
KEEPALIVE_S = 75.0  # longer than that of most clients, so that clients close idle connections first
MAX_HEAD = 64 << 10  # bytes of a line of a request's head; a router sends no longer heads


async def prepare(state: ServerState, client: SchedulerClient, names: NamedRequests) -> Service:
    """Loads the tokenizer while the scheduler loads the weights. Returns the service.

    Raises TokenizerError, and ApiError if the scheduler does not answer.
    """
    config = state.config
    template = Path(config.chat_template) if config.chat_template else None
    tokenizer = await in_daemon_thread(Tokenizer, config.tokenizer_folder, config.folder, template)
    limits = await client.ready
    media = None
    if limits.images is not None:
        domains = config.media_domains
        fetcher = Fetcher(domains) if domains else None
        media = await in_daemon_thread(
            MediaReader, config.folder, limits.images, limits.vocab_size, fetcher
        )
    # The answer proves that the sockets work in both directions.
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
        media,
    )
    # Objects of the start live as long as the process: later collections skip them.
    gc.collect()
    gc.freeze()
    return service


@asynccontextmanager
async def serving(state: ServerState, listener: socket.socket) -> AsyncIterator[None]:
    """Answers on `listener` within the block."""
    logging.getLogger("aiohttp.server").addFilter(_is_own_fault)
    runner = web.AppRunner(
        make_app(state),
        # If a client leaves, its handler is cancelled and aborts the request.
        handler_cancellation=True,
        shutdown_timeout=FLUSH_S,
    )
    await runner.setup()
    assert runner.server is not None, "set up"
    protocol = partial(
        Protocol,
        runner.server,
        loop=asyncio.get_running_loop(),
        access_log=None,  # type: ignore[arg-type]
        auto_decompress=False,  # `app.py` refuses compressed bodies, because small ones may become large
        keepalive_timeout=KEEPALIVE_S,
        max_line_size=MAX_HEAD,
        max_field_size=MAX_HEAD,
    )
    accepting = asyncio.create_task(accept(listener, protocol))
    watching = asyncio.create_task(state.watch.run())
    watching_servers = asyncio.create_task(state.servers_watch.run())
    beating = asyncio.create_task(_beat(state))
    try:
        yield
    finally:
        for task in (accepting, watching, watching_servers, beating):
            task.cancel()
        await asyncio.wait((accepting,))
        listener.close()
        await runner.cleanup()


def _is_own_fault(record: logging.LogRecord) -> bool:
    """Returns False for the traceback that aiohttp logs at a request that is not HTTP. The client gets a 400."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


async def _beat(state: ServerState) -> None:
    """Writes the heartbeat of this API process until it is cancelled. The others find it frozen if it is stopped."""
    heartbeat = state.own_heartbeat
    heartbeat.start()
    heartbeat.expect(state.config.watchdog_timeout)  # a long computation is not a fault
    while True:
        heartbeat.update(has_work=False)
        await asyncio.sleep(CHECK_PERIOD_S)

"""The life of a worker's server process: start the scheduler, serve, end.

The listening socket is there before anything else, so that a wrong port costs a moment and not a
load of the weights; until the scheduler is ready, /health says "starting".
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from mla_router.worker.config import WorkerConfig
from mla_router.worker.messages import Ready
from mla_router.worker.server.answer import AnswerFormat
from mla_router.worker.server.app import make_app
from mla_router.worker.server.errors import ENGINE_DIED, ApiError, Unavailable
from mla_router.worker.server.request_names import RequestNames
from mla_router.worker.server.scheduler_client import SchedulerClient, connect
from mla_router.worker.server.state import ServerState, Service, fingerprint_of
from mla_router.worker.server.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger(__name__)

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_BAD_SETTINGS = 2  # as argparse has it: trying again will not help
EXIT_SCHEDULER_DIED = 3

BACKLOG = 1024
DRAIN_GRACE_S = 30.0  # how long requests may still run after SIGTERM
ANSWERS_OUT_S = 1.0  # for handlers to write their last bytes
SCHEDULER_STOP_S = 1.0  # for the scheduler to leave by itself
KEEPALIVE_S = 75.0  # longer than clients keep idle connections, so that they close them first


def listen(config: WorkerConfig) -> tuple[socket.socket, WorkerConfig]:
    """A listening socket, and the config with the port that it got. OSError if there is none."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # at once: until then, another process could bind it too
    except OSError:
        listener.close()
        raise
    return listener, dataclasses.replace(config, port=listener.getsockname()[1])


async def run(config: WorkerConfig, listener: socket.socket, scheduler: Sequence[str]) -> int:
    """Serve on `listener` until told to end; returns the exit status. `scheduler` is the command
    that starts a scheduler, without its flags."""
    state = ServerState(config)
    signals = Signals()
    with ipc_directory() as directory:
        command = [*scheduler, *config.to_argv(), "--ipc-dir", str(directory)]
        # Left from right to left: first the answers go out, then the scheduler is ended.
        async with (
            connect(directory, 0, state.open_requests) as client,
            child_process(command, client) as child,
            serving(state, listener),
        ):
            starting = asyncio.create_task(_start(state, client, directory))
            died = asyncio.create_task(child.wait())
            status = await _until_told(state, client, signals, starting, died)
            starting.cancel()
            died.cancel()
    return status


async def _until_told(
    state: ServerState,
    client: SchedulerClient,
    signals: Signals,
    starting: asyncio.Task[None],
    died: asyncio.Task[int],
) -> int:
    """Wait for the end, and give all open requests theirs."""
    stop = asyncio.create_task(signals.stop.wait())
    drain = asyncio.create_task(signals.drain.wait())
    try:
        await _first(starting, died, drain, stop)
        if starting.done() and (failure := starting.exception()) is not None:
            if not isinstance(failure, TokenizerError | ApiError):
                raise failure
            log.error("%s", failure)
            return EXIT_BAD_SETTINGS if isinstance(failure, TokenizerError) else EXIT_FAILED
        await _first(died, drain, stop)
        if drain.done() and state.service is not None and not died.done() and not stop.done():
            state.draining = True
            log.info("draining: %d requests are running", client.open_requests)
            idle = asyncio.create_task(client.until_idle())
            await _first(idle, died, stop, timeout=DRAIN_GRACE_S)
            idle.cancel()
        if died.done():
            if state.service is None and died.result() == EXIT_BAD_SETTINGS:
                return EXIT_BAD_SETTINGS  # it has said why
            log.error("the scheduler has ended with status %d", died.result())
            return EXIT_SCHEDULER_DIED
        return EXIT_STOPPED
    finally:
        state.draining = True
        if died.done():
            # 503 and not 500: what has had no byte yet can be answered by another worker, and the
            # router knows from this status that it may ask one.
            client.fail(Unavailable("The scheduler of this worker has ended", code=ENGINE_DIED))
        else:
            client.fail(Unavailable("This worker is shutting down", code=ENGINE_DIED))
        stop.cancel()
        drain.cancel()


async def _start(state: ServerState, client: SchedulerClient, directory: Path) -> None:
    """Load the tokenizer while the scheduler loads the weights, then open for requests."""
    config = state.config
    tokenizer = await asyncio.to_thread(Tokenizer, config.folder)
    limits = await client.ready
    # The answer shows that the sockets are connected both ways. Their names are no longer needed
    # then, and what is gone already cannot be left behind by a process that gets killed.
    await client.stats(timeout=config.watchdog_timeout)
    shutil.rmtree(directory, ignore_errors=True)
    state.service = Service(
        config,
        limits,
        tokenizer,
        AnswerFormat.of(config.tool_call_parser, config.reasoning_parser, tokenizer.template.text),
        client,
        RequestNames(),
        state.metrics,
        fingerprint_of(config, limits),
    )
    # What is here by now stays: a collection while streams run need not look at it again.
    gc.collect()
    gc.freeze()
    print(_startup_line(config, limits, time.monotonic() - state.started), flush=True)


def _startup_line(config: WorkerConfig, limits: Ready, seconds: float) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    overlap = "off" if config.disable_overlap_schedule else "on"
    return (
        f"worker {config.name} ready: http://{host}:{config.port}, model {config.model_name}, "
        f"{limits.device} {limits.dtype}, {limits.max_total_num_tokens} KV tokens in pages of "
        f"{limits.page_size}, overlap {overlap}, {seconds:.1f} s"
    )


class Signals:
    """SIGTERM: finish what runs, then end. SIGINT, or a second SIGTERM: end now."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_term)
        loop.add_signal_handler(signal.SIGINT, self.stop.set)

    def _on_term(self) -> None:
        (self.stop if self.drain.is_set() else self.drain).set()


@contextmanager
def ipc_directory() -> Iterator[Path]:
    """A fresh directory that only this user can enter (0700): who can write to the sockets in it
    can command the scheduler."""
    directory = Path(tempfile.mkdtemp(prefix="mla-router-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@asynccontextmanager
async def child_process(
    command: Sequence[str], client: SchedulerClient
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The scheduler, in our process group and with our output; surely gone afterwards."""
    child = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
    try:
        yield child
    finally:
        if child.returncode is None:
            client.shut_down()
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(child.wait(), SCHEDULER_STOP_S)
        if child.returncode is None:
            child.kill()
            await child.wait()


@asynccontextmanager
async def serving(state: ServerState, listener: socket.socket) -> AsyncIterator[None]:
    runner = web.AppRunner(
        make_app(state),
        # A client that leaves cancels its handler, which aborts the request. Without this its
        # tokens would be computed to the end for nobody.
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=KEEPALIVE_S,
        shutdown_timeout=ANSWERS_OUT_S,
    )
    await runner.setup()
    await web.SockSite(runner, listener, backlog=BACKLOG).start()
    try:
        yield
    finally:
        await runner.cleanup()


async def _first(*tasks: asyncio.Task[Any], timeout: float | None = None) -> None:
    await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

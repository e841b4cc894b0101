"""The connection of an API process to its scheduler.

It has the table of running requests, which maps a request id to its mailbox. A request leaves the table with its last
delta or when it is aborted. So it is aborted at most once, and later deltas are dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq

from mla_router.worker.generation import FinishReason
from mla_router.worker.messages import (
    Abort,
    Delta,
    Deltas,
    FlushCache,
    Generate,
    GetStats,
    Ready,
    Recorded,
    RecordExperts,
    Shutdown,
    StartProfile,
    Stats,
    StopProfile,
    ToScheduler,
    ToServer,
    scheduler_socket,
    server_socket,
)
from mla_router.worker.server.errors import ApiError
from mla_router.worker.server.ipc.inbox import Inbox
from mla_router.worker.server.ipc.latest_stats import LatestStats
from mla_router.worker.server.ipc.mailbox import Mailbox
from mla_router.worker.server.ipc.questions import Questions
from mla_router.worker.server.ipc.shared_counters import Cells, Count, SharedCounters
from mla_router.worker.server.ipc.waiting_prompts import WaitingPrompts


class Shared:
    """State that the clients of all API processes of a worker share."""

    def __init__(self, counters: SharedCounters) -> None:
        self.open_requests: Count = counters.count()
        self.stats_at: Cells = counters.cells(1)  # monotonic time of the last statistics
        self.complete: Count = counters.count()  # 1 when all processes serve; the first one sets it
        self.waiting_s: Count = counters.count()  # estimated seconds of the waiting prompts


class SchedulerClient:
    """Sends requests to the scheduler, and puts their deltas into mailboxes. Only the thread of the event loop may use
    it."""

    def __init__(
        self, receive: zmq.Socket[bytes], send: zmq.Socket[bytes], server: int, shared: Shared
    ) -> None:
        """`server` is the number of this API process."""
        self.server = server
        self._open = shared.open_requests
        self.latest_stats = LatestStats(shared.stats_at)
        self.waiting_prompts = WaitingPrompts(shared.waiting_s)
        self._inbox = Inbox(receive, msgspec.msgpack.Decoder(ToServer), self._handle)
        self._send = send
        self._encoder = msgspec.msgpack.Encoder()
        self._targets: dict[str, tuple[Mailbox, int]] = {}
        self._questions = Questions[Any]("The scheduler does not answer")
        self._idle = asyncio.Event()
        self._error: ApiError | None = None
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()

    # -- requests --------------------------------------------------------------------------------

    @property
    def open_requests(self) -> int:
        """The number over all API processes."""
        return int(self._open.total)

    async def until_idle(self) -> None:
        """Waits until no request of this process runs."""
        while self._targets:
            self._idle.clear()
            await self._idle.wait()

    def submit(
        self, generate: Generate, mailbox: Mailbox, index: int, *, computes: bool = True
    ) -> None:
        """Sends a request. Its deltas go to `mailbox` under `index`. `computes`: the request computes its prompt; False
        if another choice of the same HTTP request computes it. Raises ApiError after `fail`."""
        if self._error is not None:
            raise self._error
        self._targets[generate.rid] = (mailbox, index)
        self._open.set(len(self._targets))
        if computes and (stats := self.latest_stats.value) is not None:
            self.waiting_prompts.add(generate.rid, len(generate.prompt), stats)
        self._post(generate)

    def abort(self, rid: str, *, notify: bool = False) -> bool:
        """Aborts a request. Returns whether it was running. `notify`: its mailbox gets a last delta."""
        target = self._remove(rid)
        if target is None:
            return False
        self._post(Abort(rid))
        if notify:
            mailbox, index = target
            mailbox.put(index, Delta(rid, [], finish_reason=FinishReason.ABORT.value))
        return True

    def abort_all(self) -> int:
        """Aborts all requests of this process. Returns their number."""
        return sum(self.abort(rid, notify=True) for rid in list(self._targets))

    def fail(self, error: ApiError) -> None:
        """Ends all running requests and refuses all later ones with `error`."""
        self._error = error
        for mailbox, _ in self._targets.values():
            mailbox.fail(error)
        self._targets.clear()
        self._open.set(0)
        self.waiting_prompts.clear()
        self._questions.fail(error)

    # -- questions -------------------------------------------------------------------------------

    async def stats(self, timeout: float = 10.0) -> Stats:
        """Returns the current statistics. Raises Unavailable after `timeout` seconds."""
        answer: Stats = await self._ask(GetStats, timeout)
        return answer

    async def flush_cache(self, timeout: float = 10.0) -> Stats:
        answer: Stats = await self._ask(FlushCache, timeout)
        return answer

    async def start_profile(self, num_steps: int, timeout: float = 60.0) -> Recorded:
        answer: Recorded = await self._ask(
            lambda query, server: StartProfile(query, num_steps, server), timeout
        )
        return answer

    async def stop_profile(self, timeout: float = 120.0) -> Recorded:
        """Stops the profile. The timeout is long because writing a trace is slow."""
        answer: Recorded = await self._ask(StopProfile, timeout)
        return answer

    async def record_experts(
        self, action: Literal["start", "stop", "dump"], timeout: float = 60.0
    ) -> Recorded:
        answer: Recorded = await self._ask(
            lambda query, server: RecordExperts(query, action, server), timeout
        )
        return answer

    def shut_down(self) -> None:
        self._post(Shutdown())

    async def _ask(self, question: Callable[[int, int], ToScheduler], timeout: float) -> Any:
        """Sends a question. Returns its answer. Raises ApiError."""
        if self._error is not None:
            raise self._error
        return await self._questions.ask(
            lambda query: self._post(question(query, self.server)), timeout
        )

    # -- wire ------------------------------------------------------------------------------------

    def _post(self, message: ToScheduler) -> None:
        # Does not block: the ZMQ queue is unlimited, and the number of requests is limited.
        self._send.send(self._encoder.encode(message), zmq.NOBLOCK)

    def start(self) -> None:
        self._inbox.start()

    def stop(self) -> None:
        self._inbox.stop()

    def _handle(self, message: ToServer) -> None:
        if isinstance(message, Deltas):
            self._deliver(message)
        elif isinstance(message, Stats):
            self.latest_stats.update(message)
            self._questions.answer(message.query, message)
        elif isinstance(message, Recorded):
            self._questions.answer(message.query, message)
        elif not self.ready.done():
            self.ready.set_result(message)

    def _deliver(self, message: Deltas) -> None:
        targets = self._targets
        for delta in message.items:
            target = targets.get(delta.rid)
            if target is None:
                continue  # aborted
            if delta.finish_reason:
                self._remove(delta.rid)
            elif delta.queue_seconds:  # the first one
                self.waiting_prompts.remove(delta.rid)
            mailbox, index = target
            mailbox.put(index, delta)

    def _remove(self, rid: str) -> tuple[Mailbox, int] | None:
        target = self._targets.pop(rid, None)
        self._open.set(len(self._targets))
        self.waiting_prompts.remove(rid)
        if not self._targets:
            self._idle.set()
        return target


@asynccontextmanager
async def connect(directory: Path, server: int, shared: Shared) -> AsyncIterator[SchedulerClient]:
    """Connects API process number `server` to the scheduler, by sockets in `directory`."""
    context = zmq.Context()
    receive, send = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    receive.set_hwm(0)
    send.set_hwm(0)
    receive.bind(server_socket(directory, server))
    send.connect(scheduler_socket(directory))
    client = SchedulerClient(receive, send, server, shared)
    client.start()
    try:
        yield client
    finally:
        client.stop()
        context.destroy(linger=200)  # milliseconds, for a last Shutdown to leave

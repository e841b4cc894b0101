"""The table of running requests, over real sockets. The test plays the scheduler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from mla_router.worker.generation import SamplingParams
from mla_router.worker.messages import (
    Abort,
    Delta,
    Deltas,
    Generate,
    GetStats,
    Ready,
    Stats,
    ToScheduler,
    ToServer,
    scheduler_socket,
    server_socket,
)
from mla_router.worker.server.errors import InternalError, Unavailable
from mla_router.worker.server.ipc.mailbox import Mailbox
from mla_router.worker.server.ipc.scheduler_client import SchedulerClient, Shared, connect
from mla_router.worker.server.ipc.shared_counters import SharedCounters

READY = Ready(4096, 16, 8, 1024, 100, "cpu", "float32", "float32", "torch")


class Peer:
    """The scheduler's end."""

    def __init__(self, directory: Path) -> None:
        self.context = zmq.asyncio.Context()
        self.inbox = self.context.socket(zmq.PULL)
        self.outbox = self.context.socket(zmq.PUSH)
        self.inbox.bind(scheduler_socket(directory))
        self.outbox.connect(server_socket(directory, 0))

    async def receive(self) -> ToScheduler:
        message: ToScheduler = msgspec.msgpack.decode(await self.inbox.recv(), type=ToScheduler)
        return message

    async def say(self, message: ToServer) -> None:
        await self.outbox.send(msgspec.msgpack.encode(message))


@asynccontextmanager
async def pair(directory: Path) -> AsyncIterator[tuple[SchedulerClient, Peer]]:
    peer = Peer(directory)
    try:
        async with connect(directory, 0, Shared(SharedCounters.create())) as client:
            yield client, peer
    finally:
        peer.context.destroy(linger=0)


Scenario = Callable[[SchedulerClient, Peer], Awaitable[None]]


def play(tmp_path: Path, scenario: Scenario) -> None:
    async def run() -> None:
        async with pair(tmp_path) as (client, peer):
            await scenario(client, peer)

    asyncio.run(run())


def generate(rid: str) -> Generate:
    return Generate(rid, [1], SamplingParams(5))


def stats(query: int, generated: int = 0) -> Stats:
    return Stats(query, 0, 0, 1, 1, 0, 1, 1, 0, 0, 0, generated, 0)


def test_deltas_reach_their_request_and_no_other(tmp_path: Path) -> None:
    async def scenario(client: SchedulerClient, peer: Peer) -> None:
        left, right = Mailbox(), Mailbox()
        client.submit(generate("a"), left, 0)
        client.submit(generate("b"), right, 0)
        client.submit(generate("c"), right, 1)
        assert [(await peer.receive()) for _ in range(3)] == [generate(rid) for rid in "abc"]
        a, b, c = Delta("a", [1]), Delta("b", [2]), Delta("c", [3], finish_reason="length")
        await peer.say(Deltas([c, a, Delta("nobody's", [9]), b]))
        assert await right.take() == [(1, c), (0, b)]
        assert await left.take() == [(0, a)]
        assert client.open_requests == 2

    play(tmp_path, scenario)


def test_prompts_wait_until_their_first_delta(tmp_path: Path) -> None:
    async def scenario(client: SchedulerClient, peer: Peer) -> None:
        mailbox = Mailbox()
        client.submit(generate("before"), mailbox, 0)
        assert client.waiting_prompts.seconds == 0.0, "the speed is not known yet"
        await peer.say(msgspec.structs.replace(stats(0), token_s=2.0, context_s=0.5))
        while client.latest_stats.value is None:
            await asyncio.sleep(0.001)
        client.submit(Generate("long", [1] * 4, SamplingParams(5)), mailbox, 1)
        client.submit(Generate("same", [1] * 4, SamplingParams(5)), mailbox, 2, computes=False)
        client.submit(generate("short"), mailbox, 3)
        assert client.waiting_prompts.seconds == (4 * 2 + 4 * 2 * 0.5) + (2 + 0.25)
        await peer.say(Deltas([Delta("long", [7], queue_seconds=0.1), Delta("same", [7])]))
        while client.waiting_prompts.seconds > 5:
            await asyncio.sleep(0.001)
        assert client.waiting_prompts.seconds == 2.25
        client.abort("short")
        assert client.waiting_prompts.seconds == 0.0
        assert client.open_requests == 3

    play(tmp_path, scenario)


def test_deltas_are_taken_together(tmp_path: Path) -> None:
    async def scenario(client: SchedulerClient, peer: Peer) -> None:
        mailbox = Mailbox()
        client.submit(generate("a"), mailbox, 0)
        deltas = [Delta("a", [token]) for token in range(50)]
        for delta in deltas:
            await peer.say(Deltas([delta]))
        await peer.say(stats(0, 50))
        while client.latest_stats.value is None:  # all earlier messages are handled then
            await asyncio.sleep(0.001)
        assert await mailbox.take() == [(0, delta) for delta in deltas]

    play(tmp_path, scenario)


def test_an_abort_is_sent_once_and_only_for_running_requests(tmp_path: Path) -> None:
    async def scenario(client: SchedulerClient, peer: Peer) -> None:
        mailbox = Mailbox()
        for rid in "ab":
            client.submit(generate(rid), mailbox, 0)
        end = Delta("b", [1], finish_reason="stop")
        await peer.say(Deltas([end]))
        assert await mailbox.take() == [(0, end)]
        assert [client.abort(rid) for rid in "aab"] == [True, False, False]
        assert not client.abort("unknown")
        client.submit(generate("c"), mailbox, 0)
        received = [await peer.receive() for _ in range(4)]
        assert received == [generate("a"), generate("b"), Abort("a"), generate("c")]

    play(tmp_path, scenario)


def test_late_deltas_of_an_aborted_request_are_dropped(tmp_path: Path) -> None:
    async def scenario(client: SchedulerClient, peer: Peer) -> None:
        mailbox = Mailbox()
        client.submit(generate("a"), mailbox, 0)
        client.abort("a", notify=True)
        await peer.say(Deltas([Delta("a", [7])]))
        await peer.say(READY)
        await client.ready
        ((_, last),) = await mailbox.take()
        assert (last.token_ids, last.finish_reason) == ([], "abort")

    play(tmp_path, scenario)


def test_failing_ends_everything(tmp_path: Path) -> None:
    async def scenario(client: SchedulerClient, peer: Peer) -> None:
        mailbox = Mailbox()
        client.submit(generate("a"), mailbox, 0)
        waiting = asyncio.create_task(mailbox.take())
        asking = asyncio.create_task(client.stats())
        await peer.receive()
        await peer.receive()
        client.fail(InternalError("gone"))
        for task in (waiting, asking, mailbox.take(), client.stats()):
            with pytest.raises(InternalError, match="gone"):
                await task
        with pytest.raises(InternalError, match="gone"):
            client.submit(generate("b"), mailbox, 0)
        await client.until_idle()

    play(tmp_path, scenario)


def test_questions_get_their_own_answers(tmp_path: Path) -> None:
    async def scenario(client: SchedulerClient, peer: Peer) -> None:
        first, second = asyncio.create_task(client.stats()), asyncio.create_task(client.stats())
        queries = [await peer.receive(), await peer.receive()]
        assert queries == [GetStats(1), GetStats(2)]
        await peer.say(stats(0, 1))  # a heartbeat is not an answer
        await peer.say(stats(2, 20))
        await peer.say(stats(1, 10))
        assert (await first).generated_tokens == 10
        assert (await second).generated_tokens == 20

    play(tmp_path, scenario)


def test_a_question_without_an_answer(tmp_path: Path) -> None:
    async def scenario(client: SchedulerClient, peer: Peer) -> None:
        with pytest.raises(Unavailable):
            await client.stats(timeout=0.05)
        await peer.say(stats(1))  # too late; it is ignored
        await peer.say(READY)
        assert await client.ready == READY

    play(tmp_path, scenario)


def test_rubbish_on_the_wire_is_survived(tmp_path: Path) -> None:
    async def scenario(client: SchedulerClient, peer: Peer) -> None:
        for frame in (b"", b"\xc1", b"\x91\xa7Unknown", b"\xff" * 1000):
            await peer.outbox.send(frame)
        await peer.say(READY)
        assert await client.ready == READY

    play(tmp_path, scenario)


def test_heartbeats_have_an_age(tmp_path: Path) -> None:
    async def scenario(client: SchedulerClient, peer: Peer) -> None:
        since_boot = time.monotonic()
        assert client.latest_stats.oldest_age >= since_boot, "nothing was received yet"
        await peer.say(stats(0))
        while client.latest_stats.value is None:
            await asyncio.sleep(0.001)
        assert client.latest_stats.oldest_age < since_boot

    play(tmp_path, scenario)

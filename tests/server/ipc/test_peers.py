"""Messages between API processes, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from mla_router.worker.generation import SamplingParams
from mla_router.worker.messages import AbortName, Drain, Generate, HasName, PeerQuery, Ping
from mla_router.worker.server.errors import InvalidRequest, Unavailable
from mla_router.worker.server.ipc.mailbox import Mailbox
from mla_router.worker.server.ipc.peers import Peers, join
from mla_router.worker.server.ipc.scheduler_client import SchedulerClient, Shared, connect
from mla_router.worker.server.ipc.shared_counters import SharedCounters
from mla_router.worker.server.request_names import NamedRequests, Names

SERVERS = 3


def play(folder: Path, scenario: Callable[[list[Peers]], Awaitable[None]]) -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            peers = [
                await stack.enter_async_context(join(folder, own, SERVERS))
                for own in range(SERVERS)
            ]
            await scenario(peers)

    asyncio.run(run())


def test_questions_find_their_answers(tmp_path: Path) -> None:
    """Questions may precede the listener, and answers may arrive in another order."""

    async def scenario(peers: list[Peers]) -> None:
        may_answer = asyncio.Event()

        def answers(own: int) -> Callable[[PeerQuery], Awaitable[int]]:
            async def answer(question: PeerQuery) -> int:
                if isinstance(question, Drain):
                    await may_answer.wait()
                return own * 10 + (
                    question.name.count("x") if isinstance(question, AbortName) else 0
                )

            return answer

        early = asyncio.create_task(peers[0].ask_all(Ping()))
        late = asyncio.create_task(peers[0].ask(2, Drain(), timeout=None))
        await asyncio.sleep(0)  # both are sent
        for own, each in enumerate(peers):
            each.start(answers(own))
        assert await early == [10, 20]
        names = [AbortName("x" * count) for count in range(5)]
        assert await asyncio.gather(*(peers[1].ask(2, name) for name in names)) == [
            20,
            21,
            22,
            23,
            24,
        ]
        assert await peers[2].ask_all(AbortName("xx")) == [2, 12]
        assert not late.done()
        may_answer.set()
        assert await late == 20

    play(tmp_path, scenario)


def test_a_silent_process(tmp_path: Path) -> None:
    async def scenario(peers: list[Peers]) -> None:
        async def answer(_: PeerQuery) -> int:
            return 1

        peers[0].start(answer)
        peers[1].start(answer)
        with pytest.raises(Unavailable):
            await peers[0].ask_all(Ping(), timeout=0.1)
        assert await peers[0].ask(1, Ping()) == 1

    play(tmp_path, scenario)


def test_names_are_unique_over_all_processes(tmp_path: Path) -> None:
    async def scenario(peers: list[Peers]) -> None:
        async with AsyncExitStack() as stack:
            counters = SharedCounters.create()
            clients: list[SchedulerClient] = [
                await stack.enter_async_context(connect(tmp_path, own, Shared(counters)))
                for own in range(SERVERS)
            ]
            named = [NamedRequests(*each) for each in zip(clients, peers, strict=True)]
            for each, names in zip(peers, named, strict=True):
                each.start(names.answer)
            mine = Names({"a" * 32: ["a1"], "mine": ["a1"]})
            others = Names({"b" * 32: ["b2"], "mine": ["b2"]})
            mailbox = Mailbox()
            clients[0].submit(Generate("a1", [1], SamplingParams(5)), mailbox, 0)
            await named[0].add(mine)
            assert await peers[1].ask_all(HasName(["other", "mine"])) == [1, 0]
            with pytest.raises(InvalidRequest):
                await named[1].add(others)
            assert await named[1].abort("b" * 32) == 0, "what was refused has left no name"
            assert await named[2].abort("chatcmpl-" + "a" * 32) == 1
            ((_, delta),) = await mailbox.take()
            assert delta.finish_reason == "abort"
            assert await named[2].abort("mine") == 0, "it has ended"
            named[0].remove(mine)
            # At most one of two simultaneous requests succeeds.
            ends = await asyncio.gather(
                named[0].add(mine), named[1].add(others), return_exceptions=True
            )
            assert sum(end is None for end in ends) <= 1

    play(tmp_path, scenario)

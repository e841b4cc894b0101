"""Node 0 and another node, both ends real: they meet, tell their states, and learn of each other's end."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.nodes.follower import NodeError, SettingsError, follow, join
from mla_router.worker.nodes.leader import MAX_STRANGERS, Nodes, other_nodes
from mla_router.worker.nodes.link import LinkError
from mla_router.worker.nodes.messages import Ended, NodeBeat, RankState
from support.processes import free_ports

EVENT_TIMEOUT_S = 60.0


def config(port: int, node: int = 0, **changed: Any) -> WorkerConfig:
    values: dict[str, Any] = {
        "tp_size": 4,
        "nnodes": 2,
        "node_rank": node,
        "dist_init_addr": f"127.0.0.1:{port}",
        "dist_key": "a secret of the nodes",
        "dist_timeout": EVENT_TIMEOUT_S,
        "device": "cpu",
    }
    return WorkerConfig(**{**values, **changed})


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@asynccontextmanager
async def node_0(settings: WorkerConfig) -> AsyncIterator[tuple[Nodes, Heartbeat]]:
    heartbeat = Heartbeat.create()
    async with other_nodes(settings, heartbeat) as nodes:
        assert nodes is not None
        yield nodes, heartbeat


async def until(condition: Any) -> None:
    async with asyncio.timeout(EVENT_TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_states_pass_in_both_directions(port: int) -> None:
    async def run() -> None:
        async with node_0(config(port)) as (nodes, rank_0):
            link, session = await join(config(port, 1), pytest.fail)
            assert session == nodes.session and session.store_host == "127.0.0.1"
            mirrored = Heartbeat.create()
            following = asyncio.create_task(follow(link, mirrored, EVENT_TIMEOUT_S))
            assert not mirrored.pid
            rank_0.start()
            rank_0.expect(0.25)
            await until(lambda: mirrored.pid and mirrored.expected_s == 0.25)

            pages = [rank_0.of_rank(rank) for rank in (2, 3)]
            link.send(NodeBeat((RankState(0.0, False), RankState(100.0, True))))
            await until(lambda: pages[1].is_reported_frozen)
            assert not pages[0].is_reported_frozen
            assert pages[0].age < EVENT_TIMEOUT_S < 100.0 <= pages[1].age
            link.send(NodeBeat((RankState(0.0, False), RankState(0.0, False))))
            await until(lambda: not pages[1].is_reported_frozen)

            (node,) = nodes.others
            assert [rank.name for rank in nodes.ranks] == ["rank 2 (node 1)", "rank 3 (node 1)"]
            nodes.ranks[0].kill()
            assert await node.wait() == 3
            assert "node 0 has ended" in await following
            await link.close()

    asyncio.run(run())


@pytest.mark.parametrize("way", ["told", "closed"])
def test_the_end_of_a_node_is_noticed(
    way: str, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with node_0(config(port)) as (nodes, _):
            link, _ = await join(config(port, 1), pytest.fail)
            if way == "told":
                link.send(Ended("rank 2 was ended by signal 9"))
            await link.close()
            (rank, _) = nodes.ranks
            assert await asyncio.wait_for(rank.wait(), EVENT_TIMEOUT_S) == 3
            assert not rank.is_running

    asyncio.run(run())
    reason = {
        "told": "has ended: rank 2 was ended by signal 9",
        "closed": "is lost: the connection has ended",
    }[way]
    assert f"node 1 (ranks 2 to 3) {reason}" in caplog.text


def test_a_silent_node_is_lost(port: int, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with node_0(config(port, watchdog_timeout=1.0)) as (nodes, _):
            link, _ = await join(config(port, 1), pytest.fail)
            assert await asyncio.wait_for(nodes.others[0].wait(), EVENT_TIMEOUT_S) == 3
            await link.close()

    asyncio.run(run())
    assert "node 1 (ranks 2 to 3) is lost: it was silent for 1 s" in caplog.text


def test_a_missing_node_is_named_on_the_nodes_that_wait(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> str:
        three = {"tp_size": 6, "nnodes": 3}
        async with node_0(config(port, **three)) as (nodes, _):
            link, _ = await join(config(port, 1, **three), pytest.fail)
            following = asyncio.create_task(follow(link, Heartbeat.create(), EVENT_TIMEOUT_S))
            # A short limit from now on, so that node 1 is never too late
            nodes._config = config(port, dist_timeout=1.0, **three)
            await nodes.expect()
            assert await asyncio.wait_for(nodes.others[1].wait(), EVENT_TIMEOUT_S) == 2
        return await following

    told = asyncio.run(run())
    missing = "after 1 s (--dist-timeout) node 2 (ranks 4 to 5) of 3 nodes has not come"
    assert missing in told and missing in caplog.text


def test_a_missing_node_0_is_named(port: int) -> None:
    with pytest.raises(NodeError, match=rf"after 1 s .* node 0 at 127.0.0.1:{port} .* has not"):
        asyncio.run(join(config(port, 1, dist_timeout=1.0), pytest.fail))


def test_different_settings_end_both_nodes_with_the_flag(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    message = "--page-size differs between the nodes: 16 on node 0, 32 on node 1"

    async def run() -> None:
        async with node_0(config(port)) as (nodes, _):
            with pytest.raises(SettingsError, match=message):
                await join(config(port, 1, page_size=32), pytest.fail)
            assert await asyncio.wait_for(nodes.others[0].wait(), EVENT_TIMEOUT_S) == 2

    asyncio.run(run())
    assert message in caplog.text


def test_a_node_too_many_is_refused(port: int) -> None:
    async def run() -> None:
        async with node_0(config(port)) as (nodes, _):
            with pytest.raises(SettingsError, match="--node-rank 2"):
                await join(config(port, 2, nnodes=4), pytest.fail)
            link, _ = await join(config(port, 1), pytest.fail)
            warned: list[str] = []
            reason = r"another node 1 \(ranks 2 to 3\) is connected"
            with pytest.raises(NodeError, match=reason):
                await join(config(port, 1, dist_timeout=2.0), warned.append)
            (warning,) = warned  # not with each attempt
            assert re.search(reason, warning)
            assert nodes.others[0].is_running
            await link.close()

    asyncio.run(run())


def test_strangers_are_refused_and_do_not_disturb(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    warned: list[str] = []

    async def run() -> None:
        async with node_0(config(port)) as (nodes, _):
            with pytest.raises(NodeError, match="it refused the key of this node"):
                await join(
                    config(port, 1, dist_key="another secret of nodes", dist_timeout=2.0),
                    warned.append,
                )
            silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(MAX_STRANGERS)]
            more = socket.create_connection(("127.0.0.1", port))
            more.setblocking(False)
            with contextlib.closing(more), contextlib.suppress(ConnectionResetError):
                loop = asyncio.get_running_loop()
                while await asyncio.wait_for(loop.sock_recv(more, 1 << 10), EVENT_TIMEOUT_S):
                    pass
            for stranger in silent:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: node-0\r\n\r\n" + bytes(60))
                stranger.close()
            link, _ = await join(config(port, 1), pytest.fail)
            assert nodes.others[0].has_come
            await link.close()

    asyncio.run(run())
    assert "MLA_ROUTER_DIST_KEY" in warned[0]
    assert "a connection from 127.0.0.1 was refused: it has another key" in caplog.text


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
def test_node_0_listens_on_an_address_of_its_own(host: str, port: int) -> None:
    async def run() -> None:
        async with other_nodes(config(port, dist_init_addr=f"{host}:{port}"), Heartbeat.create()):
            pytest.fail("it listens")

    with pytest.raises(ConfigError, match=f"--dist-init-addr {host}:{port}: "):
        asyncio.run(run())


def test_a_link_ends_with_a_message_out_of_place(port: int) -> None:
    async def run() -> None:
        async with node_0(config(port)) as (nodes, _):
            link, _ = await join(config(port, 1), pytest.fail)
            link.send(NodeBeat((RankState(0.0, False),)))  # of one rank, not of two
            assert await asyncio.wait_for(nodes.others[0].wait(), EVENT_TIMEOUT_S) == 3
            with pytest.raises(LinkError):
                while True:
                    await link.receive(EVENT_TIMEOUT_S)

    asyncio.run(run())

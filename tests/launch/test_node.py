"""The launcher of a node other than 0, with fake ranks. Node 0 is this process."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mla_router.launch import node as node_module
from mla_router.launch.node_processes import Command, GroupStart
from mla_router.launch.output import Output
from mla_router.launch.supervisor import GaveUpError, RestartPolicy
from mla_router.worker.config import WorkerConfig
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.nodes.follower import SettingsError
from mla_router.worker.nodes.leader import Nodes, other_nodes
from mla_router.worker.nodes.messages import Ended, Session
from support.processes import EVENT_TIMEOUT_S, Flag, Running, free_ports, running, to_argv
from support.procfs import Pid

FAKE_NODE = Path(__file__).with_name("fake_node.py")


def settings(port: int) -> dict[str, Any]:
    return {
        "tp_size": 4,
        "nnodes": 2,
        "dist_init_addr": f"127.0.0.1:{port}",
        "dist_key": "a secret of the nodes",
        "device": "cpu",
    }


@contextlib.contextmanager
def launched(port: int, **flags: Flag) -> Iterator[Running]:
    argv = [str(FAKE_NODE), *to_argv(settings(port) | {"node_rank": 1} | flags)]
    with running(argv, "", None) as node:
        yield node


@asynccontextmanager
async def node_0(port: int) -> AsyncIterator[tuple[Nodes, Heartbeat]]:
    rank_0 = Heartbeat.create()
    async with other_nodes(WorkerConfig(**settings(port)), rank_0) as nodes:
        assert nodes is not None
        yield nodes, rank_0


async def until(condition: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(EVENT_TIMEOUT_S):
            while not condition():
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"{what}: not within {EVENT_TIMEOUT_S:g} s")


def ranks_of(node: Running) -> list[Pid]:
    """Returns the processes of ranks, by rank: the tree has them in any order."""
    found = [pid for pid in node.tree() if "fake_node_rank.py" in pid.command]
    return sorted(found, key=lambda pid: pid.command.partition("--rank=")[2])


async def served(node: Running, rank_0: Heartbeat, times: int) -> list[Pid]:
    """Waits until the group serves for the n-th time. Returns the ranks of the node."""
    rank_0.start()
    text = "the group serves with the ranks of this node"
    await until(lambda: node.output().count(text) == times, "the node is ready")
    return ranks_of(node)


def test_a_node_lives_and_dies_with_the_group() -> None:
    (port,) = free_ports(1)

    async def run(node: Running) -> None:
        async with node_0(port) as (nodes, rank_0):
            (other,) = nodes.others
            first, second = await served(node, rank_0, 1)
            # A rank that is stopped before its first heartbeat is not frozen: it starts.
            await until(lambda: node.output().count("the fake rank beats") == 2, "both ranks beat")
            pages = [rank_0.of_rank(rank) for rank in (2, 3)]
            os.kill(second.number, signal.SIGSTOP)
            await until(lambda: pages[1].is_reported_frozen, "rank 3 is frozen")
            assert not pages[0].is_reported_frozen
            await until(lambda: "rank 3 is frozen" in node.output(), "it is told")
            os.kill(second.number, signal.SIGCONT)
            await until(lambda: not pages[1].is_reported_frozen, "rank 3 runs again")
            # A rank dies: the others of the node as well, and node 0 is told.
            os.kill(first.number, signal.SIGKILL)
            await asyncio.wait_for(other.wait(), EVENT_TIMEOUT_S)
            await until(lambda: not first.alive and not second.alive, "no rank is left")
        # Node 0 starts again, then ends: the node comes by itself, and ends its ranks.
        async with node_0(port) as (nodes, rank_0):
            ranks = await served(node, rank_0, 2)
            assert len(ranks) == 2
        await until(lambda: not any(rank.alive for rank in ranks), "no rank is left")
        # The launcher dies: node 0 is told by the connection, and no rank is left.
        async with node_0(port) as (nodes, rank_0):
            ranks = await served(node, rank_0, 3)
            node.process.kill()
            await asyncio.wait_for(nodes.others[0].wait(), EVENT_TIMEOUT_S)
            await until(lambda: not any(rank.alive for rank in ranks), "no rank is left")

    with launched(port) as node:
        asyncio.run(run(node))
        output = node.output()
    assert "node 1 (ranks 2 to 3) of 2 nodes; it has no router" in output
    assert "[rank 2] fake rank at 127.0.0.1: {" in output
    assert "rank 2 was ended by signal 9 (Killed); starting again in" in output
    assert "node 0 has ended or restarts its ranks; its own log lines say why" in output


def test_signals_end_a_node_that_waits_and_one_that_serves() -> None:
    (port,) = free_ports(1)

    async def run(node: Running) -> None:
        async with node_0(port) as (nodes, rank_0):
            ranks = await served(node, rank_0, 1)
            node.process.send_signal(signal.SIGINT)
            await asyncio.wait_for(nodes.others[0].wait(), EVENT_TIMEOUT_S)
            await until(lambda: not any(rank.alive for rank in ranks), "no rank is left")
            await until(lambda: node.process.poll() is not None, "the launcher ends")

    with launched(port) as node:
        asyncio.run(run(node))
        assert node.process.wait() == 0
    with launched(port) as waiting:
        asyncio.run(until(lambda: "expected at" in waiting.output(), "it waits"))
        waiting.process.send_signal(signal.SIGHUP)  # a closed terminal
        assert waiting.process.wait(EVENT_TIMEOUT_S) == 0


def test_a_node_without_node_0_ends_with_an_error() -> None:
    (port,) = free_ports(1)
    with launched(port, dist_timeout=1) as node:
        assert node.process.wait(EVENT_TIMEOUT_S) == 1
        (error,) = [line for line in node.output().splitlines() if line.startswith("error: ")]
    assert f"after 1 s (--dist-timeout) node 0 at 127.0.0.1:{port}" in error


def test_a_node_with_other_settings_ends_with_their_flag() -> None:
    (port,) = free_ports(1)

    async def run(node: Running) -> None:
        async with node_0(port) as (nodes, _):
            assert await asyncio.wait_for(nodes.others[0].wait(), EVENT_TIMEOUT_S) == 2
            await until(lambda: node.process.poll() is not None, "the launcher ends")

    with launched(port, dtype="bfloat16") as node:
        asyncio.run(run(node))
        assert node.process.wait() == 1
        assert "error: --dtype differs between the nodes: auto on node 0, bfloat16" in node.output()


class SilentLink:
    """A connection to node 0 that only keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    async def close(self) -> None:
        pass


class Missing:
    """Processes with a command that does not exist."""

    urls = ()

    def commands(self, start: GroupStart) -> list[Command]:
        return [Command("rank 2", ["/missing"], {}, [start.heartbeat.descriptor], print)]


def test_a_restart_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    link, attempts = SilentLink(), 0

    async def join(*_: object) -> tuple[SilentLink, Session]:
        nonlocal attempts
        attempts += 1
        if attempts == 3:
            raise SettingsError("enough")
        return link, Session("00", "127.0.0.1", 1)

    async def run() -> None:
        (port,) = free_ports(1)
        config = WorkerConfig(**settings(port), node_rank=1)
        policy = RestartPolicy(first_delay_s=0.01)
        node = node_module.Node(config, Missing(), Output(io.StringIO()), policy)  # type: ignore[arg-type]
        node._has_served = True
        with pytest.raises(GaveUpError, match="enough"):
            await node.keep_running()

    monkeypatch.setattr(node_module, "join", join)
    asyncio.run(run())
    assert (
        link.sent == [Ended("a process of this node did not start (No such file or directory)")] * 2
    )

"""A worker whose ranks are on two nodes, each with a launcher: its answers are those of one rank, and it comes back after the
death of anything.

The nodes are two addresses of the loopback interface, or two network namespaces where the machine allows them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from support import client, processes
from support.processes import Flag, Running, status_of, wait_until
from support.procfs import Pid, listening_addresses
from support.streams import whole

REQUESTS, TOKENS = 4, 60
LEADER = "127.0.0.2"


@dataclass
class TwoNodes:
    first: Running
    other: Running

    @property
    def worker(self) -> str:
        (entry,) = processes.workers(self.first.url)
        return str(entry["url"])

    def rank(self, name: str) -> Pid:
        """Returns the process of "scheduler" or "rank N"."""
        (found,) = [
            pid
            for node in (self.first, self.other)
            for pid in node.tree()
            if pid.command.startswith(f"mla_router {name} ")
        ]
        return found

    def wait_serving(self) -> None:
        wait_until(lambda: processes.healthy_workers(self.first.url), "the worker is back")


def flags_of(address: str, **more: Flag) -> dict[str, Flag]:
    (port,) = processes.free_ports(1)
    return {
        "tp_size": 2,
        "nnodes": 2,
        "dist_init_addr": f"{address}:{port}",
        "dist_key": "a secret of the nodes of tests",
        **more,
    }


@contextlib.contextmanager
def two_nodes(
    address: str = LEADER, prefix: Sequence[str] = (), **more: Flag
) -> Iterator[TwoNodes]:
    """Starts both launchers. `prefix`: words before the command of node 1."""
    flags = flags_of(address, **more)
    with (
        processes.node(prefix, node_rank=1, **flags) as other,
        processes.server(dp_size=1, **flags) as first,
    ):
        yield TwoNodes(first, other)


async def answers(url: str) -> list[tuple[str, str, int]]:
    async with client.session() as http:
        return await asyncio.gather(
            *(whole(http, url, number, TOKENS) for number in range(REQUESTS))
        )


@pytest.fixture(scope="module")
def expected(small_worker: str) -> list[tuple[str, str, int]]:
    """The answers of a worker of one rank."""
    return asyncio.run(answers(small_worker))


def test_two_nodes_answer_as_one_rank_and_end_together(
    expected: list[tuple[str, str, int]],
) -> None:
    with two_nodes(ep_size=2) as nodes:
        assert asyncio.run(answers(nodes.first.url)) == expected
        addresses = {
            address
            for node in (nodes.first, nodes.other)
            for pid in node.tree()
            for address in listening_addresses(pid.number)
        }
        assert addresses <= {"127.0.0.1", LEADER} and LEADER in addresses
        assert not listening_addresses(nodes.other.pid), "node 1 has no HTTP server"

        rank = nodes.rank("rank 1")
        os.kill(rank.number, signal.SIGSTOP)
        wait_until(lambda: status_of(nodes.worker + "/health") == 503, "the rank is stopped")
        told = "rank 1 (node 1) is frozen"
        wait_until(lambda: told in nodes.first.output(), "node 0 names it")
        os.kill(rank.number, signal.SIGCONT)
        wait_until(lambda: status_of(nodes.worker + "/health") == 200, "it continues")

        # The slow tests wait for the restart.
        scheduler = nodes.rank("scheduler")
        os.kill(rank.number, signal.SIGKILL)
        told = "node 1 (rank 1) has ended: rank 1 was ended by signal 9"
        wait_until(lambda: told in nodes.first.output(), "node 0 is told")
        wait_until(lambda: not scheduler.alive, "the group ends")


def schedulers(node: Running) -> list[Pid]:
    return [pid for pid in node.tree() if pid.command.startswith("mla_router scheduler ")]


def test_dp_ranks_of_two_nodes_answer_as_one_rank(expected: list[tuple[str, str, int]]) -> None:
    flags = flags_of(LEADER, enable_dp_attention=True, ep_size=2, dp_size=2)
    policy = "round_robin"  # both get requests
    with (
        processes.node(node_rank=1, **flags) as other,
        processes.server(router_policy=policy, **flags) as first,
    ):
        assert asyncio.run(answers(first.url)) == expected
        here, there = [entry["url"] for entry in processes.workers(first.url)]
        assert [processes.get_json(url + "/health")["dp_rank"] for url in (here, there)] == [0, 1]
        # The network of the nodes reaches the workers, so they need a key that only the router has
        assert [status_of(url + "/v1/models") for url in (here, there)] == [401, 401]

        (stopped,) = schedulers(other)
        os.kill(stopped.number, signal.SIGSTOP)
        for url in (here, there):
            wait_until(lambda url=url: status_of(url + "/health") == 503, "a rank is stopped")
        os.kill(stopped.number, signal.SIGCONT)
        wait_until(lambda: len(processes.healthy_workers(first.url)) == 2, "it continues")

        (own,) = schedulers(first)
        os.kill(stopped.number, signal.SIGKILL)
        told = "node 1 (rank 1) has ended: DP rank 1 exited with code"
        wait_until(lambda: told in first.output(), "node 0 is told")
        wait_until(lambda: not own.alive, "the group ends")


@pytest.mark.slow
def test_dp_ranks_of_two_nodes_come_back(expected: list[tuple[str, str, int]]) -> None:
    flags = flags_of(LEADER, enable_dp_attention=True, ep_size=2, tp_size=4, dp_size=4)
    with (
        processes.node(node_rank=1, **flags) as other,
        processes.server(router_policy="round_robin", **flags) as first,
    ):
        for node in (first, other):
            assert asyncio.run(answers(first.url)) == expected
            before = [*schedulers(first), *schedulers(other)]
            assert len(before) == 4
            os.kill(schedulers(node)[-1].number, signal.SIGKILL)
            wait_until(lambda: not any(pid.alive for pid in before), "the group ends")  # noqa: B023
            wait_until(lambda: len(processes.healthy_workers(first.url)) == 4, "it is back")
        assert asyncio.run(answers(first.url)) == expected


@pytest.mark.slow
def test_four_ranks_survive_the_death_of_each_part(
    expected: list[tuple[str, str, int]],
) -> None:
    flags = flags_of(LEADER, tp_size=4, ep_size=2)
    with (
        contextlib.ExitStack() as others,
        contextlib.ExitStack() as opened,
    ):
        other = others.enter_context(processes.node(node_rank=1, **flags))
        first = opened.enter_context(processes.server(dp_size=1, **flags))
        nodes = TwoNodes(first, other)
        assert asyncio.run(answers(first.url)) == expected
        for victim in ("rank 3", "rank 1", "scheduler"):
            before = [nodes.rank(name) for name in ("scheduler", "rank 1", "rank 2", "rank 3")]
            os.kill(nodes.rank(victim).number, signal.SIGKILL)
            wait_until(lambda: not any(pid.alive for pid in before), "the group ends")  # noqa: B023
            nodes.wait_serving()
            assert asyncio.run(answers(first.url)) == expected
        before = [nodes.rank(name) for name in ("scheduler", "rank 1", "rank 2", "rank 3")]
        other.process.kill()  # the launcher alone
        wait_until(lambda: not any(pid.alive for pid in before), "the group ends")
        nodes.other = others.enter_context(processes.node(node_rank=1, **flags))
        nodes.wait_serving()
        assert asyncio.run(answers(first.url)) == expected


@contextlib.contextmanager
def namespace() -> Iterator[tuple[str, str, str]]:
    """Makes a network namespace and a link to it. Yields its name, the address on this side, and the name of the interface
    on this side."""
    if shutil.which("ip") is None or os.getuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    number = os.getpid() % 250
    name, here, there = f"mla-{os.getpid()}", f"mla{number}a", f"mla{number}b"
    commands = (
        f"ip netns add {name}",
        f"ip link add {here} type veth peer name {there} netns {name}",
        f"ip addr add 10.211.{number}.1/24 dev {here}",
        f"ip link set {here} up",
        f"ip -n {name} addr add 10.211.{number}.2/24 dev {there}",
        f"ip -n {name} link set {there} up",
        f"ip -n {name} link set lo up",
    )
    try:
        for command in commands:
            done = subprocess.run(command.split(), check=False, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"this machine allows no network namespaces: {done.stderr.strip()}")
        yield name, f"10.211.{number}.1", here
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", here], check=False, capture_output=True)


@pytest.mark.slow
def test_two_machines_and_a_network_that_is_silent(expected: list[tuple[str, str, int]]) -> None:
    with (
        namespace() as (name, address, interface),
        two_nodes(address, ["ip", "netns", "exec", name], watchdog_timeout=4) as nodes,
    ):
        assert asyncio.run(answers(nodes.first.url)) == expected
        listening = {
            found for pid in nodes.first.tree() for found in listening_addresses(pid.number)
        }
        assert listening == {"127.0.0.1", address}
        ranks = [nodes.rank(rank) for rank in ("scheduler", "rank 1")]
        subprocess.run(["ip", "link", "set", interface, "down"], check=True)
        for node, text in (
            (nodes.first, "node 1 (rank 1) is lost: it was silent for 4 s"),
            (nodes.other, "the connection to node 0 is lost: it was silent for 4 s"),
        ):
            wait_until(lambda: text in node.output(), text)  # noqa: B023
        wait_until(lambda: not any(rank.alive for rank in ranks), "both end their ranks")
        subprocess.run(["ip", "link", "set", interface, "up"], check=True)
        nodes.wait_serving()
        assert asyncio.run(answers(nodes.first.url)) == expected

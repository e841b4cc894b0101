"""`launch_server --use-ray` on a Ray cluster of several nodes on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from support import client, processes
from support.processes import LONG_ROUTER_TIMEOUTS, ROOT, Running, healthy_workers, wait_until
from support.procfs import Pid, descendants

pytest.importorskip("ray", reason="needs Ray: requirements.lock has it")

from ray.cluster_utils import Cluster

STREAMS = 6
TOKENS = 200
OURS = ("mla_router", "ray::WorkerActor")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head node and another node, each with one core."""
    with pytest.MonkeyPatch.context() as patch:
        # The workers inherit the environment of their node.
        patch.setenv("PYTHONPATH", str(ROOT / "python"))
        patch.setenv("OMP_NUM_THREADS", "1")
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
        )
        try:
            yield cluster
        finally:
            cluster.shutdown()


@contextlib.contextmanager
def launched(cluster: Cluster, **flags: processes.Flag) -> Iterator[Running]:
    port, base_port = processes.free_ports(2)
    values = {
        "use_ray": True,
        "ray_address": cluster.address,
        "port": port,
        "router_dp_worker_base_port": base_port,
        "device": "cpu",
        **{f"router_{name}": value for name, value in LONG_ROUTER_TIMEOUTS.items()},
    } | flags
    argv = ["-m", "mla_router.launch_server", *processes.to_argv(values)]
    with processes.running(argv, f"http://127.0.0.1:{port}", None) as server:
        yield server


def on_nodes() -> list[Pid]:
    """Returns the actors and workers. The nodes are children of this process, as the servers of other tests are."""
    nodes = [pid for pid in descendants(os.getpid()) if "/raylet/raylet " in pid.command]
    below = [pid for node in nodes for pid in descendants(node.number)]
    return [pid for pid in below if any(name in pid.command for name in OURS)]


def of_nodes(server: Running) -> list[Pid]:
    own = {pid.number for pid in server.tree()} | {server.pid}
    return [pid for pid in on_nodes() if pid.number not in own]


async def text_of_stream(
    http: aiohttp.ClientSession, url: str, number: int, begun: list[int]
) -> str:
    body = {
        "model": "mla-small",
        "prompt": f"Stream number {number} says",
        "max_tokens": TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
    }
    text, at_end = "", False
    async with http.post(url + "/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for event in client.sse_events(response):
            begun.append(number)
            at_end = event == "[DONE]"
            if not at_end:
                text += json.loads(event)["choices"][0]["text"]
    assert at_end, f"stream {number} broke off"
    return text


async def kill_under_streams(url: str, kill: Any) -> None:
    """Calls `kill` when all streams have begun. Their texts are those of the same streams before."""
    async with client.session() as http:

        async def streams(begun: list[int]) -> list[str]:
            return await asyncio.gather(
                *(text_of_stream(http, url, number, begun) for number in range(STREAMS))
            )

        expected = await streams([])
        begun: list[int] = []
        running = asyncio.create_task(streams(begun))
        while len(set(begun)) < STREAMS:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(kill)
        assert await running == expected


@pytest.mark.slow
def test_workers_follow_the_nodes_of_the_cluster(cluster: Cluster) -> None:
    doomed = cluster.add_node(num_cpus=1)
    with launched(cluster, dp_size=3) as server:

        def in_rotation(count: int) -> dict[int, str]:
            def reached() -> dict[int, str] | None:
                assert server.process.poll() is None
                urls = {worker["id"]: worker["url"] for worker in healthy_workers(server.url)}
                return urls if len(urls) == count else None

            return wait_until(reached, f"{count} workers in rotation")

        wait_until(lambda: "listening on" in server.output(), "the router listens")
        in_rotation(2)
        waits = "worker 2 waits for a node with 1 CPU"
        wait_until(lambda: waits in server.output(), "the launcher says that a node is missing")
        wait_until(lambda: server.output().count("Ready: ") == 1, "it is ready")
        cluster.add_node(num_cpus=2)
        before = in_rotation(3)
        for url in before.values():
            assert processes.status_of(f"{url}/v1/models") == 401, "only the router has the key"

        asyncio.run(kill_under_streams(server.url, lambda: cluster.remove_node(doomed, False)))
        wait_until(lambda: "was lost" in server.output(), "Ray reports the death")
        assert "continuing a stream of worker" in server.output()
        assert len(before.keys() & in_rotation(3).keys()) == 2
        for index in range(3):
            assert f"[worker {index}] " in server.output()

        server.process.send_signal(signal.SIGINT)
        assert server.process.wait() == 0
        wait_until(lambda: not of_nodes(server), "nothing is left on the nodes")
        assert "Traceback" not in server.output()


def test_an_address_without_a_cluster_is_one_line() -> None:
    (port,) = processes.free_ports(1)
    flags = ["--use-ray", f"--ray-address=127.0.0.1:{port}"]
    with processes.running(["-m", "mla_router.launch_server", *flags], "", None) as server:
        assert server.process.wait() == 1
        error = f"error: --ray-address 127.0.0.1:{port}: Connection refused; start a node"
        assert server.output().startswith(error)
        assert server.output().count("\n") == 1


def test_a_worker_of_a_node_serves_and_ends_with_the_launcher(cluster: Cluster) -> None:
    with launched(cluster, dp_size=1, cpu_threads=1) as server:
        wait_until(lambda: "listening on" in server.output(), "the router listens")
        wait_until(lambda: healthy_workers(server.url), "a worker in rotation")
        assert any("mla_router scheduler" in pid.command for pid in of_nodes(server))
        body = {"model": "mla-small", "prompt": "one two", "max_tokens": 3, "ignore_eos": True}
        answer = processes.post_json(server.url + "/v1/completions", body)
        assert answer["usage"]["completion_tokens"] == 3
        server.process.kill()
        wait_until(lambda: not of_nodes(server), "nothing is left on the nodes")


@pytest.mark.slow
def test_a_worker_of_two_nodes_serves_and_ends_with_either(cluster: Cluster) -> None:
    doomed = cluster.add_node(num_cpus=3)
    with launched(cluster, dp_size=1, tp_size=2, nnodes=2, cpu_threads=1) as server:

        def worker_is_new(old: set[int]) -> set[int]:
            return {entry["id"] for entry in healthy_workers(server.url)} - old

        wait_until(lambda: "listening on" in server.output(), "the router listens")
        first = wait_until(lambda: worker_is_new(set()), "a worker in rotation")
        body = {"model": "mla-small", "prompt": "one two", "max_tokens": 3, "ignore_eos": True}
        answer = processes.post_json(server.url + "/v1/completions", body)
        assert answer["usage"]["completion_tokens"] == 3
        assert "[worker 0] [rank 1] " in server.output()
        rank = next(pid for pid in of_nodes(server) if "rank 1" in pid.command)
        os.kill(rank.number, signal.SIGKILL)
        wait_until(lambda: worker_is_new(first), "the worker in rotation again")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait() == 0
        wait_until(lambda: not of_nodes(server), "nothing is left on the nodes")
    cluster.remove_node(doomed)

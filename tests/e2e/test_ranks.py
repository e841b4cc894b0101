"""Workers of two ranks behind the router: their answers are those of one rank, and no fault of a rank shows."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator

import aiohttp
import pytest

from support import client, processes
from support.processes import wait_until
from support.procfs import Pid, descendants, listener
from support.streams import Stream, streamed, whole

STREAMS = 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[processes.Running]:
    """Ranks divide the attention, and have whole experts: 16 and replicas of the 2 with the largest load."""
    location = tmp_path_factory.mktemp("experts") / "location.json"
    location.write_text(json.dumps({"logical_count": [[9, 30, 20, 1] + 12 * [8]] * 5}))
    with processes.server(
        dp_size=2,
        tp_size=2,
        ep_size=2,
        init_expert_location=location,
        ep_num_redundant_experts=2,
        enable_expert_distribution_metrics=True,
        router_policy="round_robin",
    ) as server:
        yield server


async def answers(url: str) -> list[tuple[str, str, int]]:
    async with client.session() as http:
        return await asyncio.gather(*(whole(http, url, number) for number in range(STREAMS)))


@pytest.fixture(scope="module")
def expected(small_server: processes.Running) -> list[tuple[str, str, int]]:
    """The answers of workers of one rank."""
    return asyncio.run(answers(small_server.url))


def group_of(worker: str) -> dict[str, Pid]:
    """Returns the processes of a worker's ranks by name: "scheduler" and "rank 1"."""
    found = descendants(listener(int(worker.rpartition(":")[2])))
    return {
        name: pid
        for name in ("scheduler", "rank 1")
        for pid in found
        if f"mla_router {name}" in pid.command
    }


def test_two_ranks_answer_as_one(
    server: processes.Running, expected: list[tuple[str, str, int]]
) -> None:
    groups = [group_of(entry["url"]) for entry in processes.workers(server.url)]
    assert [sorted(group) for group in groups] == [["rank 1", "scheduler"]] * 2
    assert asyncio.run(answers(server.url)) == expected


def test_token_bitmasks_reach_all_ranks(
    server: processes.Running, small_server: processes.Running
) -> None:
    """A rank that samples without them goes on with another token, and changes all later ones."""
    pattern = "[a-f]{12,18}"

    async def texts(url: str) -> list[str]:
        async with client.session() as http:
            return await asyncio.gather(*(text(http, url, seed) for seed in range(4)))

    async def text(http: aiohttp.ClientSession, url: str, seed: int) -> str:
        body = {"prompt": "It is", "regex": pattern, "seed": seed, "max_tokens": 40}
        async with http.post(url + "/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        found: str = answer["choices"][0]["text"]
        return found

    found = asyncio.run(texts(server.url))
    assert found == asyncio.run(texts(small_server.url))
    assert all(re.fullmatch(pattern, one) for one in found) and len(set(found)) > 1


def test_the_load_of_the_ranks_is_shown(server: processes.Running) -> None:
    async def balancedness() -> float:
        async with client.session() as http, http.get(url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        values = [line.split()[-1] for line in lines if line.startswith("sglang:eplb_balancedness")]
        return float(values[0]) if values else 0.0

    url = processes.workers(server.url)[0]["url"]
    processes.post_json(url + "/v1/completions", {"prompt": "It is", "max_tokens": 20})
    wait_until(lambda: 0.5 < asyncio.run(balancedness()) <= 1, "the balancedness is known")


@pytest.mark.parametrize(
    ("victim", "fault"),
    [
        ("rank 1", signal.SIGSTOP),
        ("rank 1", signal.SIGKILL),
        ("scheduler", signal.SIGKILL),
    ],
)
def test_streams_survive_a_fault_of_a_rank(
    server: processes.Running,
    expected: list[tuple[str, str, int]],
    victim: str,
    fault: signal.Signals,
) -> None:
    url = processes.workers(server.url)[0]["url"]
    group = group_of(url)

    async def interrupted() -> list[tuple[str, str | None, int]]:
        async with client.session() as http:
            streams = [Stream() for _ in range(STREAMS)]
            asked = [
                asyncio.create_task(streamed(http, server.url, number, stream))
                for number, stream in enumerate(streams)
            ]
            await asyncio.gather(*(stream.has_begun.wait() for stream in streams))
            os.kill(group[victim].number, fault)
            try:
                return await asyncio.gather(*asked)
            finally:
                if fault is signal.SIGSTOP:
                    os.kill(group[victim].number, signal.SIGCONT)

    assert asyncio.run(interrupted()) == expected
    if fault is signal.SIGKILL:
        wait_until(lambda: not any(pid.alive for pid in group.values()), "the group ends")
    wait_until(lambda: processes.status_of(url + "/health") == 200, "the worker is back")
    wait_until(lambda: len(processes.healthy_workers(server.url)) == 2, "it is in rotation")
    assert (group_of(url) == group) == (fault is signal.SIGSTOP)

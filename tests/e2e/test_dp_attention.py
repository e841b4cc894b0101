"""DP ranks behind the router: their answers are those of one rank, and a group that loses a rank comes back."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from support import client, processes
from support.processes import wait_until
from support.procfs import Pid, descendants
from support.streams import TOKENS, Stream, streamed, whole

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["cat", "dog"]}, "legs": {"type": "integer"}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
DP_2: dict[str, processes.Flag] = {"enable_dp_attention": True, "tp_size": 2, "ep_size": 2}


@pytest.fixture(scope="module")
def group() -> Iterator[processes.Running]:
    with processes.server(
        dp_size=2, router_policy="round_robin", moe_a2a_backend="direct", **DP_2
    ) as server:
        yield server


def random_bodies(seed: int, count: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    bodies = []
    for number in range(count):
        text = f"Number {number % 3} of a list that goes on: " * rng.choice((1, 2, 30))
        body = {"prompt": text + str(number), "max_tokens": rng.randint(1, 40), "seed": number}
        body |= rng.choice(({}, {"n": 2}, {"logprobs": 2}, {"ignore_eos": True}))
        body["temperature"] = rng.choice((0.0, 0.8))
        if number % 4 == 1:
            schema = {"name": "animal", "schema": SCHEMA}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        bodies.append(body)
    return bodies


async def answers(url: str, bodies: list[dict[str, Any]], seed: int | None = None) -> list[Any]:
    """Returns the texts. With a `seed`, requests arrive at random times between others that leave early."""
    rng = random.Random(seed)

    async def leave(http: aiohttp.ClientSession) -> None:
        body = {"prompt": "It is", "max_tokens": 500, "ignore_eos": True, "stream": True}
        async with http.post(url + "/v1/completions", json=body) as response:
            await response.content.readline()

    async def text(http: aiohttp.ClientSession, body: dict[str, Any]) -> Any:
        if seed is not None:
            await asyncio.sleep(rng.choice((0.0, 0.1, 0.5)))
            if rng.random() < 0.3:
                await leave(http)
        async with http.post(url + "/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        return [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]

    async with client.session() as http:
        return await asyncio.gather(*(text(http, body) for body in bodies))


def compare(url: str, alone: str, seed: int, count: int) -> None:
    bodies = random_bodies(seed, count)
    assert asyncio.run(answers(url, bodies, seed)) == asyncio.run(answers(alone, bodies))


def schedulers(server: processes.Running) -> list[Pid]:
    return [pid for pid in descendants(server.pid) if "mla_router scheduler" in pid.command]


def test_dp_ranks_answer_as_one(group: processes.Running, small_worker: str) -> None:
    compare(group.url, small_worker, seed=5, count=16)
    busy = [
        processes.get_json(one["url"] + "/get_server_info") for one in processes.workers(group.url)
    ]
    assert [info["attn_dp_rank"] for info in busy] == [0, 1]
    assert all(info["scheduler"]["generated_tokens"] > 0 for info in busy)


def test_a_worker_names_its_dp_rank(group: processes.Running) -> None:
    for rank, worker in enumerate(processes.workers(group.url)):
        url = worker["url"]
        assert processes.get_json(url + "/health")["dp_rank"] == rank
        assert processes.get_json(url + "/v1/models")["data"][0]["dp_rank"] == rank
        assert processes.get_json(url + "/get_load")[0]["dp_rank"] == rank
        label = f'dp_rank="{rank}"'

        async def metrics(url: str = url) -> str:
            async with client.session() as http, http.get(url + "/metrics") as answer:
                return await answer.text()

        lines = [line for line in asyncio.run(metrics()).splitlines() if "num_running_reqs" in line]
        assert label in lines[-1], lines


def test_flushes_do_not_disturb_steps(group: processes.Running, small_worker: str) -> None:
    async def both() -> tuple[Any, Any]:
        bodies = random_bodies(9, 6)
        urls = [worker["url"] for worker in processes.workers(group.url)]

        async def flush() -> None:
            async with client.session() as http:
                for number in range(10):
                    async with http.post(urls[number % 2] + "/flush_cache") as answer:
                        assert answer.status == 200
                    await asyncio.sleep(0.05)

        found, _ = await asyncio.gather(answers(group.url, bodies), flush())
        return found, await answers(small_worker, bodies)

    found, expected = asyncio.run(both())
    assert found == expected


async def refusal(url: str) -> tuple[int, str]:
    body = {"prompt": "It is", "max_tokens": 1}
    async with client.session() as http, http.post(url + "/v1/completions", json=body) as answer:
        return answer.status, (await answer.json())["error"]["code"]


def test_all_dp_ranks_are_unhealthy_while_one_is_stopped(group: processes.Running) -> None:
    urls = [worker["url"] for worker in processes.workers(group.url)]
    stopped = schedulers(group)[1].number
    os.kill(stopped, signal.SIGSTOP)
    try:
        for url in urls:
            wait_until(lambda url=url: processes.status_of(url + "/health") == 503, "it says 503")
            assert asyncio.run(refusal(url)) == (503, "stuck")
    finally:
        os.kill(stopped, signal.SIGCONT)
    for url in urls:
        wait_until(lambda url=url: processes.status_of(url + "/health") == 200, "it says 200")
    wait_until(lambda: len(processes.healthy_workers(group.url)) == 2, "in rotation")


@pytest.mark.slow
def test_a_killed_rank_ends_the_group_and_streams_go_on(
    group: processes.Running, small_worker: str
) -> None:
    """Streams continue on a worker outside the group. The group starts again by itself."""
    urls = [worker["url"] for worker in processes.workers(group.url)]

    async def interrupted(url: str, victim: Pid) -> list[Any]:
        async with client.session() as http:
            streams = [Stream() for _ in range(4)]
            asked = [
                asyncio.create_task(streamed(http, url, number, stream))
                for number, stream in enumerate(streams)
            ]
            await asyncio.gather(*(stream.has_begun.wait() for stream in streams))
            os.kill(victim.number, signal.SIGKILL)
            return await asyncio.gather(*asked)

    async def expected() -> list[Any]:
        async with client.session() as http:
            return await asyncio.gather(*(whole(http, small_worker, n) for n in range(4)))

    before = schedulers(group)
    assert len(before) == 2 and TOKENS > 100
    with processes.router([*urls, small_worker], policy="round_robin") as router:
        found = asyncio.run(interrupted(router.url, before[1]))
        assert json.dumps(found) == json.dumps(asyncio.run(expected()))
    wait_until(lambda: not any(pid.alive for pid in before), "the group ends")
    wait_until(lambda: all(processes.status_of(url + "/health") == 200 for url in urls), "back")
    wait_until(lambda: len(processes.healthy_workers(group.url)) == 2, "in rotation")
    assert not set(schedulers(group)) & set(before)
    compare(group.url, small_worker, seed=6, count=4)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
def test_200_random_requests(small_worker: str, policy: str) -> None:
    """Of two DP ranks with two ranks each. A third of the clients also leaves another request early."""
    flags = DP_2 | {"tp_size": 4, "ep_size": 4}
    with processes.server(dp_size=2, router_policy=policy, **flags) as server:
        compare(server.url, small_worker, seed=7, count=200)
        wait_until(lambda: not any(map(running, processes.workers(server.url))), "all have ended")


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts_change_no_answer(small_worker: str, drafts: int) -> None:
    """Of two DP ranks with two ranks each, whose steps are of prompts, of drafts, or idle."""
    nextn = {"speculative_algorithm": "NEXTN", "speculative_num_steps": drafts}
    flags = DP_2 | {"tp_size": 4, "ep_size": 4} | nextn
    with processes.server(dp_size=2, router_policy="round_robin", **flags) as server:
        compare(server.url, small_worker, seed=8, count=60)
        for one in processes.workers(server.url):
            stats = processes.get_json(one["url"] + "/get_server_info")["scheduler"]
            assert stats["accepted_tokens"] > 0, stats


def running(worker: dict[str, Any]) -> int:
    stats = processes.get_json(worker["url"] + "/get_server_info")["scheduler"]
    return int(stats["running"] + stats["waiting"])

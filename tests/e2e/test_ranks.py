"""Workers of two ranks behind the router: their answers are those of one rank, and no fault of a rank shows."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest

from support import client, processes
from support.processes import wait_until
from support.procfs import Pid, descendants, listener
from support.streams import answers, interrupted

STREAMS = 4
# Of every kind, sent at once
BODIES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 0.9, "seed": 6, "n": 2, "top_p": 0.8},
    {"stop": [" is"]},
    {"logprobs": True, "top_logprobs": 2},
    {"frequency_penalty": 0.5},
    {"min_tokens": 12, "logit_bias": {"40": 3}},
    {"response_format": {"type": "json_object"}},
]

Answer = tuple[str, str | None, int]
Flags = dict[str, processes.Flag]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Flags:
    """Returns flags: ranks divide the attention, and have whole experts: 16 and replicas of the 2 with the largest load. They
    draft tokens with the model's own layer."""
    location = tmp_path_factory.mktemp("experts") / "location.json"
    location.write_text(json.dumps({"logical_count": [[9, 30, 20, 1] + 12 * [8]] * 5}))
    return {
        "tp_size": 2,
        "ep_size": 2,
        "init_expert_location": location,
        "ep_num_redundant_experts": 2,
        "enable_expert_distribution_metrics": True,
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": 2,
    }


@pytest.fixture(scope="module")
def worker(ranks: Flags) -> Iterator[processes.Running]:
    with processes.worker(**ranks) as worker:
        yield worker


@pytest.fixture(scope="module")
def expected(small_worker: str) -> list[Answer]:
    """The answers of a worker of one rank."""
    return asyncio.run(answers(small_worker, STREAMS))


def group_of(worker: str) -> dict[str, Pid]:
    """Returns the processes of a worker's ranks by name: "scheduler" and "rank 1"."""
    found = descendants(listener(int(worker.rpartition(":")[2])))
    return {
        name: pid
        for name in ("scheduler", "rank 1")
        for pid in found
        if f"mla_router {name}" in pid.command
    }


async def with_fault(url: str, victim: Pid, fault: signal.Signals) -> list[Answer]:
    """`interrupted`, behind which a stopped process goes on."""
    try:
        return await interrupted(url, STREAMS, victim, fault)
    finally:
        if fault is signal.SIGSTOP:
            os.kill(victim.number, signal.SIGCONT)


def test_two_ranks_answer_as_one(worker: processes.Running, expected: list[Answer]) -> None:
    assert sorted(group_of(worker.url)) == ["rank 1", "scheduler"]
    assert asyncio.run(answers(worker.url, STREAMS)) == expected
    (state,) = processes.get_json(worker.url + "/get_server_info")["internal_states"]
    assert state["accepted_tokens"] > 20


def chats(url: str) -> list[Any]:
    def answer(fields: dict[str, Any]) -> Any:
        content = "Answer in one word: is Ann older than Bob, if Ann is 31 and Bob is 29?"
        message = {"role": "user", "content": content}
        body = {"model": "mla-small", "messages": [message], "max_tokens": 24, "temperature": 0}
        got = processes.post_json(url + "/v1/chat/completions", body | fields)
        tokens = [
            [part["token"] for part in (choice["logprobs"] or {}).get("content", [])]
            for choice in got["choices"]
        ]
        texts = [
            (choice["message"]["content"], choice["finish_reason"]) for choice in got["choices"]
        ]
        return texts, tokens, got["usage"]["completion_tokens"]

    with ThreadPoolExecutor(len(BODIES)) as pool:
        return list(pool.map(answer, BODIES))


def test_drafts_change_no_answer(worker: processes.Running, small_worker: str) -> None:
    def accepted() -> int:
        (state,) = processes.get_json(worker.url + "/get_server_info")["internal_states"]
        assert 1 < state["avg_spec_accept_length"] <= 3
        return int(state["accepted_tokens"])

    before = accepted()
    assert chats(worker.url) == chats(small_worker)
    assert accepted() - before > 20


def test_token_bitmasks_reach_all_ranks(worker: processes.Running, small_worker: str) -> None:
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

    found = asyncio.run(texts(worker.url))
    assert found == asyncio.run(texts(small_worker))
    assert all(re.fullmatch(pattern, one) for one in found) and len(set(found)) > 1


def test_the_load_of_the_ranks_is_shown(worker: processes.Running) -> None:
    async def balancedness() -> float:
        async with client.session() as http, http.get(worker.url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        values = [line.split()[-1] for line in lines if line.startswith("sglang:eplb_balancedness")]
        return float(values[0]) if values else 0.0

    processes.post_json(worker.url + "/v1/completions", {"prompt": "It is", "max_tokens": 20})
    wait_until(lambda: 0.5 < asyncio.run(balancedness()) <= 1, "the balancedness is known")


def test_streams_survive_the_faults_of_a_rank(
    worker: processes.Running, small_worker: str, expected: list[Answer]
) -> None:
    """Rank 1 is stopped, goes on, and is killed. Then the worker ends."""
    urls = [worker.url, small_worker]
    with processes.router(urls, policy="round_robin") as router:
        group = group_of(worker.url)
        for fault in (signal.SIGSTOP, signal.SIGKILL):
            wait_until(lambda: processes.status_of(worker.url + "/health") == 200, "it is healthy")
            wait_until(lambda: len(processes.healthy_workers(router.url)) == 2, "it is in rotation")
            assert group_of(worker.url) == group
            assert asyncio.run(with_fault(router.url, group["rank 1"], fault)) == expected
        wait_until(lambda: not any(pid.alive for pid in group.values()), "the group ends")
        assert worker.process.wait() == 3


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank 1", "scheduler"])
def test_a_killed_group_is_started_again(ranks: Flags, expected: list[Answer], victim: str) -> None:
    with processes.server(dp_size=2, router_policy="round_robin", **ranks) as server:
        url = processes.workers(server.url)[0]["url"]
        group = group_of(url)
        assert asyncio.run(with_fault(server.url, group[victim], signal.SIGKILL)) == expected
        wait_until(lambda: not any(pid.alive for pid in group.values()), "the group ends")
        wait_until(lambda: processes.status_of(url + "/health") == 200, "the worker is back")
        wait_until(lambda: len(processes.healthy_workers(server.url)) == 2, "it is in rotation")
        assert not set(group_of(url).values()) & set(group.values())

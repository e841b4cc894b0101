"""A client that leaves at any time: its requests are aborted exactly once."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import aiohttp
import pytest

from support.client import sse_events
from support.fake_worker import FakeWorker, script
from support.processes import get_json, post_json, wait_until

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "mla-small",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 500,
    },
    "/v1/completions": {"model": "mla-small", "prompt": ["a", "b"], "max_tokens": 500},
    "/v1/responses": {"model": "mla-small", "input": "a", "max_output_tokens": 500},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 500},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 500}},
}


def running(worker: FakeWorker) -> int:
    info = get_json(worker.url + "/get_server_info")
    count: int = info["scheduler"]["running"]
    return count


def wait_idle(worker: FakeWorker) -> None:
    wait_until(lambda: running(worker) == 0, "the scheduler has nothing to do")


def assert_each_ended_once(worker: FakeWorker, rids: set[str]) -> None:
    aborts = Counter(fields[0] for fields in worker.received("Abort"))
    assert {rid: aborts[rid] for rid in rids} == dict.fromkeys(rids, 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_after", [0, 2])
@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves(worker: FakeWorker, path: str, hold_after: int, stream: bool) -> None:
    """The client leaves before or after the first token, with and without streaming."""
    seen_before = {fields[0] for fields in worker.received("Generate")}
    body = BODIES[path] | {"stream": stream, "cache_salt": script(hold_after=hold_after)}

    async def leave() -> set[str]:
        async with aiohttp.ClientSession() as http:
            asking = asyncio.create_task(http.post(worker.url + path, json=body))
            if stream and hold_after:
                response = await asking
                await anext(sse_events(response))
            prompts = 2 if path == "/v1/completions" else 1
            while True:
                rids = {fields[0] for fields in worker.received("Generate")} - seen_before
                if len(rids) == prompts:
                    break
                await asyncio.sleep(0.01)
            asking.cancel()
            return rids

    rids = asyncio.run(leave())
    wait_idle(worker)
    assert_each_ended_once(worker, rids)


def test_many_clients_leave_at_random_moments(worker: FakeWorker) -> None:
    rng = random.Random(0)
    seen_before = {fields[0] for fields in worker.received("Generate")}

    def arrived() -> set[str]:
        return {fields[0] for fields in worker.received("Generate")} - seen_before

    async def visit(http: aiohttp.ClientSession, longest: float) -> None:
        path = rng.choice(list(BODIES))
        body = BODIES[path] | {"stream": rng.random() < 0.5}
        patience = rng.random() * longest
        try:
            async with asyncio.timeout(patience):
                async with http.post(worker.url + path, json=body) as response:
                    await response.read()
        except TimeoutError:
            pass

    async def visits(longest: float) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            await asyncio.gather(*(visit(http, longest) for _ in range(200)))

    longest = 0.2
    while not (rids := arrived()):  # on a busy machine some may not arrive
        asyncio.run(visits(longest))
        wait_idle(worker)
        longest *= 2
    aborts = Counter(fields[0] for fields in worker.received("Abort"))
    assert all(aborts[rid] <= 1 for rid in rids)


def test_abort_by_the_clients_own_name(worker: FakeWorker) -> None:
    body = BODIES["/generate"] | {"rid": "mine", "cache_salt": script(hold_after=1)}

    async def run() -> tuple[list[Any], dict[str, Any], int]:
        async with (
            aiohttp.ClientSession(base_url=worker.url) as http,
            http.post("/generate", json=body | {"stream": True}) as response,
        ):
            events = sse_events(response)
            await anext(events)
            async with http.post("/generate", json=body) as second:
                status = second.status
            for name in ("min", "mine2", "", "m"):
                async with http.post("/abort_request", json={"rid": name}) as nothing:
                    assert await nothing.json() == {"aborted": 0}
            async with http.post("/abort_request", json={"rid": "mine"}) as answer:
                aborted = await answer.json()
            return [event async for event in events], aborted, status

    events, aborted, status = asyncio.run(run())
    assert status == 400, "a name that is running was taken again"
    assert aborted == {"aborted": 1}
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["meta_info"]["finish_reason"]["type"] == "abort"
    wait_idle(worker)
    assert post_json(worker.url + "/abort_request", {"rid": "mine"}) == {"aborted": 0}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_abort_before_the_logprobs_of_the_prompt(worker: FakeWorker, path: str) -> None:
    body = BODIES[path] | {
        "rid": "early",
        "prompt_logprobs": 1,
        "cache_salt": script(hold_after=0),
    }
    if path == "/v1/completions":
        body["prompt"] = "a b"

    async def run() -> tuple[int, Any]:
        async with aiohttp.ClientSession(base_url=worker.url) as http:
            asking = asyncio.create_task(http.post(path, json=body))
            aborted = 0
            while not aborted:
                async with http.post("/abort_request", json={"rid": "early"}) as answer:
                    aborted = (await answer.json())["aborted"]
            async with await asking as response:
                return response.status, await response.json()

    status, answer = asyncio.run(run())
    (choice,) = answer["choices"]
    assert (status, choice["finish_reason"]) == (200, "abort")
    holder = choice if path == "/v1/completions" else answer
    assert holder["prompt_logprobs"] is None


def test_abort_by_openais_id(worker: FakeWorker) -> None:
    body = BODIES["/v1/completions"] | {"stream": True, "cache_salt": script(hold_after=1)}

    async def run() -> list[str]:
        async with (
            aiohttp.ClientSession(base_url=worker.url) as http,
            http.post("/v1/completions", json=body) as response,
        ):
            events = sse_events(response)
            first = json.loads(await anext(events))
            async with http.post("/abort_request", json={"rid": first["id"]}) as answer:
                assert await answer.json() == {"aborted": 2}
            return [event async for event in events]

    *events, done = asyncio.run(run())
    assert done == "[DONE]"
    reasons = [json.loads(event)["choices"][0]["finish_reason"] for event in events]
    assert reasons.count("abort") == 2
    wait_idle(worker)


PREFIX = {
    "/v1/chat/completions": "chatcmpl-",
    "/v1/completions": "cmpl-",
    "/v1/responses": "resp_",
    "/v1/messages": "msg_",
}


@pytest.mark.parametrize("path", PREFIX)
@pytest.mark.parametrize("spelled", ["rid", "request_id", "X-Request-Id"])
def test_abort_by_the_id_that_the_client_chose(worker: FakeWorker, path: str, spelled: str) -> None:
    """SGLang returns `rid` as the id of the answer; vLLM returns the request's id after its prefix."""
    body = BODIES[path] | {"stream": True, "cache_salt": script(hold_after=1)}
    headers = {"X-Request-Id": "my-trace.1"}
    if spelled != "X-Request-Id":
        body[spelled] = "my.name"
    shown = {
        "rid": "my.name",
        "request_id": PREFIX[path] + "my.name",
        "X-Request-Id": PREFIX[path] + "my-trace.1",
    }[spelled]

    async def run() -> tuple[int, int]:
        async with (
            aiohttp.ClientSession(base_url=worker.url) as http,
            http.post(path, json=body, headers=headers) as response,
        ):
            assert response.headers["x-request-id"] == "my-trace.1"
            events = sse_events(response)
            first = json.loads(await anext(events))
            assert (first.get("response") or first.get("message") or first)["id"] == shown
            counts = []
            for name in (shown + "x", shown):
                async with http.post("/abort_request", json={"rid": name}) as answer:
                    counts.append((await answer.json())["aborted"])
            ended = [json.loads(event) async for event in events if event != "[DONE]"]
            if path == "/v1/responses":
                assert ended[-1]["type"] == "response.incomplete"
            elif path == "/v1/messages":
                assert ended[-2]["delta"]["stop_reason"] is None
            else:
                reasons = [event["choices"][0]["finish_reason"] for event in ended]
                assert reasons.count("abort") == counts[1]
            return counts[0], counts[1]

    assert asyncio.run(run()) == (0, 2 if path == "/v1/completions" else 1)
    wait_idle(worker)


def test_a_trace_may_have_several_requests(worker: FakeWorker) -> None:
    body = BODIES["/v1/chat/completions"] | {"stream": True, "cache_salt": script(hold_after=1)}

    async def run() -> int:
        async with aiohttp.ClientSession(
            base_url=worker.url, headers={"X-Request-Id": "shared"}
        ) as http:
            responses = [await http.post("/v1/chat/completions", json=body) for _ in range(3)]
            assert [response.status for response in responses] == [200] * 3
            async with http.post("/abort_request", json={"rid": "chatcmpl-shared"}) as answer:
                count: int = (await answer.json())["aborted"]
            for response in responses:
                await response.read()
            return count

    assert asyncio.run(run()) == 3
    wait_idle(worker)


def test_abort_all(worker: FakeWorker) -> None:
    body = BODIES["/generate"] | {"stream": True, "cache_salt": script(hold_after=1)}

    async def run() -> int:
        async with aiohttp.ClientSession(base_url=worker.url) as http:
            responses = [await http.post("/generate", json=body) for _ in range(3)]
            async with http.post("/abort_request", json={"abort_all": True}) as answer:
                count: int = (await answer.json())["aborted"]
            for response in responses:
                await response.read()
            return count

    assert asyncio.run(run()) == 3
    wait_idle(worker)

"""Flags that set the fields which a request omits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from support import client
from support.fake_worker import FakeWorker, fake_worker, script
from support.processes import post_json

MESSAGES = [{"role": "user", "content": "a"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4, "ignore_eos": True},
    "/v1/completions": {"prompt": "a", "max_tokens": 4, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def usual() -> Iterator[FakeWorker]:
    with fake_worker(
        stream_response_default_include_usage=True, return_tokens_as_token_ids=True
    ) as worker:
        yield worker


@pytest.fixture(scope="module")
def forced() -> Iterator[FakeWorker]:
    with fake_worker(enable_force_include_usage=True) as worker:
        yield worker


def chunks(worker: FakeWorker, path: str, **fields: Any) -> list[Any]:
    body = BODIES[path] | {"stream": True, "cache_salt": script(say=[300])} | fields

    async def run() -> list[str]:
        async with (
            client.session() as http,
            http.post(worker.url + path, json=body) as response,
        ):
            assert response.status == 200, await response.text()
            return [event async for event in client.sse_events(response)]

    *events, done = asyncio.run(run())
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


@pytest.mark.parametrize("path", BODIES)
def test_usage_at_the_end_unless_the_request_says_no(usual: FakeWorker, path: str) -> None:
    *others, last = chunks(usual, path)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in others)
    options = {"include_usage": False}
    assert not any(chunk.get("usage") for chunk in chunks(usual, path, stream_options=options))
    assert post_json(usual.url + path, BODIES[path])["usage"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("options", [None, {"include_usage": False}])
def test_usage_in_each_chunk(forced: FakeWorker, path: str, options: Any) -> None:
    counts = [
        chunk["usage"]["completion_tokens"]
        for chunk in chunks(forced, path, stream_options=options)
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 4


@pytest.mark.parametrize("asked", [None, True, False])
def test_tokens_by_their_ids(usual: FakeWorker, asked: bool | None) -> None:
    body = BODIES["/v1/completions"] | {"logprobs": 0, "return_tokens_as_token_ids": asked}
    answer = post_json(usual.url + "/v1/completions", body | {"cache_salt": script(say=[300])})
    tokens = answer["choices"][0]["logprobs"]["tokens"]
    assert [token == "token_id:300" for token in tokens] == [asked is not False] * 4

"""The times that `--enable-per-request-metrics` tells of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from mla_router.worker.server.requests.timing import Timing
from support import client
from support.fake_worker import FakeWorker, fake_worker, script
from support.processes import post_json

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": ["a", "b"]},
}


def test_of_one_choice() -> None:
    # 2 s in the queue, 1 s for the prompt, 3 s for 6 more tokens
    timing = Timing.of(begun=10.0, queued=2.0, first=13.0, last=16.0, tokens=7, choices=1)
    assert timing == Timing(
        queue_time_ms=2000,
        time_to_first_token_ms=1000,
        generation_time_ms=3000,
        mean_itl_ms=500,
        tokens_per_second=7 / 4,
    )


def test_of_several_choices() -> None:
    timing = Timing.of(begun=0.0, queued=0.0, first=1.0, last=3.0, tokens=10, choices=2)
    assert timing.mean_itl_ms == 500, "each has five tokens, and so four gaps"
    single = Timing.of(begun=0.0, queued=0.0, first=1.0, last=1.0, tokens=2, choices=2)
    assert single.mean_itl_ms is msgspec.UNSET
    assert single.tokens_per_second == 2


def test_a_queue_that_seems_to_end_behind_the_first_token() -> None:
    timing = Timing.of(begun=0.0, queued=1.5, first=1.0, last=1.0, tokens=1, choices=1)
    assert (timing.time_to_first_token_ms, timing.tokens_per_second) == (0.0, 0.0)


@pytest.fixture(scope="module")
def telling() -> Iterator[FakeWorker]:
    with fake_worker(enable_per_request_metrics=True) as worker:
        yield worker


@pytest.mark.parametrize("path", BODIES)
def test_in_answers_if_the_flag_asks_for_it(
    worker: FakeWorker, telling: FakeWorker, path: str
) -> None:
    body = BODIES[path] | {"max_tokens": 4, "cache_salt": script(say=[300])}
    assert "metrics" not in post_json(worker.url + path, body)
    metrics = post_json(telling.url + path, body)["metrics"]
    assert set(metrics) == set(Timing.__struct_fields__)
    assert all(value >= 0 for value in metrics.values())

    async def run() -> list[str]:
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with (
            client.session() as http,
            http.post(telling.url + path, json=asked) as response,
        ):
            return [event async for event in client.sse_events(response)]

    *others, last, done = asyncio.run(run())
    assert done == "[DONE]"
    assert set(json.loads(last)["metrics"]) == set(Timing.__struct_fields__)
    assert not any("metrics" in json.loads(event) for event in others)

"""--stream-interval sends several tokens in an event, and the same answer."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

from mla_router.worker.generation import Logprobs
from mla_router.worker.messages import Delta
from mla_router.worker.server.errors import Unavailable
from mla_router.worker.server.ipc.mailbox import Mailbox, make_mailbox, merge
from support.fake_worker import fake_worker, script
from support.processes import EVENT_TIMEOUT_S

TOKENS = list(range(300, 311))


def delta(token: int, reason: str = "") -> Delta:
    return Delta("a", [token], Logprobs([-float(token)], [[token]], [[-1.0]]), 3, reason)


async def taken(mailbox: Mailbox, deltas: list[tuple[int, Delta]]) -> list[list[tuple[int, Delta]]]:
    """Returns the deltas of a reader that is never behind."""
    pieces = []
    for index, one in deltas:
        reading = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.put(index, one)
        for _ in range(3):
            await asyncio.sleep(0)
        if reading.done():
            pieces.append(reading.result())
        else:
            reading.cancel()
    return pieces


def test_the_first_the_last_and_every_so_many_between() -> None:
    deltas = [(0, delta(token)) for token in range(10)] + [(0, delta(10, "stop"))]
    pieces = asyncio.run(taken(make_mailbox(4), deltas))
    assert [[one.token_ids for _, one in piece] for piece in pieces] == [
        [[0]], [[1, 2, 3, 4]], [[5, 6, 7, 8]], [[9, 10]],
    ]  # fmt: skip
    ((_, last),) = pieces[-1]
    assert last.finish_reason == "stop"
    assert last.logprobs == Logprobs([-9.0, -10.0], [[9], [10]], [[-1.0], [-1.0]])
    assert [len(piece) for piece in asyncio.run(taken(make_mailbox(1), deltas))] == [1] * 11


def test_prompts_of_a_batch_come_together() -> None:
    deltas = [(index, delta(token)) for token in range(3) for index in (0, 1)]
    pieces = asyncio.run(taken(make_mailbox(2), deltas))
    assert [[(index, one.token_ids) for index, one in piece] for piece in pieces] == [
        [(0, [0])], [(1, [0])], [(0, [1, 2]), (1, [1])],
    ]  # fmt: skip


def test_a_merged_delta_has_the_fields_of_both_ends() -> None:
    first = Delta("a", [1], None, 3, "", "", Logprobs([-1.0]), 0.5, accepted=1)
    last = Delta("a", [2, 3], None, 0, "error", "broken", accepted=4)
    assert merge([first, last]) == Delta(
        "a", [1, 2, 3], None, 3, "error", "broken", Logprobs([-1.0]), 0.5, accepted=4
    )


def test_held_tokens_precede_an_error() -> None:
    async def run() -> None:
        mailbox = make_mailbox(8)
        for token in range(3):
            mailbox.put(0, delta(token))
        mailbox.fail(Unavailable("gone"))
        ((_, held),) = await mailbox.take()
        assert held.token_ids == [0, 1, 2]
        try:
            await mailbox.take()
        except Unavailable:
            return
        raise AssertionError("no error")

    asyncio.run(run())


def streamed(url: str, **fields: Any) -> tuple[list[int], list[Any], str]:
    """Returns the tokens of each event, their logprobs, and the text of an answer of 11 tokens."""
    body = {
        "model": "mla-small", "prompt": [1, 2], "max_tokens": len(TOKENS), "stream": True,
        "logprobs": 1, "cache_salt": script(say=TOKENS), **fields,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=EVENT_TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    logprobs = [choice["logprobs"]["token_logprobs"] for choice in choices]
    sizes = [len(values) for values in logprobs if values]
    return (
        sizes,
        [value for values in logprobs for value in values],
        "".join(choice["text"] for choice in choices),
    )


def test_an_answer_is_the_same_in_fewer_events() -> None:
    with fake_worker() as worker:
        sizes, *expected = streamed(worker.url)
        asked_sizes, *asked = streamed(worker.url, stream_interval=4)
    assert sizes == [1] * len(TOKENS)
    assert len(asked_sizes) <= 4, "a request may ask for it as well"
    assert asked == expected
    with fake_worker(stream_interval=4) as worker:
        sizes, *answer = streamed(worker.url)
        assert streamed(worker.url, stream_interval=1)[0] == [1] * len(TOKENS)
    assert len(sizes) <= 4
    assert answer == expected

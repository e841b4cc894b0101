"""Streams of /v1/responses that break at any event continue with the same bytes, each event once.

tests/server/requests/test_replay.py has the tests for all kinds of streams.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from typing import Any

import aiohttp
import pytest
import tokenizers

from support import client
from support.fake_worker import FakeWorker, script
from support.replay import Event, Stream, check_every_cut, events_of, stream

PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]
CALL = '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Zürich 😀"}<｜tool▁call▁end｜>'
CALLS = f"<｜tool▁calls▁begin｜>{CALL}{CALL}<｜tool▁calls▁end｜>"
THINKING = {"chat_template_kwargs": {"thinking": True}}
EVERYTHING = "Hm. Well 😀.</think>\n\nI look. " + CALLS

# The text of the model, and further fields of the request.
ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("Hello 😀 for 日本語", {}),
    "everything": (EVERYTHING, {"tools": TOOLS} | THINKING),
    "only reasoning": ("Hm. Well 😀.", THINKING),
    "one call of two": (CALLS, {"tools": TOOLS, "parallel_tool_calls": False}),
    "a cut call": (EVERYTHING, {"tools": TOOLS, "max_output_tokens": 60} | THINKING),
    "a stop string": ("Hello 😀 for END 😀 of 日本語", {"stop": "D 😀 o"}),
    "nothing": ("", {}),
}
# The number of tokens in a delta, on the worker that breaks and on those that continue.
BURSTS = [(1, 1), (1, 7), (7, 1), (5, 1000)]
COMPLETED_AT = re.compile(r'"completed_at":\d+')


def without_times(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.name, COMPLETED_AT.sub("", event.data)) for event in events]


def body_of(
    worker: FakeWorker, backend: tokenizers.Tokenizer, answer: str, burst: int = 1, **extra: Any
) -> dict[str, Any]:
    said, fields = ANSWERS[answer]
    ids = backend.encode(said, add_special_tokens=False).ids
    salt = worker.say([*ids, 1], burst=burst, cached=2, **extra)  # 1: the EOS token
    return {"model": "deepseek", "input": "Hello!", "cache_salt": salt} | fields


@pytest.mark.parametrize("bursts", BURSTS, ids=lambda pair: f"{pair[0]}, then {pair[1]}")
@pytest.mark.parametrize("answer", ANSWERS)
def test_every_cut(
    deepseek_worker: FakeWorker,
    backend: tokenizers.Tokenizer,
    answer: str,
    bursts: tuple[int, int],
) -> None:
    url = deepseek_worker.url + PATH
    first, later = (body_of(deepseek_worker, backend, answer, burst) for burst in bursts)

    ends = ("response.completed", "response.incomplete")
    asyncio.run(check_every_cut(url, first, later, without_times, ends))


def test_the_sequence_numbers_have_no_gap(
    deepseek_worker: FakeWorker, backend: tokenizers.Tokenizer
) -> None:
    async def run() -> None:
        async with client.session() as http:
            kinds = []
            for burst in (1, 3, 1000):
                body = body_of(deepseek_worker, backend, "everything", burst)
                events = (await stream(http, deepseek_worker.url + PATH, body)).events
                numbers = [event.body["sequence_number"] for event in events]
                assert numbers == list(range(len(events)))
                kinds.append([(event.name, event.body.get("delta")) for event in events])
            assert kinds[0] == kinds[1] == kinds[2]

    asyncio.run(run())


def anonymous(answer: Stream) -> str:
    """Returns the stream without the parts that differ between requests."""
    (name,) = set(re.findall(r'"resp_(\w+)"', answer.data[0]))
    text = "\n".join(itertools.chain(*without_times(answer.events)))
    text = re.sub(r'"created_at":\d+', "", text.replace(name, "ID"))
    return re.sub(r'"call_\w+"', '"call"', text)


def test_without_the_header_nothing_changes(
    deepseek_worker: FakeWorker, backend: tokenizers.Tokenizer
) -> None:
    body = body_of(deepseek_worker, backend, "everything", burst=3)

    async def run() -> tuple[Stream, Stream]:
        async with client.session() as http:
            plain = await stream(http, deepseek_worker.url + PATH, body, replay=False)
            return plain, await stream(http, deepseek_worker.url + PATH, body)

    plain, asked = asyncio.run(run())
    assert anonymous(plain) == anonymous(asked)
    assert not any(event.marks for event in plain.events)
    assert "x-mla-replay" not in plain.headers
    listed = asked.after(len(asked.events))["choices"]
    ids = backend.encode(EVERYTHING, add_special_tokens=False).ids
    assert listed == [{"token_ids": [*ids, 1], "finish_reason": "stop"}]


def test_only_the_end_was_missing(
    deepseek_worker: FakeWorker, backend: tokenizers.Tokenizer
) -> None:
    body = body_of(deepseek_worker, backend, "everything")

    async def run() -> None:
        async with client.session() as http:
            uncut = await stream(http, deepseek_worker.url + PATH, body)
            given = uncut.after(len(uncut.events) - 1)
            asked = len(deepseek_worker.received("Generate"))
            again = await stream(http, deepseek_worker.url + PATH, body, continuation=given)
            assert without_times(again.events) == without_times(uncut.events[-1:])
            assert len(deepseek_worker.received("Generate")) == asked, (
                "there was nothing to compute"
            )

    asyncio.run(run())


def test_an_aborted_response_stays_aborted(
    deepseek_worker: FakeWorker, backend: tokenizers.Tokenizer
) -> None:
    """No token marks an abort."""
    held = body_of(deepseek_worker, backend, "text", hold_after=4)
    url = deepseek_worker.url + PATH
    released = body_of(deepseek_worker, backend, "text")

    async def abort(http: aiohttp.ClientSession) -> None:
        (request,) = deepseek_worker.generates()[-1:]
        body = {"rid": request.rid}
        async with http.post(deepseek_worker.url + "/abort_request", json=body) as response:
            assert await response.json() == {"aborted": 1}

    async def aborted(http: aiohttp.ClientSession) -> Stream:
        raw, headers = b"", {"x-mla-replay": "1"}
        async with http.post(url, json=held | {"stream": True}, headers=headers) as response:
            while b"output_text.delta" not in raw:
                raw += await response.content.readany()
            await abort(http)
            raw += await response.read()
            headers = {name.lower(): value for name, value in response.headers.items()}
        return Stream(200, headers, events_of(raw))

    async def run() -> None:
        async with client.session() as http:
            uncut = await aborted(http)
            whole = without_times(uncut.events)
            assert whole[-1][0] == "response.incomplete"
            known = 0
            for cut in range(1, len(whole)):
                given = uncut.after(cut)
                if any(choice["finish_reason"] for choice in given["choices"]):
                    known += 1
                    again = await stream(http, url, released, continuation=given)
                    assert without_times(again.events) == whole[cut:], (cut, given)
            assert known == 4, (
                "what was held back of the text, and what ends the item but the last of it"
            )

    asyncio.run(run())


def test_more_events_than_the_tokens_make_are_refused(deepseek_worker: FakeWorker) -> None:
    async def run() -> None:
        async with client.session() as http:
            url, body = deepseek_worker.url + PATH, {"model": "deepseek", "input": "a"}
            uncut = await stream(http, url, body | {"cache_salt": script(say=[300])})
            given = uncut.after(3)
            for events, status in ((given["events"], 200), (given["events"] + 99, 400)):
                again = await stream(http, url, body, continuation=given | {"events": events})
                assert again.status == status, again.error
            error = json.loads(again.error)["error"]
            assert error["param"] == "continuation.events"

    asyncio.run(run())

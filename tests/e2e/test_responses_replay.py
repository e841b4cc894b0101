"""The openai client receives complete responses although their worker is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from typing import Any

import openai
import tokenizers

from mla_router.worker.config import SMALL_MODEL
from support import processes
from support.fake_worker import FakeWorker, fake_worker

CALL = '{"name": "get_weather", "parameters": {"city": "Zürich 😀"}}'
ANSWER = f"<think>Hm. Well 😀.</think>I look in 日本. <|python_tag|>{CALL}; {CALL}"
TOOLS: Any = [
    {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": False}
]
ITEMS = ["reasoning", "message", "function_call", "function_call"]
SHOWN_BY = 8  # tokens until some of the reasoning is sent
# Behind a router the id of the response is the request id; the ids of items come from the worker.
ITEM = re.compile(r"(?<=rs_|fc_)[0-9a-f]{32}|(?<=msg_)[0-9a-f]{32}")
TIMES = re.compile(r'"(created|completed)_at":[\d.]+')


def anonymous(events: list[Any]) -> list[str]:
    """Returns the events without times and without random ids, which must be the same in all events."""
    name = events[0].response.id.removeprefix("resp_")
    written = [TIMES.sub("", event.model_dump_json()).replace(name, "ID") for event in events]
    items = {item for text in written for item in ITEM.findall(text)}
    assert len(items) <= 1, f"items of several responses: {items}"
    written = [ITEM.sub("ID", text) for text in written]
    calls = dict.fromkeys(call for text in written for call in re.findall(r"call_\w{24}", text))
    for number, call in enumerate(calls):
        written = [text.replace(call, f"call {number}") for text in written]
    return written


async def read(url: str, salt: str, begun: Callable[[], None] = lambda: None) -> list[Any]:
    """Reads the events of one response. `begun` is called at the first text."""
    async with openai.AsyncOpenAI(
        base_url=url + "/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        events = []
        stream = await client.responses.create(
            model="mla-small", input="a", tools=TOOLS, stream=True, extra_body={"cache_salt": salt}
        )
        async for event in stream:
            events.append(event)
            if event.type.endswith(".delta"):
                begun()
        return events


async def run(victim: FakeWorker, survivor: FakeWorker, router: str, ids: list[int]) -> None:
    def salt(**fields: Any) -> str:
        (salt,) = {worker.say(ids, cached=2, **fields) for worker in (victim, survivor)}
        return salt

    expected = await read(survivor.url, salt())
    held = range(SHOWN_BY, len(ids), 5)
    begun = [asyncio.Event() for _ in held]
    streams = [
        asyncio.create_task(read(router, salt(hold_own_after=after), begun[number].set))
        for number, after in enumerate(held)
    ]
    # One that fails would never begin.
    waits = asyncio.gather(*(event.wait() for event in begun))
    await asyncio.wait([asyncio.ensure_future(waits), *streams], return_when="FIRST_COMPLETED")
    assert not any(stream.done() for stream in streams), "none may end as long as it is held"
    await asyncio.to_thread(processes.post_json, router + "/workers", {"url": survivor.url})
    await asyncio.to_thread(
        processes.wait_until,
        lambda: len(processes.healthy_workers(router)) == 2,
        "both in rotation",
    )
    os.kill(victim.running.pid, signal.SIGKILL)
    for events in await asyncio.gather(*streams):
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert anonymous(events) == anonymous(expected)
        final = events[-1].response
        assert final.status == "completed"
        assert [item.type for item in final.output] == ITEMS
        assert final.output_text == "I look in 日本. "
    assert len(survivor.generates()) == 1 + len(held)


def test_responses_are_complete_after_a_kill() -> None:
    """The killed worker stops each of them at another token, before its end."""
    backend = tokenizers.Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))
    ids = backend.encode(ANSWER + "<｜end▁of▁sentence｜>", add_special_tokens=False).ids
    formats = {"reasoning_parser": "deepseek_r1", "tool_call_parser": "llama3"}
    with (
        fake_worker(**formats) as victim,
        fake_worker(**formats) as survivor,
        processes.router([victim.url]) as router,
    ):
        asyncio.run(run(victim, survivor, router.url, ids))

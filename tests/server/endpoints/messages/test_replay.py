"""Streams of /v1/messages that break anywhere and go on: the same events to the byte, each once.

What all streams that can be continued have in common: tests/server/requests/test_replay.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import tokenizers

from support import client
from support.fake_worker import FakeWorker
from support.replay import Event, stream

PATH = "/v1/messages"
TOOLS = [{"name": "get_weather", "input_schema": {"type": "object"}}]
CALL = '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Zürich 😀"}<｜tool▁call▁end｜>'
CALLS = f"<｜tool▁calls▁begin｜>{CALL}{CALL}<｜tool▁calls▁end｜>"
EVERYTHING = "Hm. Well 😀.</think>\n\nI look. " + CALLS
THINKS = {"thinking": {"type": "adaptive"}}

# The model's answer, and fields of the request.
ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("Hello 😀 for 日本語", {}),
    "everything": (EVERYTHING, {"tools": TOOLS} | THINKS),
    "a cut call": (EVERYTHING, {"tools": TOOLS, "max_tokens": 60} | THINKS),
    "a stop string": ("Hello 😀 for END 😀 of 日本語", {"stop_sequences": ["D 😀 o"]}),
    "nothing": ("", {}),
}
# How many tokens come at a time, on the worker that breaks and on those that go on.
BURSTS = [(1, 7), (5, 1000)]


def said(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.name, event.data) for event in events]


@pytest.mark.parametrize("bursts", BURSTS, ids=lambda pair: f"{pair[0]}, then {pair[1]}")
@pytest.mark.parametrize("answer", ANSWERS)
def test_every_cut(
    deepseek_worker: FakeWorker,
    backend: tokenizers.Tokenizer,
    answer: str,
    bursts: tuple[int, int],
) -> None:
    text, fields = ANSWERS[answer]
    ids = [*backend.encode(text, add_special_tokens=False).ids, 1]  # 1: the EOS token

    def body(burst: int) -> dict[str, Any]:
        salt = deepseek_worker.say(ids, burst=burst, cached=2)
        turns = [{"role": "user", "content": "Hello!"}]
        return {"max_tokens": 200, "messages": turns, "cache_salt": salt} | fields

    async def run() -> None:
        url = deepseek_worker.url + PATH
        first, later = map(body, bursts)
        async with client.session() as http:
            uncut = await stream(http, url, first)
            whole = said(uncut.events)
            assert whole[-1][0] == "message_stop"
            for cut in range(1, len(whole)):
                given = uncut.after(cut)
                again = await stream(http, url, later, continuation=given)
                assert again.status == 200, again.error
                assert said(again.events) == whole[cut:], (cut, given)
                recut = len(again.events) // 2
                given = again.after(recut, given)
                third = await stream(http, url, first, continuation=given)
                assert third.status == 200, third.error
                assert said(third.events) == whole[cut + recut :], (cut, recut, given)

    asyncio.run(run())

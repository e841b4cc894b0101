"""Streams with reasoning and tool calls that break at any event continue unchanged."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest
import tokenizers

from support.client import session
from support.fake_worker import FakeWorker
from support.replay import DONE, stream

CALL = "<｜tool▁call▁begin｜>get<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
ANSWERS = {
    "two calls": (
        "Hm 😀. </think>\n\nI ask.<｜tool▁calls▁begin｜>"
        + CALL.replace("{}", '{"a": "😀"}')
        + CALL
        + "<｜tool▁calls▁end｜>"
    ),
    "a broken call": "</think><｜tool▁calls▁begin｜>" + CALL + "<｜tool▁call▁begin｜>no ",
    "ends within": "a </thi",
}


@pytest.mark.parametrize("burst", [1, 5])
@pytest.mark.parametrize("answer", ANSWERS)
def test_every_cut(
    deepseek_worker: FakeWorker, backend: tokenizers.Tokenizer, answer: str, burst: int
) -> None:
    say = backend.encode(ANSWERS[answer], add_special_tokens=False).ids
    body = {
        "model": "deepseek",
        "messages": [{"role": "user", "content": "?"}],
        "tools": [{"type": "function", "function": {"name": "get"}}],
        "chat_template_kwargs": {"thinking": True},
        "n": 2,
        "cache_salt": deepseek_worker.say([*say, 1], burst=burst),
        "stream_options": {"include_usage": True},
    }

    def by_choice(events: list[Any]) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = defaultdict(list)
        for event in events:
            index = event["choices"][0]["index"] if event["choices"] else -1
            found[index].append(event)
        return found

    async def run() -> None:
        async with session() as http:
            url = deepseek_worker.url + "/v1/chat/completions"
            uncut = await stream(http, url, body)
            assert uncut.status == 200, uncut.error
            bodies = [event.body for event in uncut.events[:-1]]
            assert burst > 1 or len(bodies) > 10 or answer != "two calls"
            for cut in range(1, len(bodies)):
                given = uncut.after(cut)
                again = await stream(http, url, body, continuation=given)
                assert again.status == 200, again.error
                rest = by_choice([event.body for event in again.events[:-1]])
                assert rest == by_choice(bodies[cut:]), (cut, given)
                assert again.data[-1] == DONE

    asyncio.run(run())

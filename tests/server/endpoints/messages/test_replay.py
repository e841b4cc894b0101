"""Streams of /v1/messages that break at any event continue with the same bytes, each event once.

tests/server/requests/test_replay.py has the tests for all kinds of streams.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import tokenizers

from support.fake_worker import FakeWorker
from support.replay import Event, check_every_cut

PATH = "/v1/messages"
TOOLS = [{"name": "get_weather", "input_schema": {"type": "object"}}]
CALL = '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Zürich 😀"}<｜tool▁call▁end｜>'
CALLS = f"<｜tool▁calls▁begin｜>{CALL}{CALL}<｜tool▁calls▁end｜>"
EVERYTHING = "Hm. Well 😀.</think>\n\nI look. " + CALLS
THINKS = {"thinking": {"type": "adaptive"}}

# The text of the model, and further fields of the request.
ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("Hello 😀 for 日本語", {}),
    "everything": (EVERYTHING, {"tools": TOOLS} | THINKS),
    "a cut call": (EVERYTHING, {"tools": TOOLS, "max_tokens": 60} | THINKS),
    "a stop string": ("Hello 😀 for END 😀 of 日本語", {"stop_sequences": ["D 😀 o"]}),
    "nothing": ("", {}),
}
# The number of tokens in a delta, on the worker that breaks and on those that continue.
BURSTS = [(1, 7), (5, 1000)]


def names_and_data(events: list[Event]) -> list[tuple[str, str]]:
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

    first, later = map(body, bursts)
    url = deepseek_worker.url + PATH
    asyncio.run(check_every_cut(url, first, later, names_and_data, ("message_stop",)))

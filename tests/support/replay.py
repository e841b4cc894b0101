"""A router's part in replay, in its simplest form: keep the ids of a stream, cut it, continue it."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Event:
    marks: list[str]  # what its comment lines say
    data: str

    @property
    def body(self) -> Any:
        return json.loads(self.data)


@dataclass(slots=True)
class Stream:
    status: int
    headers: dict[str, str]
    events: list[Event] = field(default_factory=list)
    error: str = ""  # the body, if it is no stream

    @property
    def data(self) -> list[str]:
        return [event.data for event in self.events]

    def after(self, cut: int, choices: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """The `continuation` of this stream, if it breaks behind its first `cut` events; `choices`
        are those with which it was itself begun."""
        choices = copy.deepcopy(choices or [])
        for mark in (mark for event in self.events[:cut] for mark in event.marks):
            index, ids, *reason = mark.split(" ")
            while len(choices) <= int(index):
                choices.append({"token_ids": [], "finish_reason": None})
            choice = choices[int(index)]
            choice["token_ids"] += [int(token) for token in ids.split(",") if token]
            choice["finish_reason"] = reason[0] if reason else choice["finish_reason"]
        return {"response": self.headers["x-mla-replay"], "choices": choices}


async def stream(
    http: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    *,
    replay: bool = True,
    **extra: Any,
) -> Stream:
    """Send `body` with what `extra` adds to it, and read the whole answer."""
    headers = {"x-mla-replay": "1"} if replay else {}
    async with http.post(url, json=body | {"stream": True} | extra, headers=headers) as response:
        raw = await response.read()
        answer = Stream(response.status, {k.lower(): v for k, v in response.headers.items()})
    if answer.status != 200:
        answer.error = raw.decode()
        return answer
    *blocks, rest = raw.decode().split("\n\n")
    assert rest == "", "a stream ends with a whole event"
    for block in blocks:
        *comments, data = block.split("\n")
        assert all(comment.startswith(":mla ") for comment in comments), block
        assert data.startswith("data: "), block
        marks = [comment.removeprefix(":mla ") for comment in comments]
        answer.events.append(Event(marks, data.removeprefix("data: ")))
    return answer

"""The router's part of a continuation, in its simplest form: keeps the token ids of a stream, cuts it, and continues
it."""

from __future__ import annotations

import copy
import json
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from mla_router.worker.server.http.signature import sign
from support.client import session
from support.processes import REPLAY_KEY

DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Event:
    marks: list[str]  # its comment lines
    data: str
    name: str = ""  # of events of /v1/responses and /v1/messages

    @property
    def body(self) -> Any:
        return json.loads(self.data)


@dataclass(slots=True)
class Stream:
    status: int
    headers: dict[str, str]
    events: list[Event] = field(default_factory=list)
    error: str = ""  # the body of an answer without a stream

    @property
    def data(self) -> list[str]:
        return [event.data for event in self.events]

    def after(self, cut: int, begun: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the `continuation` of this stream after its first `cut` events. `begun`: the `continuation`
        with which this stream began."""
        choices = copy.deepcopy(begun["choices"]) if begun else []
        for mark in (mark for event in self.events[:cut] for mark in event.marks):
            index, ids, *reason = mark.split(" ")
            while len(choices) <= int(index):
                choices.append({"token_ids": [], "finish_reason": None})
            choice = choices[int(index)]
            choice["token_ids"] += [int(token) for token in ids.split(",") if token]
            choice["finish_reason"] = reason[0] if reason else choice["finish_reason"]
        events = (begun["events"] if begun else 0) + cut
        return {"response": self.headers["x-mla-replay"], "choices": choices, "events": events}


async def stream(
    http: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    *,
    replay: bool = True,
    key: str = REPLAY_KEY,
    **extra: Any,
) -> Stream:
    """Sends `body` with the fields `extra`, and reads the whole answer."""
    sent = json.dumps(body | {"stream": True} | extra).encode()
    headers = {"Content-Type": "application/json"}
    if replay:
        path = urllib.parse.urlsplit(url).path
        headers |= {"x-mla-replay": "1", "x-mla-signature": sign(key, path, sent)}
    async with http.post(url, data=sent, headers=headers) as response:
        raw = await response.read()
        answer = Stream(response.status, {k.lower(): v for k, v in response.headers.items()})
    if answer.status != 200:
        answer.error = raw.decode()
    else:
        answer.events = events_of(raw)
    return answer


async def check_every_cut(
    url: str,
    first: dict[str, Any],
    later: dict[str, Any],
    compared: Callable[[list[Event]], list[tuple[str, str]]],
    last_names: tuple[str, ...],
) -> None:
    """Cuts the stream of `first` after each event and continues it with `later`; cuts that stream in its middle and
    continues it with `first`.

    Asserts that the parts together are the whole, and that its last event has one of `last_names`. `compared` returns
    the names and data that must be equal.
    """
    async with session() as http:
        uncut = await stream(http, url, first)
        assert uncut.status == 200, uncut.error
        whole = compared(uncut.events)
        assert whole[-1][0] in last_names
        for cut in range(1, len(whole)):
            given = uncut.after(cut)
            again = await stream(http, url, later, continuation=given)
            assert again.status == 200, again.error
            assert compared(again.events) == whole[cut:], (cut, given)
            recut = len(again.events) // 2
            given = again.after(recut, given)
            third = await stream(http, url, first, continuation=given)
            assert third.status == 200, third.error
            assert compared(third.events) == whole[cut + recut :], (cut, recut, given)


def events_of(raw: bytes) -> list[Event]:
    events = []
    *blocks, rest = raw.decode().split("\n\n")
    assert rest == "", "a stream ends with a whole event"
    for block in blocks:
        *lines, data = block.split("\n")
        name = (
            lines.pop().removeprefix("event: ") if lines and lines[-1].startswith("event: ") else ""
        )
        assert all(line.startswith(":mla ") for line in lines), block
        assert data.startswith("data: "), block
        marks = [line.removeprefix(":mla ") for line in lines]
        events.append(Event(marks, data.removeprefix("data: "), name))
    return events

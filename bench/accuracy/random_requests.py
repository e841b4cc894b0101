"""Random requests of every kind over HTTP, and their answers token by token.

A request is a path and a body. An answer is read whole or as a stream, and has everything that a client sees but the names,
times, and the grouping of tokens into events.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from run import questions
from tasks import arithmetic
from tasks.tools import TOOLS

Body = dict[str, Any]

PERSON: Body = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Request:
    kind: str
    path: str
    body: Body


@dataclass
class Answer:
    """Choices by index."""

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    token_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    calls: dict[int, dict[int, list[str]]] = field(default_factory=lambda: defaultdict(dict))
    reasons: dict[int, str] = field(default_factory=dict)
    completion_tokens: int = 0

    def add(self, choice: Body) -> None:
        """Adds a choice, or a piece of one."""
        index, said = choice["index"], choice.get("delta") or choice.get("message") or choice
        self.texts[index] += said.get("text") or said.get("content") or ""
        self.token_ids[index] += choice.get("token_ids") or []
        for at, call in enumerate(said.get("tool_calls") or []):
            named = self.calls[index].setdefault(call.get("index", at), ["", ""])
            named[0] += call["function"].get("name") or ""
            named[1] += call["function"].get("arguments") or ""
        if choice.get("finish_reason"):
            self.reasons[index] = choice["finish_reason"]


STREAMED: Body = {"stream": True, "stream_options": {"include_usage": True}}


def word_problems(shots: int, count: int, seed: int) -> list[Request]:
    """Returns those of `run.py`, greedy. Every second one is a stream."""
    fields = {"max_tokens": 64, "temperature": 0, "stop": ["\n"], "return_token_ids": True}
    return [
        Request(
            "word problem",
            "/v1/completions",
            {"prompt": asked.prompt} | fields | (STREAMED if number % 2 else {}),
        )
        for number, asked in enumerate(questions(shots, count, seed))
    ]


def random_requests(count: int, seed: int) -> list[Request]:
    """Returns requests of all kinds in turn. Every second one is a stream."""
    draw = random.Random(seed)
    kinds: list[Callable[[random.Random], Request]] = [
        _greedy,
        _seeded,
        _json_schema,
        _tools,
        _stop,
        _several,
        _penalized,
        _scored,
    ]
    requests = []
    for number in range(count):
        request = kinds[number % len(kinds)](draw)
        if number // len(kinds) % 2:
            request = Request(request.kind, request.path, request.body | STREAMED)
        requests.append(request)
    return requests


def _completion(kind: str, draw: random.Random, **fields: Any) -> Request:
    asked, answer = arithmetic.one_story(draw, held_out=True)
    begun = answer[: draw.randrange(12)]
    common = {"max_tokens": draw.randint(8, 64), "return_token_ids": True, "temperature": 0}
    prompt = f"Question: {asked}\nAnswer: {begun}".rstrip()
    return Request(kind, "/v1/completions", {"prompt": prompt} | common | fields)


def _chat(kind: str, content: str, draw: random.Random, **fields: Any) -> Request:
    message = {"role": "user", "content": content}
    common = {"max_tokens": draw.randint(24, 80)} | _random_or_greedy(draw)
    return Request(kind, "/v1/chat/completions", {"messages": [message]} | common | fields)


def _random_or_greedy(draw: random.Random) -> Body:
    if draw.random() < 0.5:
        return {"temperature": 0}
    return {"temperature": draw.choice([0.5, 0.8, 1.2]), "seed": draw.randrange(1 << 30)}


def _greedy(draw: random.Random) -> Request:
    return _completion("greedy", draw)


def _seeded(draw: random.Random) -> Request:
    fields = {"temperature": draw.choice([0.6, 1.0, 1.4]), "seed": draw.randrange(1 << 30)}
    filters: list[Body] = [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}]
    return _completion("seeded", draw, **fields, **draw.choice(filters))


def _json_schema(draw: random.Random) -> Request:
    wanted = {"name": "person", "schema": PERSON, "strict": True}
    answer = {"type": "json_schema", "json_schema": wanted}
    return _chat("json_schema", "Tell me of one person.", draw, response_format=answer)


def _tools(draw: random.Random) -> Request:
    tool = draw.choice(TOOLS)
    asked, _ = tool.ask(draw)
    known = [other.as_openai for other in TOOLS]
    choice = draw.choice(["auto", "required"])
    return _chat("tools", asked, draw, tools=known, tool_choice=choice)


def _stop(draw: random.Random) -> Request:
    stop = draw.sample(["\n", " is", ".", " the", "1", " more", "er"], 2)
    return _completion("stop strings", draw, stop=stop, **_random_or_greedy(draw))


def _several(draw: random.Random) -> Request:
    return _completion("n=2", draw, n=2, temperature=0.9, seed=draw.randrange(1 << 30))


def _penalized(draw: random.Random) -> Request:
    penalties: list[Body] = [
        {"frequency_penalty": 0.6},
        {"presence_penalty": 0.8},
        {"repetition_penalty": 1.2},
    ]
    return _completion("penalties", draw, **draw.choice(penalties), **_random_or_greedy(draw))


def _scored(draw: random.Random) -> Request:
    biases = {str(draw.randrange(300, 1000)): draw.choice([-5, 3]) for _ in range(3)}
    fields = {"min_tokens": 8, "logit_bias": biases, "logprobs": 2}
    return _completion("logit_bias", draw, **fields, **_random_or_greedy(draw))


async def ask(http: aiohttp.ClientSession, request: Request) -> Answer:
    """Raises RuntimeError if the server refuses the request or ends its stream early."""
    found = Answer()
    async with http.post(request.path, json={"model": "mla-small"} | request.body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status} to {request}: {await response.text()}")
        if not request.body.get("stream"):
            parts = _once(await response.json())
        else:
            parts = _events(response)
        async for part in parts:
            for choice in part["choices"]:
                found.add(choice)
            if usage := part.get("usage"):
                found.completion_tokens = usage["completion_tokens"]
    missing = set(range(request.body.get("n", 1))) - set(found.reasons)
    if missing or not found.completion_tokens:
        raise RuntimeError(f"no end of choices {missing} of {request}: {found}")
    return found


async def _once(body: Body) -> AsyncIterator[Body]:
    yield body


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Body]:
    async for line in response.content:
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(f"in a stream: {event}")
            yield event

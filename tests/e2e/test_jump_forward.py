"""Jump-forward decoding over HTTP: the same valid answers in fewer steps, with any settings and after any
interruption."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import aiohttp
import jsonschema
import pytest

from support import client, processes
from support.processes import Running
from support.replay import DONE, Stream, stream

PATH = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "favourite_colour": {"enum": ["turquoise", "turmeric", "blue"]},
        "children": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {"first_name": {"type": "string", "maxLength": 8}},
                "required": ["first_name"],
                "additionalProperties": False,
            },
        },
        "is_available": {"type": "boolean"},
    },
    "required": ["name", "favourite_colour", "children", "is_available"],
    "additionalProperties": False,
}
SEEDS = range(2)  # greedy and sampled
STRING = re.compile(r'"(\\.|[^"\\])*"')


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, Running]]:
    """The shipped small model, with both ways to compute forced text."""
    compact = {"constrained_json_disable_any_whitespace": True}
    flags: dict[str, dict[str, Any]] = {
        "overlap": compact,
        "normal": {**compact, "disable_overlap_schedule": True, "chunked_prefill_size": 3},
    }
    each = processes.together(*(processes.worker(**some) for some in flags.values()))
    with each as running:
        yield dict(zip(flags, running, strict=True))


def body(seed: int, **fields: Any) -> dict[str, Any]:
    schema = {"name": "person", "schema": SCHEMA}
    return {
        "model": "mla-small",
        "messages": [{"role": "user", "content": f"Who is number {seed}?"}],
        "response_format": {"type": "json_schema", "json_schema": schema},
        "max_tokens": 250,
        "temperature": [0.0, 1.0][seed % 2],
        "seed": seed,
        "stream_options": {"include_usage": True},
        **fields,
    }


def text_of(answer: Stream) -> str:
    assert answer.status == 200, answer.error
    assert answer.data[-1] == DONE
    choices = [choice for event in answer.events[:-1] for choice in event.body["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def ask_all(worker: Running, **fields: Any) -> tuple[list[Stream], int]:
    """Requests the answers one after the other. Returns them with the number of steps."""

    def steps() -> int:
        return int(processes.get_json(worker.url + "/get_server_info")["scheduler"]["steps"])

    async with client.session() as http:
        before = steps()
        answers = [await stream(http, worker.url + PATH, body(s, **fields)) for s in SEEDS]
    return answers, steps() - before


def test_answers_are_valid_and_take_fewer_steps(workers: dict[str, Running]) -> None:
    tokens: dict[str, int] = {}
    steps: dict[str, int] = {}
    texts: dict[str, list[str]] = {}
    for way, worker in workers.items():
        answers, steps[way] = asyncio.run(ask_all(worker))
        tokens[way] = sum(a.events[-2].body["usage"]["completion_tokens"] for a in answers)
        texts[way] = [text_of(answer) for answer in answers]
        for text in texts[way]:
            jsonschema.validate(json.loads(text), SCHEMA)
            assert STRING.sub("", text) == STRING.sub("", json.dumps(json.loads(text)))
    assert texts["overlap"] == texts["normal"]
    assert steps["overlap"] < tokens["overlap"] / 2


@pytest.mark.slow
def test_without_jumps_each_token_is_a_step() -> None:
    flags = {"constrained_json_disable_any_whitespace": True, "disable_jump_forward": True}
    with processes.worker(**flags) as worker:
        answers, steps = asyncio.run(ask_all(worker))
    tokens = sum(a.events[-2].body["usage"]["completion_tokens"] for a in answers)
    for answer in answers:
        jsonschema.validate(json.loads(text_of(answer)), SCHEMA)
    assert steps >= tokens


def test_logprobs_change_no_text(workers: dict[str, Running]) -> None:
    plain, steps = asyncio.run(ask_all(workers["overlap"]))
    scored, more_steps = asyncio.run(ask_all(workers["overlap"], logprobs=True))
    assert [text_of(answer) for answer in plain] == [text_of(answer) for answer in scored]
    assert more_steps > steps


def test_interrupted_streams_continue_on_another_worker(workers: dict[str, Running]) -> None:
    here, there = workers["overlap"].url + PATH, workers["normal"].url + PATH

    async def compare(http: aiohttp.ClientSession, seed: int) -> int:
        whole = await stream(http, here, body(seed))
        for cut in range(1 + seed, len(whole.events) - 2, 16):
            rest = await stream(http, there, body(seed), continuation=whole.after(cut))
            assert text_of(rest) == text_of(Stream(200, {}, whole.events[cut:]))
        ids = [mark.split(" ")[1] for event in whole.events for mark in event.marks]
        return sum("," in some for some in ids)

    async def run() -> None:
        async with client.session() as http:
            assert sum([await compare(http, seed) for seed in SEEDS]) > 5, "no runs were cut"

    asyncio.run(run())


def test_a_stream_interrupted_within_a_run_continues_it(workers: dict[str, Running]) -> None:
    """A router does not interrupt a stream there, but another client of the field may."""
    here, there = workers["overlap"].url + PATH, workers["normal"].url + PATH

    async def run() -> None:
        async with client.session() as http:
            whole = await stream(http, here, body(1))
            given = whole.after(len(whole.events) - 2)
            ids = given["choices"][0]["token_ids"]
            for cut in range(1, len(ids) - 1, 16):
                given["choices"] = [{"token_ids": ids[:cut], "finish_reason": None}]
                rest = await stream(http, there, body(1), continuation=given)
                again = rest.after(len(rest.events) - 2, given)
                assert again["choices"][0]["token_ids"] == ids

    asyncio.run(run())

"""`n` answers to one prompt, for all endpoints."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from typing import Any

import aiohttp
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mla_router.worker.messages import Generate
from support.client import session, sse_events
from support.fake_worker import FakeWorker, script
from support.processes import post_json
from support.replay import DONE, stream

CHAT = {"model": "mla-small", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
TEXT = {"model": "mla-small", "prompt": [[100, 101], [102, 103]], "max_tokens": 4}


def read(worker: FakeWorker, path: str, body: dict[str, Any]) -> list[Any]:
    async def events() -> list[Any]:
        async with session() as http:
            response: aiohttp.ClientResponse = await http.post(worker.url + path, json=body)
            return [json.loads(e) async for e in sse_events(response) if e != DONE]

    return asyncio.run(events())


def last_generates(worker: FakeWorker, count: int) -> list[Generate]:
    return worker.generates()[-count:]


def test_chat(worker: FakeWorker) -> None:
    body = CHAT | {"n": 3, "seed": 2**63 - 2, "cache_salt": script(cached=2)}
    answer = ChatCompletion.model_validate(post_json(worker.url + "/v1/chat/completions", body))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    asked = last_generates(worker, 3)
    assert len({tuple(generate.prompt) for generate in asked}) == 1
    seeds = [generate.sampling.seed for generate in asked]
    assert seeds[0] == 2**63 - 2
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({generate.rid for generate in asked}) == 3
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == len(asked[0].prompt), "the prompt counts once"
    assert usage.completion_tokens == 3 * 4
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 2


def test_a_chat_stream(worker: FakeWorker) -> None:
    whole = post_json(worker.url + "/v1/chat/completions", CHAT | {"n": 3})
    body = CHAT | {"n": 3, "stream": True, "stream_options": {"include_usage": True}}
    chunks = [
        ChatCompletionChunk.model_validate(event)
        for event in read(worker, "/v1/chat/completions", body)
    ]
    *chunks, last = chunks
    assert last.usage is not None
    assert last.usage.prompt_tokens == whole["usage"]["prompt_tokens"]
    roles, texts, reasons = defaultdict(list), defaultdict(str), defaultdict(list)
    for chunk in chunks:
        (choice,) = chunk.choices
        roles[choice.index].append(choice.delta.role)
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index].append(choice.finish_reason)
    for index, choice in enumerate(whole["choices"]):
        assert roles[index][0] == "assistant"
        assert set(roles[index][1:]) == {None}
        assert texts[index] == choice["message"]["content"]
        assert reasons[index][-1] == "length"
        assert set(reasons[index][:-1]) == {None}


def test_completions_of_several_prompts(worker: FakeWorker) -> None:
    body = TEXT | {"n": 2, "seed": 70}
    answer = Completion.model_validate(post_json(worker.url + "/v1/completions", body))
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    asked = last_generates(worker, 4)
    assert [generate.prompt for generate in asked] == [[100, 101]] * 2 + [[102, 103]] * 2
    # All prompts share the client's seed.
    seeds = [generate.sampling.seed for generate in asked]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] == 70
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 16)


def test_seeds_that_are_close_have_no_answer_in_common(worker: FakeWorker) -> None:
    for seed in (70, 71, 72):
        post_json(worker.url + "/v1/completions", TEXT | {"n": 8, "seed": seed, "prompt": [1, 2]})
    assert len({generate.sampling.seed for generate in last_generates(worker, 24)}) == 24


def test_drawn_seeds_are_all_different(worker: FakeWorker) -> None:
    post_json(worker.url + "/v1/completions", TEXT | {"n": 3})
    assert len({generate.sampling.seed for generate in last_generates(worker, 6)}) == 6


def test_generate(worker: FakeWorker) -> None:
    params = {"max_new_tokens": 3, "n": 2}
    answers = post_json(
        worker.url + "/generate", {"input_ids": [70, 71], "sampling_params": params}
    )
    assert [answer["output_ids"] for answer in answers] == [[70, 71, 70]] * 2
    assert len({answer["meta_info"]["id"] for answer in answers}) == 2


@pytest.mark.parametrize(("n", "prompts"), [(64, 1), (32, 2), (1, 64)])
def test_as_many_as_there_may_be(worker: FakeWorker, n: int, prompts: int) -> None:
    body = {"model": "mla-small", "prompt": [[5]] * prompts, "n": n, "max_tokens": 1}
    assert len(post_json(worker.url + "/v1/completions", body)["choices"]) == 64


def test_more_than_there_may_be(worker: FakeWorker) -> None:
    async def refused() -> dict[str, Any]:
        body = {"model": "mla-small", "prompt": [[5]] * 2, "n": 33}
        async with (
            session() as http,
            http.post(worker.url + "/v1/completions", json=body) as answer,
        ):
            assert answer.status == 400
            error: dict[str, Any] = (await answer.json())["error"]
            return error

    asked = len(worker.received("Generate"))
    assert asyncio.run(refused())["param"] == "n"
    assert len(worker.received("Generate")) == asked


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_cut(worker: FakeWorker, path: str) -> None:
    """Each choice of a continued stream equals the rest of an unbroken one."""
    body = (CHAT if path.startswith("/v1/chat") else TEXT) | {"n": 2, "max_tokens": 5}

    def by_choice(events: list[Any]) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = defaultdict(list)
        for event in events:
            found[event["choices"][0]["index"]].append(event["choices"])
        return found

    async def run() -> None:
        async with session() as http:
            say = [300, 301, 302, 303, 304]
            asked = body | {"cache_salt": script(say=say)}
            uncut = await stream(http, worker.url + path, asked)
            bodies = [event.body for event in uncut.events[:-1]]
            for cut in range(1, len(bodies) + 1):
                given = uncut.after(cut)
                again = await stream(http, worker.url + path, asked, continuation=given)
                assert again.status == 200, again.error
                rest = by_choice([event.body for event in again.events[:-1]])
                assert rest == by_choice(bodies[cut:]), cut
                assert again.data[-1] == DONE

    asyncio.run(run())

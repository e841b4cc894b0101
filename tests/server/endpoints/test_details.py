"""Token ids and log-probabilities in vLLM's forms: complete, streamed and continued answers."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import openai
import pytest
import tokenizers

from mla_router.worker.config import SMALL_MODEL
from mla_router.worker.generation import Logprobs
from mla_router.worker.server.endpoints.logprobs import PromptLogprob, prompt_logprobs
from mla_router.worker.server.text.tokenizer import Tokenizer
from support import client
from support.fake_worker import FakeWorker, script
from support.processes import post_json
from support.replay import Stream, stream

EOS = 1
PROMPT = [100, 101, 102]
HELLO = [{"role": "user", "content": "Hello!"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 50},
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 50},
}


def ask(worker: FakeWorker, path: str, body: dict[str, Any], **extra: Any) -> Stream:
    async def one() -> Stream:
        async with client.session() as http:
            return await stream(http, worker.url + path, body, **extra)

    return asyncio.run(one())


def ids_of(answer: Stream, index: int, since: int = 0) -> list[int]:
    """Returns the token ids in all chunks of one choice, from event `since` on."""
    choices = [choice for event in answer.events[since:-1] for choice in event.body["choices"]]
    return [
        token for choice in choices if choice["index"] == index for token in choice["token_ids"]
    ]


@pytest.mark.parametrize("path", BODIES)
def test_token_ids(worker: FakeWorker, backend: tokenizers.Tokenizer, path: str) -> None:
    say = backend.encode("Hello 😀 for 日本語", add_special_tokens=False).ids
    body = BODIES[path] | {"return_token_ids": True, "n": 2}
    body["cache_salt"] = script(say=[*say, EOS])
    whole = post_json(worker.url + path, body)
    for choice in whole["choices"]:
        assert choice["token_ids"] == [*say, EOS]
    prompt = worker.generates()[-1].prompt
    holder = whole if path == CHAT else whole["choices"][0]
    assert holder["prompt_token_ids"] == prompt

    uncut = ask(worker, path, body)
    first = uncut.events[0].body
    assert (first if path == CHAT else first["choices"][0])["prompt_token_ids"] == prompt
    for index in range(2):
        assert ids_of(uncut, index) == [*say, EOS]
    told = [data for data in uncut.data if "prompt_token_ids" in data]
    assert len(told) == (1 if path == CHAT else 2), "once, or once a choice"
    for cut in range(2, len(uncut.events) - 1):
        again = ask(worker, path, body, continuation=uncut.after(cut))
        for index in range(2):  # the choices arrive in any order
            ours, expected = ids_of(again, index), ids_of(uncut, index, since=cut)
            assert ours == expected, cut
        assert not any("prompt_token_ids" in data for data in again.data[:-1]) or path != CHAT

    plain = post_json(worker.url + path, body | {"return_token_ids": None})
    for choice in plain["choices"]:
        assert choice["token_ids"] is None, "null, and not left out: vLLM's clients read it"
    holder = plain if path == CHAT else plain["choices"][0]
    assert holder["prompt_token_ids"] is holder["prompt_logprobs"] is None
    streamed = ask(worker, path, body | {"return_token_ids": None})
    assert not any("token_ids" in data for data in streamed.data)


@pytest.mark.parametrize("path", BODIES)
def test_prompt_logprobs(worker: FakeWorker, backend: tokenizers.Tokenizer, path: str) -> None:
    """The fake scheduler gives token t the logprob -t/1024; t, t + 1, ... are the most likely ones."""
    answer = post_json(worker.url + path, BODIES[path] | {"prompt_logprobs": 2, "max_tokens": 1})
    holder = answer if path == CHAT else answer["choices"][0]
    prompt = worker.generates()[-1].prompt
    first, *others = holder["prompt_logprobs"]
    assert first is None
    assert len(others) == len(prompt) - 1
    for token, place in zip(prompt[1:], others, strict=True):
        assert list(place) == [str(token), str(token + 1)]
        assert place[str(token)]["logprob"] == -token / 1024
        assert [entry["rank"] for entry in place.values()] == [1, 2]
        assert place[str(token)]["decoded_token"] == backend.decode(
            [token], skip_special_tokens=False
        )
    assert answer["choices"][0]["logprobs"] is None, "nobody asked for the answer's"


def test_prompt_logprobs_do_not_hold_the_event_loop(
    backend: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts of millions of tokens take a second."""
    tokenizer = Tokenizer(SMALL_MODEL)
    threads: set[int] = set()

    def text_of(token: int) -> str:
        threads.add(threading.get_ident())
        return backend.decode([token])

    monkeypatch.setattr(tokenizer, "text_of", text_of)
    places = asyncio.run(prompt_logprobs(tokenizer, [70, 71], Logprobs([-1.0]), 0))
    assert places[1] == {71: PromptLogprob(-1.0, None, backend.decode([71]))}
    assert threading.get_ident() not in threads


def test_both_kinds_of_logprobs_have_their_own_size(worker: FakeWorker) -> None:
    body = BODIES[COMPLETIONS] | {"prompt_logprobs": 1, "logprobs": 3, "max_tokens": 1}
    (choice,) = post_json(worker.url + COMPLETIONS, body)["choices"]
    assert [len(place) for place in choice["prompt_logprobs"][1:]] == [1, 1]
    assert [len(place) for place in choice["logprobs"]["top_logprobs"]] == [3]


@pytest.mark.parametrize("path", BODIES)
def test_tokens_named_by_id(worker: FakeWorker, path: str) -> None:
    wanted: dict[str, Any] = {"logprobs": 2}
    if path == CHAT:
        wanted = {"logprobs": True, "top_logprobs": 2}
    body = BODIES[path] | wanted | {"return_tokens_as_token_ids": True, "max_tokens": 2}
    body["cache_salt"] = script(say=[300, 301])
    (choice,) = post_json(worker.url + path, body)["choices"]
    if path == CHAT:
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["token_id:300", "token_id:301"]
        assert [top["token"] for top in content[0]["top_logprobs"]] == [
            "token_id:300",
            "token_id:301",
        ]
    else:
        assert choice["logprobs"]["tokens"] == ["token_id:300", "token_id:301"]
        assert list(choice["logprobs"]["top_logprobs"][0]) == ["token_id:300", "token_id:301"]


def test_logprobs_0_has_the_token_itself(worker: FakeWorker) -> None:
    with openai.OpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0) as api:
        answer = api.completions.create(model="mla-small", prompt=PROMPT, max_tokens=2, logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.tokens is not None
    assert [list(place) for place in logprobs.top_logprobs] == [
        [token] for token in logprobs.tokens
    ]


@pytest.mark.parametrize("path", BODIES)
def test_why_an_answer_ended(worker: FakeWorker, backend: tokenizers.Tokenizer, path: str) -> None:
    say = backend.encode("one two three", add_special_tokens=False).ids
    ends: list[tuple[dict[str, Any], Any, Any]] = [
        ({"max_tokens": 1}, None, None),
        ({}, EOS, None),
        ({"stop": [" two"]}, " two", " two"),
        ({"stop_token_ids": [say[1]]}, say[1], say[1]),
        ({"stop_token_ids": [EOS]}, EOS, EOS),
    ]
    for fields, matched, reason in ends:
        body = BODIES[path] | {"cache_salt": script(say=[*say, EOS])} | fields
        (choice,) = post_json(worker.url + path, body)["choices"]
        assert (choice["matched_stop"], choice["stop_reason"]) == (matched, reason), fields
        *others, last = [event.body["choices"][0] for event in ask(worker, path, body).events[:-1]]
        assert (last["matched_stop"], last["stop_reason"]) == (matched, reason), fields
        assert {choice["matched_stop"] for choice in others} <= {None}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", ["include_stop_str_in_output", "no_stop_trim"])
def test_the_end_of_an_answer_can_be_shown(
    worker: FakeWorker, backend: tokenizers.Tokenizer, path: str, field: str
) -> None:
    say = backend.encode("one two three", add_special_tokens=False).ids
    body = BODIES[path] | {"cache_salt": script(say=say), "stop": " two", field: True}
    (choice,) = post_json(worker.url + path, body)["choices"]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert text == "one two"


@pytest.mark.parametrize("path", BODIES)
def test_special_tokens_can_be_shown(worker: FakeWorker, path: str) -> None:
    body = BODIES[path] | {"cache_salt": script(say=[0]), "max_tokens": 1}
    for skip, shown in ((True, ""), (False, "<｜begin▁of▁sentence｜>")):
        (choice,) = post_json(worker.url + path, body | {"skip_special_tokens": skip})["choices"]
        assert (choice["message"]["content"] if path == CHAT else choice["text"]) == shown


@pytest.mark.parametrize("path", BODIES)
def test_a_long_prompt_can_be_truncated(worker: FakeWorker, path: str) -> None:
    long = list(range(100, 100 + 2000))
    body = BODIES[path] | {"max_tokens": 4}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "word " * 2000}]
    else:
        body["prompt"] = long

    def prompt_of(**fields: Any) -> list[int]:
        post_json(worker.url + path, body | fields)
        return worker.generates()[-1].prompt

    left = prompt_of(truncate_prompt_tokens=10)
    right = prompt_of(truncate_prompt_tokens=10, truncation_side="right")
    fitting = prompt_of(truncate_prompt_tokens=-1)
    assert len(left) == len(right) == 10
    assert len(fitting) == 1024 - 4
    assert fitting[-10:] == left
    if path == COMPLETIONS:
        assert (left, right) == (long[-10:], long[:10])


@pytest.mark.parametrize("path", BODIES)
def test_special_tokens_of_a_prompt(
    worker: FakeWorker, backend: tokenizers.Tokenizer, path: str
) -> None:
    body = {"max_tokens": 1} | ({"messages": HELLO} if path == CHAT else {"prompt": "Hello!"})
    prompts = []
    for add in (True, False):
        post_json(worker.url + path, body | {"add_special_tokens": add})
        prompts.append(worker.generates()[-1].prompt)
    bos = backend.token_to_id("<｜begin▁of▁sentence｜>")
    assert prompts[0] == [bos, *prompts[1]]


@pytest.mark.parametrize("path", BODIES)
def test_usage_with_each_chunk(worker: FakeWorker, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = BODIES[path] | {"max_tokens": 3, "stream_options": options}
    body["cache_salt"] = script(say=[70, 71, 72])
    uncut = ask(worker, path, body)
    *chunks, last = [event.body for event in uncut.events[:-1]]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    if path == CHAT:
        assert counts[0] == 0, "the role alone"
    assert chunks[-1]["usage"] == last["usage"]
    assert last["choices"] == []
    del options["include_usage"]
    alone = [event.body for event in ask(worker, path, body).events[:-1]]
    assert alone[-1]["usage"] == last["usage"]
    assert all(chunk["choices"] for chunk in alone)
    options["include_usage"] = False
    for event in ask(worker, path, body).events[:-1]:
        assert event.body.get("usage") is None, "the client has said no"


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"include_usage": None}])
@pytest.mark.parametrize("path", BODIES)
def test_stream_options_without_a_stream_are_refused(
    worker: FakeWorker, path: str, options: dict[str, Any]
) -> None:
    answer = ask(worker, path, BODIES[path], stream=False, stream_options=options)
    assert answer.status == 400
    assert json.loads(answer.error)["error"]["param"] == "stream_options"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncation_side", "middle"),
        ("rid", ""),
        ("rid", ["a", "b"]),
        ("request_id", "two words"),
        ("use_beam_search", True),
        ("lora_path", "adapter"),
    ],
)
@pytest.mark.parametrize("path", BODIES)
def test_wrong_values_are_refused_by_name(
    worker: FakeWorker, path: str, field: str, value: Any
) -> None:
    answer = ask(worker, path, BODIES[path] | {field: value})
    assert answer.status == 400
    assert json.loads(answer.error)["error"]["param"] == field


def test_nothing_to_compute(worker: FakeWorker) -> None:
    """SGLang's benchmarks warm up with max_tokens 0."""
    answer = post_json(worker.url + COMPLETIONS, {"prompt": PROMPT, "max_tokens": 0})
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert answer["usage"]["completion_tokens"] == 0

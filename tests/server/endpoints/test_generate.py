"""/generate, SGLang's native API."""

from __future__ import annotations

import asyncio
import json
import urllib.error
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
import tokenizers

from mla_router.worker.generation import SamplingParams
from mla_router.worker.messages import Generate
from support.client import sse_events
from support.fake_worker import FakeWorker, script
from support.processes import post_json


def generate(worker: FakeWorker, **body: Any) -> Any:
    return post_json(worker.url + "/generate", body)


def stream(worker: FakeWorker, **body: Any) -> list[Any]:
    async def read() -> list[str]:
        async with (
            aiohttp.ClientSession() as http,
            http.post(worker.url + "/generate", json=body | {"stream": True}) as response,
        ):
            assert response.status == 200
            return [event async for event in sse_events(response)]

    *events, done = asyncio.run(read())
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def test_the_shape(worker: FakeWorker, backend: tokenizers.Tokenizer) -> None:
    ids = backend.encode("Hello, cats").ids
    answer = generate(
        worker,
        text="Hello, cats",
        sampling_params={"max_new_tokens": len(ids)},
        return_logprob=True,
        cache_salt=script(cached=1),
    )
    meta = answer.pop("meta_info")
    assert answer == {"text": "Hello, cats", "output_ids": ids}
    assert meta.pop("id")
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "finish_reason": {"type": "length", "length": len(ids)},
        "prompt_tokens": len(ids),
        "completion_tokens": len(ids),
        "cached_tokens": 1,
        "input_token_logprobs": [],
        "output_token_logprobs": [[-token / 1024, token, None] for token in ids],
    }


def test_the_parameters_reach_the_scheduler(worker: FakeWorker) -> None:
    answer = generate(
        worker,
        input_ids=[5, 6, 7],
        sampling_params={
            "max_new_tokens": 4,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 20,
            "sampling_seed": 11,
            "stop_token_ids": [9, 3],
        },
        return_logprob=True,
        cache_salt="tenant",
    )
    rid = answer["meta_info"]["id"]
    (heard,) = [generate for generate in worker.generates() if generate.rid == rid]
    assert heard == Generate(
        rid,
        [5, 6, 7],
        SamplingParams(
            max_tokens=4,
            temperature=0.5,
            top_k=20,
            top_p=0.9,
            seed=11,
            # EOS is 1; it is united with the client's own stop tokens.
            stop_token_ids=frozenset({1, 3, 9}),
            logprobs=True,
        ),
        cache_salt="tenant",
    )


@pytest.mark.parametrize("say", [[5], [1]])  # 1 is the end of the text
def test_the_prompt_alone(
    worker: FakeWorker, backend: tokenizers.Tokenizer, say: list[int]
) -> None:
    """SGLang's frontend sends this to cache a prompt, and to choose by its logprobs."""
    ids = backend.encode("Hello, cats").ids
    asked: dict[str, Any] = {
        "text": "Hello, cats",
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 1,
        "cache_salt": script(say=say),
    }
    answer = generate(worker, **asked)
    meta = answer.pop("meta_info")
    assert answer == {"text": "", "output_ids": []}
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(ids), 0)
    assert [token for _, token, _ in meta["input_token_logprobs"]] == ids[1:]
    assert meta["output_token_logprobs"] == []

    *_, last = stream(worker, **asked)
    assert last["text"] == "" and last["output_ids"] == []
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_end_of_text(worker: FakeWorker, backend: tokenizers.Tokenizer) -> None:
    ids = backend.encode("one two three", add_special_tokens=False).ids
    salt = script(say=[*ids, 1, *ids])
    limit: dict[str, Any] = {"max_new_tokens": 2 * len(ids) + 1}

    answer = generate(worker, text="x", sampling_params=limit, cache_salt=salt)
    assert answer["output_ids"] == [*ids, 1]
    assert answer["text"] == "one two three"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}

    params = limit | {"ignore_eos": True}
    answer = generate(worker, text="x", sampling_params=params, cache_salt=salt)
    assert answer["text"] == "one two threeone two three"
    assert answer["meta_info"]["finish_reason"]["type"] == "length"

    params = limit | {"stop_token_ids": [ids[1]]}
    answer = generate(worker, text="x", sampling_params=params, cache_salt=salt)
    assert answer["output_ids"] == ids[:2]
    assert answer["text"] == backend.decode(ids[:1])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[1]}

    params = limit | {"stop": [" thr"]}
    answer = generate(worker, text="x", sampling_params=params, cache_salt=salt)
    assert answer["text"] == "one two"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": " thr"}


@pytest.mark.parametrize("stop", ["four", "two", "one", " three f"])
def test_tokens_after_a_stop_string_do_not_count(
    worker: FakeWorker, backend: tokenizers.Tokenizer, stop: str
) -> None:
    ids = backend.encode("one two three four five", add_special_tokens=False).ids
    body: dict[str, Any] = {
        "text": "x",
        "sampling_params": {"max_new_tokens": len(ids), "stop": [stop]},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    answers = [
        generate(worker, **body, cache_salt=script(say=ids, burst=burst)) for burst in (1, len(ids))
    ]
    assert answers[0]["text"] == "one two three four five".split(stop)[0]
    assert answers[1]["text"] == answers[0]["text"]
    assert answers[1]["output_ids"] == answers[0]["output_ids"]
    counts = [answer["meta_info"]["completion_tokens"] for answer in answers]
    assert counts[1] == counts[0] < len(ids)
    for field in ("output_token_logprobs", "output_top_logprobs"):
        assert [len(answer["meta_info"][field]) for answer in answers] == counts


def test_a_stream_repeats_the_text_so_far(worker: FakeWorker) -> None:
    params = {"max_new_tokens": 6}
    body: dict[str, Any] = {"text": "Hello, cats", "sampling_params": params, "rid": "of-mine"}
    whole = generate(worker, **body)
    events = stream(worker, **body)
    for before, after in pairwise(events):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    for answer in (whole, events[-1]):
        assert answer["meta_info"].pop("e2e_latency") > 0
    assert events[-1] == whole
    assert whole["meta_info"]["id"] == "of-mine"


def test_batches(worker: FakeWorker) -> None:
    params = {"max_new_tokens": 3}
    for body in ({"text": ["a", "b"]}, {"input_ids": [[70, 71], [72]]}):
        answers = generate(worker, **body, sampling_params=params)
        assert len(answers) == 2
        assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [3, 3]
        events = stream(worker, **body, sampling_params=params)
        assert {event["index"] for event in events} == {0, 1}
        for index, answer in enumerate(answers):
            last = [event for event in events if event["index"] == index][-1]
            assert last["text"] == answer["text"]


def scored(token: int, text: str | None = None) -> list[Any]:
    """Returns the fake scheduler's logprobs of a token."""
    return [-token / 1024, token, text]


@pytest.mark.parametrize("start", [0, 2, 4])
def test_logprobs_of_the_prompt(worker: FakeWorker, start: int) -> None:
    ids = [70, 71, 72, 73, 74]
    body: dict[str, Any] = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": 2,
    }
    top = {token: [[0.0, token, None], [-0.125, token + 1, None]] for token in ids}
    for answer in (generate(worker, **body), stream(worker, **body)[-1]):
        meta = answer["meta_info"]
        assert meta["input_token_logprobs"] == [
            [None, ids[start], None],
            *(scored(token) for token in ids[start + 1 :]),
        ]
        assert meta["input_top_logprobs"] == [None, *(top[token] for token in ids[start + 1 :])]
        assert meta["output_token_logprobs"] == [scored(70), scored(71)]
        assert meta["output_top_logprobs"] == [top[70], top[71]]


def test_logprobs_with_their_texts(worker: FakeWorker, backend: tokenizers.Tokenizer) -> None:
    ids = backend.encode("Hello 😀").ids
    answer = generate(
        worker,
        input_ids=ids,
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        return_text_in_logprobs=True,
        logprob_start_len=0,
    )
    texts = [backend.decode([token], skip_special_tokens=False) for token in ids]
    meta = answer["meta_info"]
    assert [entry[2] for entry in meta["input_token_logprobs"]] == texts
    assert [entry[2] for entry in meta["output_token_logprobs"]] == texts[:1]
    assert "input_top_logprobs" not in meta


def test_special_tokens_and_stops_can_be_shown(
    worker: FakeWorker, backend: tokenizers.Tokenizer
) -> None:
    ids = backend.encode("one two three", add_special_tokens=False).ids
    eos, bos = backend.decode([1], skip_special_tokens=False), backend.encode("").ids
    special = backend.decode(bos, skip_special_tokens=False)
    assert eos
    assert special

    def text(say: list[int], **params: Any) -> tuple[str, Any]:
        params = {"max_new_tokens": len(say)} | params
        answer = generate(worker, text="x", sampling_params=params, cache_salt=script(say=say))
        return answer["text"], answer["meta_info"]["finish_reason"].get("matched")

    shown: dict[str, Any] = {"skip_special_tokens": False}
    assert text([*bos, *ids]) == ("one two three", None)
    assert text([*bos, *ids], **shown) == (special + "one two three", None)
    assert text([*ids, 1], **shown) == ("one two three", 1)
    assert text([*ids, 1], **shown, no_stop_trim=True) == ("one two three" + eos, 1)
    assert text([*ids, 1], no_stop_trim=True) == ("one two three", 1)
    assert text(ids, stop=[" thr"], no_stop_trim=True) == ("one two thr", " thr")


def test_a_name_for_each_prompt(worker: FakeWorker) -> None:
    params = {"max_new_tokens": 500}
    body = {"text": ["a", "b"], "rid": ["first", "second"], "sampling_params": params}

    async def run() -> list[Any]:
        async with aiohttp.ClientSession(base_url=worker.url) as http:
            asking = asyncio.create_task(
                http.post("/generate", json=body | {"cache_salt": script(hold_after=2)})
            )
            for name in ("second", "first"):
                while True:
                    async with http.post("/abort_request", json={"rid": name}) as answer:
                        if (await answer.json())["aborted"] == 1:
                            break
            return list(await (await asking).json())

    answers = asyncio.run(run())
    assert [answer["meta_info"]["id"] for answer in answers] == ["first", "second"]
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[]]}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": ["1"]}, "input_ids[0]"),
        ({"input_ids": [4096]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [10**30]}, "input_ids"),
        ({"input_ids": [[1]] * 65}, "input_ids"),
        ({"text": "a", "rid": ""}, "rid"),
        ({"text": "a", "rid": ["x", "y"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid"),
        ({"text": ["a", "b"], "rid": ["x", "y" * 257]}, "rid"),
        ({"text": "a", "rid": ["x"], "sampling_params": {"n": 2}}, "rid"),
        ({"text": "a", "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "top_logprobs_num": -1}, "top_logprobs_num"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
        ({"input_ids": [[5, 6, 7], [5]], "logprob_start_len": 1}, "logprob_start_len"),
        ({"text": "a", "return_logprob": [True]}, "return_logprob"),
        ({"text": "a", "sampling_params": {"stop_regex": "a("}}, "sampling_params.stop_regex"),
        ({"text": "a", "extra_key": "s" * 257}, "extra_key"),
        (
            {"text": "a", "sampling_params": {"spaces_between_special_tokens": False}},
            "sampling_params.spaces_between_special_tokens",
        ),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "video_data": "x"}, "video_data"),
        ({"text": "a", "session_params": {}}, "session_params"),
        ({"text": "a", "custom_logit_processor": "x"}, "custom_logit_processor"),
        ({"text": "a", "input_embeds": [[0.5]]}, "input_embeds"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "a", "cache_salt": "s" * 257}, "cache_salt"),
        ({"text": "a", "sampling_params": []}, "sampling_params"),
        ({"text": "a", "sampling_params": {"max_tokens": 1}}, "sampling_params.max_tokens"),
        ({"text": "a", "sampling_params": {"temperature": 3}}, "sampling_params.temperature"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": -1}},
            "sampling_params.max_new_tokens",
        ),
        ({"text": "a", "sampling_params": {"n": 65}}, "sampling_params.n"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
    ],
)
def test_bad_requests(worker: FakeWorker, body: dict[str, Any], param: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        generate(worker, **body)
    assert caught.value.code == 400
    error = json.load(caught.value)["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"

"""Replay: the marks for a router, and the continuation of another worker's stream.

tests/e2e/test_replay.py tests it with a model on two workers.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.http.signature import sign
from mla_router.worker.server.requests.replay import Marks, Origin
from support import client, processes
from support.fake_worker import FakeWorker, fake_worker, script
from support.processes import REPLAY_KEY
from support.replay import DONE, Stream, stream

PROMPT = [100, 101, 102]
LISTED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "mla-small",
        "messages": [{"role": "user", "content": "a"}],
        "stream_options": {"include_usage": True},
    },
    "/v1/completions": {
        "model": "mla-small",
        "prompt": PROMPT,
        "stream_options": {"include_usage": True},
    },
    "/generate": {"input_ids": PROMPT},
    "/v1/responses": {"model": "mla-small", "input": "a"},
}
WITH_DONE = [path for path in LISTED if path != "/v1/responses"]  # tested in its own file
COMPLETIONS = LISTED["/v1/completions"]
ORIGIN = Origin(bytes(16), 1, "fp_0123456789", 5, 1, [0])


def body_of(path: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """Returns a request to `path`. The endpoints have different places for sampling fields."""
    if path == "/generate":
        return LISTED[path] | {"sampling_params": {"max_new_tokens": max_tokens} | fields}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return LISTED[path] | {limit: max_tokens} | fields


def ask(worker: FakeWorker, path: str, body: dict[str, Any], **extra: Any) -> Stream:
    async def one() -> Stream:
        async with client.session() as http:
            return await stream(http, worker.url + path, body, **extra)

    return asyncio.run(one())


def anonymous(answer: Stream) -> list[Any]:
    """Returns the events without the parts that differ between requests."""
    events = [json.loads(data) for data in answer.data[:-1]]
    for event in events:
        event.pop("id", None)
        event.pop("created", None)
        for name in ("id", "e2e_latency"):
            event.get("meta_info", {}).pop(name, None)
    return [*events, answer.data[-1]]


@pytest.mark.parametrize("path", WITH_DONE)
def test_without_the_header_nothing_changes(worker: FakeWorker, path: str) -> None:
    burst = 6 if path == "/generate" else 1  # the number of its events depends on time
    body = body_of(path, 6) | {"cache_salt": script(say=[300, 301], cached=2, burst=burst)}
    plain, asked = ask(worker, path, body, replay=False), ask(worker, path, body)
    assert anonymous(plain) == anonymous(asked)
    assert "x-mla-replay" not in plain.headers
    assert not any(event.marks for event in plain.events)
    del asked.headers["x-mla-replay"]
    assert plain.headers.keys() == asked.headers.keys()
    (choice,) = ask(worker, path, body).after(len(asked.events))["choices"]
    assert choice == {"token_ids": [300, 301] * 3, "finish_reason": "length"}


@pytest.mark.parametrize("stop", [None, "END", "D 😀 o", "r E", " 😀", "Hel"])
@pytest.mark.parametrize("path", WITH_DONE)
def test_every_cut(
    worker: FakeWorker, backend: tokenizers.Tokenizer, path: str, stop: str | None
) -> None:
    """Breaks within characters of several tokens, within stop strings, and before and after every finish."""
    say = backend.encode("Hello 😀 for END 😀 of 日本語", add_special_tokens=False).ids
    body = body_of(path, len(say), stop=stop)
    uncut = ask(worker, path, body | {"cache_salt": script(say=say)})
    assert uncut.data[-1] == DONE
    usage = path != "/generate"
    for cut in range(1, len(uncut.events) - usage):
        given = uncut.after(cut)
        salt = script(say=say)
        again = ask(worker, path, body | {"cache_salt": salt}, continuation=given)
        expected = [event.body for event in uncut.events[cut:-1]]
        ours = [event.body for event in again.events[:-1]]
        if path == "/generate":  # the number of its events depends on time
            expected, ours = expected[-1:], ours[-1:]
            for end in [*expected, *ours]:
                del end["meta_info"]["e2e_latency"]
        assert ours == expected, (cut, given)
        assert again.data[-1] == DONE
        # A stream that breaks again has listed all tokens.
        both = again.after(len(again.events), given)["choices"]
        assert both == uncut.after(len(uncut.events))["choices"]


def by_choice(events: list[Any]) -> dict[int, dict[str, Any]]:
    """Joins the events of text completions."""
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        whole = choices.setdefault(choice["index"], {"text": ""})
        whole["text"] += choice["text"]
        whole["finish_reason"] = choice["finish_reason"]
        for name, values in choice["logprobs"].items():
            whole[name] = whole.get(name, []) + values
    return choices


@pytest.mark.parametrize("max_tokens", [0, 7])
def test_every_cut_with_echo_and_logprobs(
    worker: FakeWorker, backend: tokenizers.Tokenizer, max_tokens: int
) -> None:
    """Each choice has its prompt once, and the logprob of each token once."""
    prompts = [backend.encode(text).ids for text in ("Hello 😀", "日本")]
    body = LISTED["/v1/completions"] | {
        "prompt": prompts,
        "n": 2,
        "max_tokens": max_tokens,
        "echo": True,
        "logprobs": 2,
        "cache_salt": script(say=prompts[1][1:] + prompts[0][1:]),
    }
    uncut = ask(worker, "/v1/completions", body)
    bodies = [event.body for event in uncut.events[:-1]]
    expected = by_choice(bodies)
    assert len(expected) == 4
    assert len(expected[0]["tokens"]) == len(prompts[0]) + max_tokens
    for cut in range(1, len(bodies)):
        again = ask(worker, "/v1/completions", body, continuation=uncut.after(cut))
        rest = [event.body for event in again.events[:-1]]
        assert by_choice(bodies[:cut] + rest) == expected, cut


@pytest.mark.parametrize("path", WITH_DONE)
def test_only_the_end_was_missing(worker: FakeWorker, path: str) -> None:
    body = body_of(path, 3)
    uncut = ask(worker, path, body)
    finished = uncut.after(len(uncut.events))
    asked = len(worker.received("Generate"))
    again = ask(worker, path, body, continuation=finished)
    assert again.data == uncut.data[-1 if path == "/generate" else -2 :]
    again = ask(worker, path, body | {"stream_options": None}, continuation=finished)
    assert again.data == [DONE]
    assert len(worker.received("Generate")) == asked, "there was nothing to compute"


def test_the_request_to_the_scheduler(worker: FakeWorker) -> None:
    """The ids follow the prompts, with the seeds of the first worker."""
    body = COMPLETIONS | {"prompt": [[101, 102], [103, 104], [105]], "max_tokens": 8}
    first = ask(worker, "/v1/completions", body)
    begun = worker.generates()[-3:]
    seeds = [generate.sampling.seed for generate in begun]
    assert len(set(seeds)) == 3, "prompts of a batch differ, or equal ones had equal answers"
    choices = [
        {"token_ids": [107, 108, 109], "finish_reason": None},
        {"token_ids": [107, 110], "finish_reason": "stop"},
    ]
    given = {"response": first.headers["x-mla-replay"], "choices": choices}
    again = ask(worker, "/v1/completions", body, continuation=given)
    assert [event.body["choices"][0]["index"] for event in again.events[:-2]].count(1) == 0
    asked = worker.generates()[-2:]
    assert [generate.prompt for generate in asked] == [[101, 102], [105]]
    assert [generate.output for generate in asked] == [[107, 108, 109], []]
    assert [generate.sampling.max_tokens for generate in asked] == [8, 8]
    assert [generate.sampling.seed for generate in asked] == [seeds[0], seeds[2]]
    assert not {one.rid for one in begun} & {one.rid for one in asked}, "own names inside"
    usage = again.events[-2].body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 8 + 2 + 8)


def test_a_chosen_seed_is_that_of_all_prompts(worker: FakeWorker) -> None:
    body = COMPLETIONS | {"prompt": [[1], [2]], "max_tokens": 1, "seed": 77}
    given = ask(worker, "/v1/completions", body).after(0)
    assert ask(worker, "/v1/completions", body, continuation=given).status == 200
    assert [generate.sampling.seed for generate in worker.generates()[-4:]] == [77] * 4


def test_cached_tokens(worker: FakeWorker) -> None:
    """The client receives the cached tokens of the first worker; the router those of this worker."""
    body = COMPLETIONS | {"max_tokens": 8}
    uncut = ask(worker, "/v1/completions", body | {"cache_salt": script(cached=2)})
    assert uncut.headers["x-mla-cached-tokens"] == "2"
    given = uncut.after(4)
    for cached, told in (0, "0"), (1, "1"), (6, "3"):  # 3 of prompt, 3 of output
        salt = script(cached=cached)
        again = ask(worker, "/v1/completions", body | {"cache_salt": salt}, continuation=given)
        assert again.headers["x-mla-prompt-tokens"] == "3"
        assert again.headers["x-mla-cached-tokens"] == told
        assert again.events[-2].body["usage"] == uncut.events[-2].body["usage"]
        assert again.after(0)["response"] == given["response"]


def test_a_continued_stream_while_its_first_part_runs(worker: FakeWorker) -> None:
    async def run() -> None:
        async with client.session() as http:
            body = body_of("/generate", 9) | {"rid": "twice", "stream": True}
            held = body | {"cache_salt": script(hold_after=2)}
            url, headers = worker.url + "/generate", {"x-mla-replay": "1"}
            async with http.post(url, json=held, headers=headers) as before:
                given = {"response": before.headers["x-mla-replay"], "choices": []}
                again = await stream(http, url, body, continuation=given)
                assert again.data[-1] == DONE
            async with http.post(worker.url + "/abort_request", json={"rid": "twice"}) as response:
                assert await response.json() == {"aborted": 0}

    asyncio.run(run())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no object": ({"continuation": 1}, ""),
    "empty": ({"continuation": {}}, ""),
    "another version": ({"response": "2.AAAA"}, ".response"),
    "no version": ({"response": ""}, ".response"),
    "not base64": ({"response": "1.!"}, ".response"),
    "not msgpack": ({"response": "1.////"}, ".response"),
    "too long": ({"response": "1." + "A" * 511}, ".response"),
    "not ASCII": ({"response": "1.é"}, ".response"),
    "of another batch": (
        {"response": msgspec.structs.replace(ORIGIN, cached_tokens=[0, 0]).encode()},
        ".response",
    ),
    "a negative count of events": ({"events": -1}, ".events"),
    "too many choices": (
        {"choices": [{"token_ids": []}, {"token_ids": []}]},
        ".choices",
    ),
    "an unknown reason": ({"choices": [{"token_ids": [], "finish_reason": "tired"}]}, ".choices"),
    "a negative id": ({"choices": [{"token_ids": [-1]}]}, ".choices[0].token_ids"),
    "beyond the vocabulary": ({"choices": [{"token_ids": [4096]}]}, ".choices[0].token_ids"),
    "a huge id": ({"choices": [{"token_ids": [2**64]}]}, ".choices"),
    "more than asked for": ({"choices": [{"token_ids": [9] * 6}]}, ".choices[0].token_ids"),
    "on after a stop": ({"choices": [{"token_ids": [9, 50, 9]}]}, ".choices[0].token_ids"),
    "an unknown field": ({"choices": [{"token_ids": [], "text": ""}]}, ".choices"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("path", LISTED)
def test_refused(worker: FakeWorker, path: str, case: str) -> None:
    fields, where = REFUSED[case]
    given = {"response": ORIGIN.encode(), "choices": []} | fields
    asked = len(worker.received("Generate"))
    body = body_of(path, 5, stop_token_ids=[50])
    answer = ask(worker, path, body, continuation=given.pop("continuation", given))
    assert answer.status == 400
    error = json.loads(answer.error)["error"]
    assert error["param"].startswith("continuation" + where), error
    assert "continuation" in error["message"]
    assert len(worker.received("Generate")) == asked


@pytest.mark.parametrize("path", LISTED)
def test_only_for_a_router_that_streams(worker: FakeWorker, path: str) -> None:
    given = {"response": ORIGIN.encode(), "choices": []}
    whole = body_of(path, 5)
    whole.pop("stream_options", None)  # refused for itself without a stream
    refused = [
        ask(worker, path, body_of(path, 5), continuation=given, replay=False),
        ask(worker, path, whole, continuation=given, stream=False),
    ]
    if path == "/generate":  # it would have to repeat unknown logprobs
        logprobs = body_of(path, 5) | {"return_logprob": True}
        assert "x-mla-replay" not in ask(worker, path, logprobs).headers
        refused.append(ask(worker, path, logprobs, continuation=given))
    for answer in refused:
        assert answer.status == 400
        assert json.loads(answer.error)["error"]["param"] == "continuation"


@pytest.mark.parametrize("path", LISTED)
def test_only_with_the_signature_of_a_router(worker: FakeWorker, path: str) -> None:
    """Else a client could take another answer's id, or write text of the assistant."""
    body = body_of(path, 5) | {"stream": True}
    given = {"response": ORIGIN.encode(), "choices": []}
    sent = json.dumps(body | {"continuation": given}).encode()
    good = sign(REPLAY_KEY, path, sent)
    forged = {
        "": sent,
        sign("another key", path, sent): sent,
        sign(REPLAY_KEY, "/elsewhere", sent): sent,
        good: sent.replace(b"true", b"true "),  # another body
        good[:-1]: sent,
        "é": sent,
    }
    asked = len(worker.received("Generate"))
    for signature, sending in forged.items():
        headers = {"x-mla-replay": "1", "Content-Type": "application/json"}
        if signature:
            headers["x-mla-signature"] = signature
        status, answer = asyncio.run(post_as(worker.url + path, sending, headers))
        assert status == 400, signature
        assert answer["error"]["param"] == "continuation"
    assert len(worker.received("Generate")) == asked
    headers["x-mla-signature"] = good
    status, _ = asyncio.run(post_as(worker.url + path, sent, headers))
    assert status == 200


async def post_as(url: str, body: bytes, headers: dict[str, str]) -> tuple[int, Any]:
    async with client.session() as http, http.post(url, data=body, headers=headers) as response:
        streamed = response.content_type == "text/event-stream"
        return response.status, None if streamed else await response.json()


def test_a_worker_without_a_key_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "REPLAY_KEY", "")
    with fake_worker() as keyless:
        body = body_of("/generate", 5)
        answer = ask(keyless, "/generate", body)
        assert answer.status == 200
        assert "x-mla-replay" not in answer.headers
        assert not any(event.marks for event in answer.events)
        given = {"response": ORIGIN.encode(), "choices": []}
        assert ask(keyless, "/generate", body, continuation=given).status == 400
        assert ask(keyless, "/generate", body, continuation=given, key="").status == 400


def test_marks() -> None:
    marks = Marks(wanted=True)
    assert marks.take(0) == b""
    marks.add(0, [1, 2])
    marks.add(3, [7])
    marks.add(0, [5])
    assert marks.take(0) == b":mla 0 1,2,5\n"
    assert marks.take(0) == b""
    assert marks.take(3, "stop") == b":mla 3 7 stop\n"
    assert marks.take(3, "length") == b":mla 3  length\n"
    silent = Marks(wanted=False)
    silent.add(0, [1])
    assert silent.take(0, "stop") == b""


counts = st.integers(0, 2**32 - 1)
origins = st.builds(
    Origin,
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**40 - 1),
    st.from_regex(r"\Afp_[0-9a-f]{10}\Z"),
    st.integers(0, 2**63 - 1),
    st.integers(0, 1),
    st.lists(st.none() | counts, max_size=64),
)


@given(origins)
def test_an_origin_survives_encoding(origin: Origin) -> None:
    text = origin.encode()
    assert Origin.decode(text) == origin
    assert len(text) <= 512
    assert text.isascii()
    assert text.isprintable()
    assert json.dumps(text) == f'"{text}"', "needs no escapes"


def test_the_longest_origin() -> None:
    origin = Origin(b"\xff" * 16, 2**40 - 1, "fp_0123456789", 2**63 - 1, 1, [2**32 - 1] * 64)
    assert len(origin.encode()) <= 512
    assert Origin.decode(origin.encode()) == origin


@given(origins, st.data())
def test_a_damaged_origin_is_refused_or_another_one(origin: Origin, data: st.DataObject) -> None:
    text = list(origin.encode())
    visible = st.characters(min_codepoint=0x21, max_codepoint=0x7E)
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(visible)
    text = text[: data.draw(st.integers(0, len(text)))]
    try:
        assert isinstance(Origin.decode("".join(text)), Origin)
    except InvalidRequest as error:
        assert error.body.error.param == "continuation.response"

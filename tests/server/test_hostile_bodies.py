"""Hostile bodies: a 4xx for the sender, no effect on others."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from mla_router.worker.server.http.body import MAX_VALUES
from mla_router.worker.server.routes import ROUTES
from support.examples import examples
from support.fake_worker import FakeWorker
from support.processes import post_json

ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "mla-small",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
    },
    "/v1/completions": {"model": "mla-small", "prompt": "a", "max_tokens": 1},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    "/v1/responses": {"model": "mla-small", "input": "a", "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}
OTHERS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/abort_request": {"rid": "nobody's"},
}
# The required fields of each body.
REQUIRED = {"messages", "prompt", "text", "tokens", "rid", "input"}
REQUIRED_THERE = {("/v1/messages", "max_tokens")}
FIELDS = {
    route.path: route.body.__struct_fields__ for route in ROUTES if route.path in ENDPOINTS | OTHERS
}


def send(
    worker: FakeWorker, path: str, body: bytes, headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(worker.url.removeprefix("http://"))
    try:
        kind = {"Content-Type": "application/json"}
        connection.request("POST", path, body, kind | dict(headers or {}))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def assert_refused(
    worker: FakeWorker,
    path: str,
    body: bytes,
    status: int = 400,
    headers: Mapping[str, str] | None = None,
) -> None:
    got, answer = send(worker, path, body, headers)
    assert got == status, (body[:80], answer)
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    assert len(json.dumps(answer)) < 2000, "the answer repeats what was sent"


def assert_serves(worker: FakeWorker) -> None:
    for path, body in (ENDPOINTS | OTHERS).items():
        assert post_json(worker.url + path, body)


HOSTILE: list[bytes] = [
    b"",
    b"\x00",
    b"{",
    b"nul",
    b"[]" * 1000,
    b'{"a":' * 200_000,
    b"[" * 200_000,
    b'{"unknown":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"model": NaN}',
    b'{"temperature": Infinity}',
    b'{"temperature": 1e999999999}',
    b'{"presence_penalty": 1e999}',
    b'{"logit_bias": {"1": -1e999}}',
    b'{"logit_bias": {"1": NaN}}',
    b'{"seed": ' + b"9" * 10_000 + b"}",
    b'{"max_tokens": ' + b"9" * 10_000 + b"}",
    b'{"model": "\\ud800"}',
    b'{"model": "\xff\xfe"}',
    b'\xef\xbb\xbf{"model": "mla-small"}',
]


@pytest.mark.parametrize("body", HOSTILE, ids=lambda body: repr(body[:20]))
@pytest.mark.parametrize("path", ENDPOINTS | OTHERS)
def test_hostile_bytes(worker: FakeWorker, path: str, body: bytes) -> None:
    assert_refused(worker, path, body)


@pytest.mark.parametrize("path", FIELDS)
def test_a_field_of_the_wrong_type(worker: FakeWorker, path: str) -> None:
    """No field of any endpoint is a list of lists of empty lists."""
    for name in FIELDS[path]:
        body = (ENDPOINTS | OTHERS)[path] | {name: [[[]]]}
        status, answer = send(worker, path, json.dumps(body).encode())
        assert status == 400, (name, answer)
        assert answer["error"]["param"].startswith(name), (name, answer)


@pytest.mark.parametrize("path", FIELDS)
def test_null_is_as_good_as_nothing(worker: FakeWorker, path: str) -> None:
    body = (ENDPOINTS | OTHERS)[path]
    for name in FIELDS[path]:
        status, answer = send(worker, path, json.dumps(body | {name: None}).encode())
        needed = name in body and (name in REQUIRED or (path, name) in REQUIRED_THERE)
        assert status == (400 if needed else 200), (name, answer)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "GZIP"])
@pytest.mark.parametrize("body", [gzip.compress(b"{}", mtime=0), b"garbage garbage"])
def test_compressed_bodies_are_refused_unopened(
    worker: FakeWorker, encoding: str, body: bytes
) -> None:
    headers = {"Content-Encoding": encoding}
    for path in ENDPOINTS | OTHERS:
        assert_refused(worker, path, body, 415, headers)
    assert_serves(worker)


MANY = 100_000  # more than the context length
MESSAGE = {"role": "user", "content": ""}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": ""}
CROWDED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [MESSAGE] * MANY}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * MANY}]},
    ),
    ("/v1/responses", {"input": [{"type": "message", **MESSAGE}] * MANY}),
    ("/v1/responses", {"input": [CALL] * MANY}),
    ("/v1/messages", {"messages": [MESSAGE] * MANY}),
    ("/tokenize", {"prompt": None, "messages": [MESSAGE] * MANY}),
]


@pytest.mark.parametrize(("path", "fields"), CROWDED)
def test_more_messages_than_the_context_holds(
    worker: FakeWorker, path: str, fields: dict[str, Any]
) -> None:
    """They are refused before their conversion, which would block the event loop for seconds."""
    body = json.dumps((ENDPOINTS | OTHERS)[path] | fields).encode()
    status, answer = send(worker, path, body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["param"] == ("input" if path == "/v1/responses" else "messages")


@pytest.mark.parametrize("levels", range(955, 990, 3))
def test_schemas_of_any_depth(worker: FakeWorker, levels: int) -> None:
    """Some can be decoded, but not encoded within another object."""
    schema = '{"a":' * levels + "1" + "}" * levels
    tag = '{"begin":"<","schema":SCHEMA,"end":">"}'
    formats = (
        '{"type":"json_schema","json_schema":{"name":"x","schema":SCHEMA}}',
        '{"type":"structural_tag","structures":[' + tag + '],"triggers":["<"]}',
        '{"type":"structural_tag","format":SCHEMA}',
    )
    bodies = [f'"response_format":{form}' for form in formats]
    tools = '"tools":[{"type":"function","function":{"name":"f","parameters":SCHEMA}}]'
    bodies += [f'{tools},"tool_choice":"required"', f"{tools},{bodies[0]}"]
    start = json.dumps(ENDPOINTS["/v1/chat/completions"])[:-1]
    for body in bodies:
        status, answer = send(
            worker, "/v1/chat/completions", f"{start},{body}}}".replace("SCHEMA", schema).encode()
        )
        assert status in (200, 400), answer


SURROGATES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "SURROGATE"}]},
    "/v1/completions": {"prompt": ["a", "SURROGATE"]},
    "/generate": {"text": "SURROGATE"},
    "/v1/responses": {"input": "SURROGATE"},
    "/v1/messages": {"messages": [{"role": "user", "content": "SURROGATE"}]},
    "/tokenize": {"prompt": "SURROGATE"},
    "/abort_request": {"rid": "SURROGATE"},
}


@pytest.mark.parametrize("half", ["\\ud800", "\\udfff", "\\udc00\\ud800", "\\ud800x"])
@pytest.mark.parametrize("path", SURROGATES)
def test_halves_of_characters(worker: FakeWorker, path: str, half: str) -> None:
    """JSON allows lone surrogates, UTF-8 does not: tokenizers cannot encode them."""
    body = json.dumps((ENDPOINTS | OTHERS)[path] | SURROGATES[path]).replace("SURROGATE", half)
    assert_refused(worker, path, body.encode())


CHANGES: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", 2.5),
    ("temperature", 1e308),
    ("temperature", "0"),
    ("top_p", 0),
    ("top_p", -0.0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("max_tokens", -1),
    ("max_tokens", -(2**63)),
    ("max_tokens", 2**31),
    ("max_tokens", 10**40),
    ("max_tokens", 1024),  # together with the prompt more than the context length
    ("seed", 2**64),
    ("n", 0),
    ("n", 65),
    ("n", True),
    ("n", "1"),
    ("n", 10**9),
    ("stop", [""]),
    ("stop", ["x"] * 17),
    ("stop", "x" * 1000),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**20]),
    ("stop_token_ids", list(range(300))),
    ("min_p", -0.1),
    ("min_p", "0.1"),
    ("min_p", True),
    ("min_tokens", -1),
    ("min_tokens", 2),  # more than max_tokens
    ("min_tokens", 10**40),
    ("min_tokens", 0.5),
    ("repetition_penalty", 0),
    ("repetition_penalty", 2.5),
    ("presence_penalty", 2.1),
    ("presence_penalty", 10**400),
    ("frequency_penalty", -(10**20)),
    ("frequency_penalty", [1]),
    ("logit_bias", {str(token): 1 for token in range(1025)}),
    ("logit_bias", {"4096": 1}),
    ("logit_bias", {"9" * 10_000: 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"01": 1}),
    ("logit_bias", {"\u0661": 1}),
    ("logit_bias", {"": 1}),
    ("logit_bias", {"1": 100.5}),
    ("logit_bias", {"1": 10**400}),
    ("logit_bias", {"1": None}),
    ("logit_bias", [[1, 1]]),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("stream", "yes"),
    ("stream_options", True),
    ("cache_salt", "x" * 10_000),
    ("cache_salt", 5),
    ("model", ["mla-small"]),
]


@pytest.mark.parametrize(("name", "value"), CHANGES)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_hostile_fields(worker: FakeWorker, path: str, name: str, value: Any) -> None:
    assert_refused(worker, path, json.dumps(ENDPOINTS[path] | {name: value}).encode())


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        {},
        "hi",
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "tool", "content": None, "tool_call_id": "1"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}],
    ],
)
def test_hostile_messages(worker: FakeWorker, messages: Any) -> None:
    body = {"model": "mla-small", "messages": messages}
    assert_refused(worker, "/v1/chat/completions", json.dumps(body).encode())


@pytest.mark.parametrize(
    "prompt",
    [None, [], [[]], {}, 5, [1, "a"], [[1], "a"], [4096], [-1], [1.5], [True], [["a"]], ["a"] * 65],
)
def test_hostile_prompts(worker: FakeWorker, prompt: Any) -> None:
    body = {"model": "mla-small", "prompt": prompt}
    assert_refused(worker, "/v1/completions", json.dumps(body).encode())


def test_a_prompt_that_is_too_long(worker: FakeWorker) -> None:
    for prompt in ([5] * 1024, [5] * 100_000, "word " * 2000, "x" * 10_000_000):
        body = {"model": "mla-small", "prompt": prompt}
        assert_refused(worker, "/v1/completions", json.dumps(body).encode())


@pytest.mark.parametrize(
    ("path", "words"),
    [(path, 2000) for path in ENDPOINTS]
    # More characters than any 1,024 tokens have: refused before it is tokenized
    + [(path, 200_000) for path in (*ENDPOINTS, "/v1/messages/count_tokens", "/tokenize")],
)
def test_a_text_that_is_too_long_is_named(worker: FakeWorker, path: str, words: int) -> None:
    body = (ENDPOINTS | OTHERS).get(path, ENDPOINTS["/v1/messages"])
    (field,) = {"messages", "prompt", "text", "input"} & body.keys()
    text = "word " * words
    long = {field: [{"role": "user", "content": text}] if field == "messages" else text}
    status, answer = send(worker, path, json.dumps(body | long).encode())
    assert (status, answer["error"]["param"]) == (400, field), answer


def test_control_characters_and_strange_text_are_text(worker: FakeWorker) -> None:
    text = (
        "".join(map(chr, range(32))) + "\u202e\u0300\u0300\x7f\ufffe\U0010ffff<｜end▁of▁sentence｜>"
    )
    body = ENDPOINTS["/v1/chat/completions"] | {"messages": [{"role": "user", "content": text}]}
    status, answer = send(worker, "/v1/chat/completions", json.dumps(body).encode())
    assert status == 200, answer


ITEMS = MAX_VALUES
SWOLLEN = {
    "ids": ("/v1/completions", '{"prompt":[' + "1," * ITEMS + "1]}"),
    "messages": (
        "/v1/chat/completions",
        '{"messages":[' + '{"role":"user","content":""},' * (ITEMS // 2) + "{}]}",
    ),
    "biases": (
        "/generate",
        '{"text":"a","sampling_params":{"logit_bias":{' + '"1":1,' * ITEMS + '"1":1}}}',
    ),
    "arrays of one": ("/v1/responses", '{"input":"a","x":[' + "[[[[1]]]]," * (ITEMS // 4) + "1]}"),
    "objects of one": ("/v1/messages", '{"x":[' + '{"a":{"a":1}},' * (ITEMS // 2) + "1]}"),
    "tokens": ("/detokenize", '{"tokens":[' + "1," * ITEMS + "1]}"),
}


@pytest.mark.parametrize("name", SWOLLEN)
def test_millions_of_values_are_not_decoded(worker: FakeWorker, name: str) -> None:
    """That would stop the streams of others for seconds."""
    path, body = SWOLLEN[name]
    status, answer = send(worker, path, body.encode())
    assert status == 400
    assert "divide it into several requests" in answer["error"]["message"]


def test_long_texts_with_few_values_are_decoded(worker: FakeWorker) -> None:
    body = ENDPOINTS["/v1/completions"] | {"user": "a, [b] {c} " * (MAX_VALUES // 4)}
    status, answer = send(worker, "/v1/completions", json.dumps(body).encode())
    assert status == 200, answer


def test_a_body_over_the_limit(worker: FakeWorker) -> None:
    body = json.dumps({"model": "mla-small", "prompt": "x" * ((64 << 20) + 1)}).encode()
    # The answer may arrive, and the connection close, before the end of the upload.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        assert_refused(worker, "/v1/completions", body, 413)
    assert_serves(worker)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("path", ENDPOINTS)
@given(data=st.data())
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_fields_never_break_it(worker: FakeWorker, path: str, data: st.DataObject) -> None:
    names = [
        "model", "messages", "prompt", "text", "input_ids", "sampling_params", "temperature",
        "top_p", "top_k", "stop", "max_tokens", "stop_token_ids", "logprobs", "seed", "n", "tools",
        "ignore_eos", "cache_salt", "rid", "logit_bias", "response_format", "stream_options",
        "min_p", "min_tokens", "repetition_penalty", "frequency_penalty", "presence_penalty",
    ]  # fmt: skip
    changes = data.draw(st.dictionaries(st.sampled_from(names), json_values, max_size=3))
    status, answer = send(worker, path, json.dumps(ENDPOINTS[path] | changes).encode())
    assert status in (200, 400, 404), answer
    if status != 200:
        assert set(answer) == {"error"}


def test_after_all_that_it_still_serves(worker: FakeWorker) -> None:
    assert_serves(worker)

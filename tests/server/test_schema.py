"""Parsing of bodies: what is refused is refused with the field's name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mla_router.worker.server.errors import InvalidRequest
from mla_router.worker.server.schema.chat import ChatRequest
from mla_router.worker.server.schema.completions import CompletionRequest
from mla_router.worker.server.schema.native import GenerateRequest, NativeSampling
from mla_router.worker.server.schema.parse import parse
from mla_router.worker.server.schema.unsupported import NEUTRAL, NULL_ONLY, refuse_unsupported

CHAT = msgspec.json.Decoder(ChatRequest)
COMPLETION = msgspec.json.Decoder(CompletionRequest)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"temperature": "hot"}', "temperature"),
        (b'{"temperature": true}', "temperature"),
        (b'{"temperature": 1e400}', "temperature"),
        (b'{"max_tokens": 1.5}', "max_tokens"),
        (b'{"max_tokens": "5"}', "max_tokens"),
        (b'{"messages": "hello"}', "messages"),
        (b'{"messages": [{"content": "x"}]}', "messages[0]"),
        (b'{"messages": [{"role": 5}]}', "messages[0].role"),
        (b'{"messages": [{"role": "user", "content": [{"text": "x"}]}]}', "messages[0].content[0]"),
        (b'{"stop": [1]}', "stop[0]"),
        (b'{"stream": 1}', "stream"),
        (b'{"n": true}', "n"),
        (b'{"top_logprobs": "5"}', "top_logprobs"),
        (b'{"stream_options": []}', "stream_options"),
        (b'{"stop_token_ids": [1.0]}', "stop_token_ids[0]"),
    ],
)
def test_a_wrong_type_names_its_field(body: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(body, CHAT)
    assert caught.value.body.error.param == param
    assert param in caught.value.body.error.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"a": 1} {}',
        b'\xef\xbb\xbf{"a": 1}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"model": "\xff"}',
        b'{"model": "\xed\xa0\x80"}',
        b'{"model": "\\ud800"}',
        b'{"model": "\\ud800abc"}',
        b'{"model": "a\nb"}',
        b'{"tools": ' + b"[" * 100_000,
        b'{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"unknown": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    ],
    ids=lambda body: repr(body[:24]),
)
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse(body, CHAT)


def test_unknown_fields_are_ignored() -> None:
    request = parse(b'{"model": "m", "user": "u", "metadata": {"a": [1]}, "model": "n"}', CHAT)
    assert request.model == "n"


def test_prompts_of_all_four_kinds() -> None:
    for prompt in ("text", ["a", "b"], [1, 2], [[1], [2, 3]]):
        assert parse(msgspec.json.encode({"prompt": prompt}), COMPLETION).prompt == prompt


UNSUPPORTED: list[tuple[type[msgspec.Struct], str, Any]] = [
    (ChatRequest, "chat_template", "{{ 1 }}"),
    (ChatRequest, "guided_choice", ["yes", "no"]),
    (ChatRequest, "structured_outputs", {"choice": ["yes", "no"]}),
    (CompletionRequest, "allowed_token_ids", []),
    (CompletionRequest, "bad_words", ["no"]),
    (CompletionRequest, "suffix", "end"),
    (GenerateRequest, "token_ids_logprob", [1]),
    (GenerateRequest, "image_data", "x"),
    (GenerateRequest, "custom_logit_processor", "x"),
    (NativeSampling, "stop_regex", "a+"),
]


@pytest.mark.parametrize(("kind", "name", "value"), UNSUPPORTED)
def test_unsupported_fields_are_refused_by_name(
    kind: type[msgspec.Struct], name: str, value: Any
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        refuse_unsupported(kind(**{name: value}))
    assert caught.value.body.error.param == name
    assert caught.value.body.error.code == "unsupported_parameter"


def test_neutral_values_pass() -> None:
    for kind in (ChatRequest, CompletionRequest, GenerateRequest, NativeSampling):
        for name in kind.__struct_fields__:
            for value in NEUTRAL.get(name, ()):
                refuse_unsupported(kind(**{name: value}))
            refuse_unsupported(kind(**{name: None}))


def test_every_untyped_field_is_refused_somewhere() -> None:
    """An `Any` field that nobody checks would be read and silently dropped."""
    for kind in (ChatRequest, CompletionRequest, GenerateRequest, NativeSampling):
        for info in msgspec.structs.fields(kind):
            if info.type is Any:
                assert info.name in NEUTRAL.keys() | NULL_ONLY, f"{kind.__name__}.{info.name}"

"""Structured outputs over HTTP, from a model with random weights: only the masks make them valid."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import urllib.error
from collections.abc import AsyncIterator, Iterator
from enum import Enum
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from support import client, processes, procfs
from support.fake_worker import fake_worker
from support.processes import Running
from support.tiny_model import CONFIGS, write_tiny_model

MODEL = "tiny"
CONTEXT = 32_768
ENDLESS = 20_000  # tokens of a stream that does not end during the test
MESSAGES: Any = [{"role": "user", "content": "Who?"}]


class Unit(Enum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


class Weather(BaseModel):
    unit: Unit
    degrees: int
    sunny: bool | None


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, **CONFIGS["v3"] | {"max_position_embeddings": CONTEXT})
    with processes.worker(folder, served_model_name=MODEL) as running:
        yield running


@pytest.fixture
def api(worker: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=worker.url + "/v1", api_key="none", max_retries=0) as api:
        yield api


def test_parse_gives_the_model_that_was_asked_for(api: openai.OpenAI) -> None:
    for seed in range(5):
        answer = api.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=Weather, seed=seed, temperature=1.0
        )
        assert isinstance(answer.choices[0].message.parsed, Weather)
        assert answer.choices[0].finish_reason == "stop"


def test_a_stream_is_the_same_json(api: openai.OpenAI) -> None:
    schema = {"name": "weather", "schema": Weather.model_json_schema(), "strict": False}
    body: Any = {
        "model": MODEL,
        "messages": MESSAGES,
        "response_format": {"type": "json_schema", "json_schema": schema},
        "seed": 3,
        "logprobs": True,
    }
    whole = api.chat.completions.create(**body)
    parts = [
        chunk.choices[0].delta.content or ""
        for chunk in api.chat.completions.create(stream=True, **body)
    ]
    assert "".join(parts) == whole.choices[0].message.content
    Weather.model_validate_json("".join(parts))


def test_several_answers_in_a_completion(api: openai.OpenAI) -> None:
    answer = api.completions.create(
        model=MODEL, prompt=["a", "b"], n=3, max_tokens=60, extra_body={"regex": "[a-c]{4}(x|y)"}
    )
    assert len(answer.choices) == 6
    for choice in answer.choices:
        assert re.fullmatch("[a-c]{4}(x|y)", choice.text), choice.text


def test_the_native_endpoint(worker: Running) -> None:
    for field, value, pattern in (
        ("regex", "(yes|no)!", "(yes|no)!"),
        ("ebnf", 'root ::= "<" [a-f]{3} ">"', "<[a-f]{3}>"),
        ("json_schema", '{"enum": ["red", "blue"]}', '"(red|blue)"'),
    ):
        body = {"text": "Hello", "sampling_params": {field: value, "max_new_tokens": 30}}
        answer = processes.post_json(worker.url + "/generate", body)
        assert re.fullmatch(pattern, answer["text"]), answer
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_structures_in_free_text(api: openai.OpenAI) -> None:
    tag = {"begin": "<n>", "schema": {"enum": [12, 34]}, "end": "</n>"}
    form = {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "The answer is "},
                {
                    "type": "tag",
                    "begin": tag["begin"],
                    "content": {"type": "json_schema", "json_schema": tag["schema"]},
                    "end": tag["end"],
                },
            ],
        },
    }
    answer = api.chat.completions.create(
        model=MODEL, messages=MESSAGES, extra_body={"response_format": form}
    )
    assert re.fullmatch("The answer is <n>(12|34)</n>", answer.choices[0].message.content or ""), (
        answer
    )


def asking(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def tools(*schemas: Any) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": f"f{index}", "parameters": schema}}
        for index, schema in enumerate(schemas)
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "(a"}, "regex"),
        ({"ebnf": "root ::= nobody"}, "ebnf"),
        ({"response_format": asking({"not": {}})}, "response_format.json_schema.schema"),
        (
            {"response_format": asking({"not": {}}), "tools": tools({})},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": asking({}), "tools": tools({}, {"not": {}})},
            "tools[1].function.parameters",
        ),
        (
            {"tools": tools({}, {"type": "no"}), "tool_choice": "required"},
            "tools[1].function.parameters",
        ),
    ],
)
def test_a_bad_grammar_is_a_400_that_names_the_field(
    api: openai.OpenAI, fields: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        api.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=stream, extra_body=fields
        )
    assert refused.value.param == param
    assert refused.value.code == "invalid_grammar"
    assert refused.value.message.count(param) == 1


BOMBS: list[tuple[str, Any]] = [
    ("json_schema", '{"type":"array","items":' * 5000 + "{}" + "}" * 5000),
    ("json_schema", {"type": "object", "properties": {f"p{i}": {} for i in range(20_000)}}),
    ("json_schema", {"enum": ["x" * 100] * 200_000}),  # 20 MB
    ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    ("regex", "(" * 50_000 + "a" + ")" * 50_000),
    ("ebnf", "root ::= root"),
    # It ends with twenty rare characters, which random draws do not reach before the ambiguity is expensive.
    ("ebnf", 'root ::= s "\\u0001"{20}\ns ::= s s s | s s | [^\\u0002] | ""'),
]


def test_expensive_grammars_get_a_400_and_streams_continue(worker: Running) -> None:
    """In the meantime a stream receives its tokens, each in its own event."""

    async def attack() -> None:
        async with client.session() as http:
            body = {"model": MODEL, "prompt": "Hello", "stream": True, "max_tokens": ENDLESS}
            async with http.post(
                worker.url + "/v1/completions", json=body | {"ignore_eos": True}
            ) as stream:
                events = client.sse_events(stream)
                await anext(events)
                said = Said()
                reading = asyncio.create_task(said.count(events))
                for field, value in BOMBS:
                    bomb = {"text": "x", "sampling_params": {field: value, "max_new_tokens": 1000}}
                    async with http.post(worker.url + "/generate", json=bomb) as answer:
                        body = await answer.json()
                        assert answer.status == 400, (field, str(value)[:80], str(body)[:300])
                        assert body["error"]["param"] == "sampling_params." + field
                assert said.tokens > 100
                assert not reading.done()
                reading.cancel()

    def idle() -> bool:
        stats = processes.get_json(worker.url + "/get_server_info")["scheduler"]
        return (stats["running"], stats["waiting"], stats["compiling"]) == (0, 0, 0)

    asyncio.run(attack())
    processes.wait_until(idle, "nothing is left of them")


def test_the_death_of_grammar_processes_is_a_503_for_their_requests(
    worker: Running, api: openai.OpenAI
) -> None:
    endless: Any = {
        "model": MODEL,
        "prompt": "x",
        "max_tokens": ENDLESS,
        "logit_bias": {"1": -100},  # the grammar allows the end of the text
        "extra_body": {"regex": "[a-z]+"},
    }
    short: Any = {"model": MODEL, "prompt": "x", "extra_body": {"regex": "[0-9]{3}"}}
    # Random draws, which may include the end
    free: Any = {"model": MODEL, "prompt": "x", "max_tokens": 5, "logit_bias": {"1": -100}}
    (fork_server,) = [
        p for p in procfs.descendants(worker.pid) if p.command.endswith("grammar fork server")
    ]
    stream = api.completions.create(stream=True, **endless)
    next(stream)
    os.kill(fork_server.number, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="lost the processes") as lost:
        list(stream)
    assert lost.value.code == "engine_died", (
        "what a router knows a stream by that it can go on with"
    )
    assert api.completions.create(**free).choices[0].finish_reason == "length"
    assert re.fullmatch("[0-9]{3}", api.completions.create(**short).choices[0].text)


class Said:
    """The received part of a stream."""

    def __init__(self) -> None:
        self.tokens = 0

    async def count(self, events: AsyncIterator[str]) -> None:
        async for event in events:
            assert "error" not in event, event
            self.tokens += 1


def test_a_worker_without_grammars_says_so() -> None:
    with fake_worker(grammar_backend="none") as worker:
        body = {"text": "Hello", "sampling_params": {"regex": "a"}}
        with pytest.raises(urllib.error.HTTPError) as refused:
            processes.post_json(worker.url + "/generate", body)
        assert refused.value.code == 400
        error = json.loads(refused.value.read())["error"]
        assert error["param"] == "sampling_params.regex"
        assert "--grammar-backend none" in error["message"]

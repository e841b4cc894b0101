# /// script
# dependencies = ["openai==3.54.0"]
# ///
"""OpenAI's package: all forms of prompts, streams, logprobs, tools, schemas, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pydantic
from checks import KEY, Server, main

MESSAGES = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is cached?"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "set_light",
        "description": "Switch a light",
        "parameters": {
            "type": "object",
            "properties": {"room": {"enum": ["kitchen", "hall"]}, "on": {"type": "boolean"}},
            "required": ["room", "on"],
            "additionalProperties": False,
        },
    },
}


class Verdict(pydantic.BaseModel):
    verdict: Literal["yes", "no", "maybe"]
    certain: bool


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key=KEY, max_retries=0, timeout=120)


def models(server: Server) -> None:
    assert [model.id for model in client(server).models.list()] == [server.model]
    assert client(server).models.retrieve(server.model).id == server.model


def completions_of_text_and_ids(server: Server) -> None:
    for prompt, choices in (
        ("Once upon", 1),
        (["Once", "upon"], 2),
        ([5, 6, 7], 1),
        ([[5, 6], [7]], 2),
    ):
        answer = client(server).completions.create(
            model=server.model, prompt=prompt, max_tokens=6, temperature=0
        )
        assert [choice.index for choice in answer.choices] == list(range(choices))
        assert answer.usage.completion_tokens <= 6 * choices


def a_stream_says_what_the_whole_says(server: Server) -> None:
    asked = {"model": server.model, "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    whole = client(server).chat.completions.create(**asked)
    text, usage = "", None
    for chunk in client(server).chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens


def several_answers(server: Server) -> None:
    answer = client(server).chat.completions.create(
        model=server.model, messages=MESSAGES, max_tokens=8, n=3, seed=7
    )
    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2]


def scores(server: Server) -> None:
    answer = client(server).chat.completions.create(
        model=server.model, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert entries and all(len(entry.top_logprobs) == 3 for entry in entries)
    answer = client(server).completions.create(
        model=server.model, prompt="Once", max_tokens=4, logprobs=2, echo=True
    )
    scored = answer.choices[0].logprobs
    assert scored.token_logprobs[0] is None
    assert len(scored.tokens) == answer.usage.total_tokens
    # Of the answer, including parts of characters
    of_prompt = scored.tokens[: answer.usage.prompt_tokens]
    assert "".join(of_prompt).endswith("Once"), of_prompt  # a BOS token is before it
    assert answer.choices[0].text.startswith("Once")


def penalties_and_bias(server: Server) -> None:
    answer = client(server).completions.create(
        model=server.model,
        prompt="Once",
        max_tokens=5,
        temperature=0,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"300": 100},
    )
    assert answer.usage.completion_tokens == 5


def tools(server: Server) -> None:
    # Drawn tokens may spell a name of a room that fills all of them
    limits = {"max_tokens": 128, "temperature": 0}
    asked = {"model": server.model, "messages": MESSAGES, "tools": [TOOL], **limits}
    answer = client(server).chat.completions.create(**asked, tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    given = json.loads(call.function.arguments)
    assert call.function.name == "set_light" and set(given) == {"room", "on"}
    follow_up = [
        *MESSAGES,
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    client(server).chat.completions.create(model=server.model, messages=follow_up, max_tokens=4)
    named = {"type": "function", "function": {"name": "set_light"}}
    pieces = []
    for chunk in client(server).chat.completions.create(**asked, tool_choice=named, stream=True):
        for choice in chunk.choices:
            pieces += [c.function.arguments or "" for c in choice.delta.tool_calls or []]
    assert set(json.loads("".join(pieces))) == {"room", "on"}


def a_schema(server: Server) -> None:
    # A model without training on such JSON may write whitespace wherever it is allowed, but a limited number of times.
    answer = client(server).chat.completions.parse(
        model=server.model, messages=MESSAGES, response_format=Verdict, max_tokens=512
    )
    assert answer.choices[0].message.parsed.verdict in ("yes", "no", "maybe")


def responses(server: Server) -> None:
    answer = client(server).responses.create(
        model=server.model, input="What is cached?", max_output_tokens=16
    )
    assert answer.output_text
    assert answer.usage.output_tokens <= 16


def errors_are_of_their_types(server: Server) -> None:
    for wrong, kind, param in (
        ({"model": "no-such-model"}, openai.NotFoundError, "model"),
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 10**8}, openai.BadRequestError, "max_tokens"),
    ):
        error = _refusal(server, **wrong)
        assert (type(error), error.param) == (kind, param), error


def _refusal(server: Server, **wrong: Any) -> openai.APIStatusError:
    try:
        client(server).chat.completions.create(
            **{"model": server.model, "messages": MESSAGES, **wrong}
        )
    except openai.APIStatusError as error:
        return error
    raise AssertionError(f"{wrong} was accepted")


def many_at_a_time(server: Server) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.v1, api_key=KEY, max_retries=0) as http:
            answers = [
                http.chat.completions.create(
                    model=server.model, messages=MESSAGES, max_tokens=8, temperature=0
                )
                for _ in range(32)
            ]
            return [a.choices[0].message.content for a in await asyncio.gather(*answers)]

    assert len(set(asyncio.run(ask()))) == 1


main(
    models,
    completions_of_text_and_ids,
    a_stream_says_what_the_whole_says,
    several_answers,
    scores,
    penalties_and_bias,
    tools,
    a_schema,
    responses,
    errors_are_of_their_types,
    many_at_a_time,
)

# /// script
# dependencies = ["litellm==1.106.2", "mcp"]  # it imports mcp for tools
# ///
"""Checks LiteLLM, the client library of many gateways."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it is downloaded at import

import litellm
from checks import KEY, Server, main

MESSAGES = [{"role": "user", "content": "What is cached?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "answer",
        "parameters": {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}},
            "required": ["yes"],
            "additionalProperties": False,
        },
    },
}


def asked(server: Server, **more: Any) -> dict[str, Any]:
    where = {"model": f"openai/{server.model}", "api_base": server.v1, "api_key": KEY}
    return {**where, "messages": MESSAGES, "max_tokens": 16, "num_retries": 0, **more}


def a_chat_and_its_stream(server: Server) -> None:
    whole = litellm.completion(**asked(server, temperature=0))
    chunks = list(litellm.completion(**asked(server, temperature=0, stream=True)))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def a_text_completion(server: Server) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{server.model}",
        prompt="Once upon",
        api_base=server.v1,
        api_key=KEY,
        max_tokens=8,
    )
    assert answer.usage.completion_tokens <= 8


def at_the_same_time(server: Server) -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(*(litellm.acompletion(**asked(server)) for _ in range(8)))

    assert len(asyncio.run(ask())) == 8


def tools(server: Server) -> None:
    more = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 64, "temperature": 0}
    answer = litellm.completion(**{**asked(server), **more})
    (call,) = answer.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"yes"}


def an_error_is_of_its_type(server: Server) -> None:
    try:
        litellm.completion(**asked(server, temperature=9))
    except litellm.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("temperature 9 was accepted")


def a_long_conversation_is_recognized(server: Server) -> None:
    long = [{"role": "user", "content": "hello " * 100_000}]
    for more in ({"messages": long, "max_tokens": None}, {"max_tokens": 1_000_000}):
        try:
            litellm.completion(**asked(server, **more))
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError(f"{[*more]}: accepted")


main(
    a_chat_and_its_stream,
    a_text_completion,
    at_the_same_time,
    tools,
    an_error_is_of_its_type,
    a_long_conversation_is_recognized,
)

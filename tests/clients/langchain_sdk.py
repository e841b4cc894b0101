# /// script
# dependencies = ["langchain-openai==1.7.3"]
# ///
"""LangChain's chat model and text model."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from checks import KEY, Server, main
from langchain_openai import ChatOpenAI, OpenAI


class Verdict(pydantic.BaseModel):
    """The opinion on a text."""

    verdict: Literal["yes", "no"]


def chat(server: Server, **more: Any) -> ChatOpenAI:
    where = {"base_url": server.v1, "api_key": KEY, "model": server.model}
    return ChatOpenAI(**where, max_tokens=64, temperature=0, max_retries=0, **more)


def invoke_stream_and_batch(server: Server) -> None:
    whole = chat(server).invoke("What is cached?")
    chunks = list(chat(server, stream_usage=True).stream("What is cached?"))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    streamed = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert streamed[-1]["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert [a.content for a in chat(server).batch(["What is cached?"] * 3)] == [whole.content] * 3


def text(server: Server) -> None:
    model = OpenAI(base_url=server.v1, api_key=KEY, model=server.model, max_tokens=8)
    assert isinstance(model.invoke("Once upon"), str)


def tools(server: Server) -> None:
    answer = chat(server).bind_tools([Verdict], tool_choice="any").invoke("Is it cached?")
    (call,) = answer.tool_calls
    assert call["name"] == "Verdict" and call["args"]["verdict"] in ("yes", "no")


def structured_output(server: Server) -> None:
    for method in ("json_schema", "function_calling"):
        model = chat(server).with_structured_output(Verdict, method=method)
        assert model.invoke("Is it cached?").verdict in ("yes", "no")


main(invoke_stream_and_batch, text, tools, structured_output)

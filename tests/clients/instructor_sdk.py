# /// script
# dependencies = ["instructor==1.17.0"]
# ///
"""Instructor: pydantic models as answers, by tools and by schema."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
import pydantic
from checks import KEY, Server, main

MESSAGES = [{"role": "user", "content": "Is the light in the kitchen on?"}]


class Light(pydantic.BaseModel):
    room: Literal["kitchen", "hall"]
    on: bool


def _ask(server: Server, mode: instructor.Mode) -> None:
    client = openai.OpenAI(base_url=server.v1, api_key=KEY, max_retries=0)
    light = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=server.model,
        messages=MESSAGES,
        response_model=Light,
        max_retries=0,
        max_tokens=128,
        temperature=0,  # else some answers end within white space
    )
    assert isinstance(light, Light)


def by_tools(server: Server) -> None:
    _ask(server, instructor.Mode.TOOLS)


def by_schema(server: Server) -> None:
    _ask(server, instructor.Mode.JSON_SCHEMA)


main(by_tools, by_schema)

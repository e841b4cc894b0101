"""Calls of the right function with the right arguments, and answers with its result.

The text is the rendering of `tools`, of assistant messages with `tool_calls` and of messages of the role `tool`, with
DeepSeek-V3.1's markers, so that the worker needs no other parser.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tasks.example import ASSISTANT, BOS, EOS, SYSTEMS, USER, Example, Part
from tasks.words import NAMES, PLACES

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
OUTPUT_BEGIN, OUTPUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    parameters: dict[str, str]  # name to JSON type
    ask: Callable[[random.Random], tuple[str, dict[str, Any]]]  # question and arguments
    result: Callable[[random.Random, dict[str, Any]], tuple[dict[str, Any], str]]

    @property
    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {name: {"type": kind} for name, kind in self.parameters.items()},
            "required": list(self.parameters),
        }

    @property
    def as_openai(self) -> dict[str, Any]:
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.schema,
        }
        return {"type": "function", "function": function}


def _weather(draw: random.Random) -> tuple[str, dict[str, Any]]:
    city = draw.choice(PLACES)
    form = draw.choice(("What is the weather in {}?", "How is the weather in {} now?"))
    return form.format(city), {"city": city}


def _weather_result(draw: random.Random, given: dict[str, Any]) -> tuple[dict[str, Any], str]:
    degrees, sky = draw.randint(-9, 38), draw.choice(("sunny", "cloudy", "rainy", "windy"))
    said = f"It is {sky} in {given['city']}, and {degrees} degrees."
    return {"sky": sky, "degrees": degrees}, said


def _time(draw: random.Random) -> tuple[str, dict[str, Any]]:
    city = draw.choice(PLACES)
    return draw.choice(("What time is it in {}?", "Tell me the time in {}.")).format(city), {
        "city": city
    }


def _time_result(draw: random.Random, given: dict[str, Any]) -> tuple[dict[str, Any], str]:
    now = f"{draw.randrange(24):02}:{draw.randrange(60):02}"
    return {"time": now}, f"It is {now} in {given['city']}."


def _email(draw: random.Random) -> tuple[str, dict[str, Any]]:
    name = draw.choice(NAMES)
    subject = draw.choice(("lunch", "the meeting", "the report", "the party", "the trip"))
    return f"Send an email to {name} about {subject}.", {"to": name, "subject": subject}


def _email_result(draw: random.Random, given: dict[str, Any]) -> tuple[dict[str, Any], str]:
    del draw
    return {"sent": True}, f"The email to {given['to']} has been sent."


def _convert(draw: random.Random) -> tuple[str, dict[str, Any]]:
    amount = draw.randint(1, 999)
    source, target = draw.sample(("dollars", "euros", "pounds", "yen"), 2)
    arguments = {"amount": amount, "source": source, "target": target}
    return f"How much are {amount} {source} in {target}?", arguments


def _convert_result(draw: random.Random, given: dict[str, Any]) -> tuple[dict[str, Any], str]:
    value = draw.randint(1, 999)
    said = f"{given['amount']} {given['source']} are {value} {given['target']}."
    return {"value": value}, said


TOOLS = (
    Tool(
        "get_weather", "Current weather of a city.", {"city": "string"}, _weather, _weather_result
    ),
    Tool("get_time", "Local time of a city.", {"city": "string"}, _time, _time_result),
    Tool(
        "send_email", "Send an email.", {"to": "string", "subject": "string"}, _email, _email_result
    ),
    Tool(
        "convert_currency",
        "Convert an amount of money.",
        {"amount": "integer", "source": "string", "target": "string"},
        _convert,
        _convert_result,
    ),
)


def listed(tools: list[Tool]) -> str:
    """Returns the text of the tools before the first message."""
    sections = [
        f"### {tool.name}\n{tool.description}\nParameters: {json.dumps(tool.schema)}\n"
        for tool in tools
    ]
    return "## Tools\n" + "".join(sections)


def written(tool: Tool, arguments: dict[str, Any]) -> str:
    """Returns a call in the model's format."""
    call = f"{CALL_BEGIN}{tool.name}{SEPARATOR}{json.dumps(arguments)}{CALL_END}"
    return CALLS_BEGIN + call + CALLS_END


def tool_call(draw: random.Random, held_out: bool) -> Example:
    del held_out  # numbers, names and sets of tools make all questions new
    tools = draw.sample(TOOLS, draw.randint(1, len(TOOLS)))
    tool = draw.choice(tools)
    question, arguments = tool.ask(draw)
    parts = [
        Part(f"{BOS}{draw.choice(SYSTEMS)}{listed(tools)}{USER}{question}{ASSISTANT}"),
        Part(written(tool, arguments) + EOS, is_answer=True),
    ]
    if draw.random() < 0.6:
        value, said = tool.result(draw, arguments)
        parts += [
            Part(f"{OUTPUT_BEGIN}{json.dumps(value)}{OUTPUT_END}{ASSISTANT}"),
            Part(said + EOS, is_answer=True),
        ]
    return parts

"""Checks `tools`, `tool_choice` and `parallel_tool_calls`: the functions that an answer may or must call."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.schema.chat import ChatRequest, NamedToolChoice, Tool

MAX_TOOLS = 128  # OpenAI's
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")  # Anthropic's; OpenAI's has 64 characters at most
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The checked fields."""

    rendered: list[dict[str, Any]] | None = None  # for the chat template
    # JSON schemas of the arguments, by the name of the function that may be called.
    functions: dict[str, dict[str, Any]] = field(default_factory=dict)
    required: bool = False  # the answer must have a call
    several: bool = True  # the answer may have several calls
    strict: frozenset[str] = frozenset()  # functions whose calls always follow their schemas
    # The client's field of each schema, by the name of the function
    schema_fields: dict[str, str] = field(default_factory=dict)


def read_tools(
    body: ChatRequest,
    name_field: str = "tools[{}].function.name",
    schema_field: str = "tools[{}].function.parameters",
) -> ToolUse:
    """Checks the fields. `name_field` and `schema_field` are the client's fields of a tool, with `{}` for its index.

    Raises InvalidRequest, which names the field.
    """
    tools, choice = body.tools or [], body.tool_choice or "auto"
    if len(tools) > MAX_TOOLS:
        raise InvalidField("tools", f"at most {MAX_TOOLS}, got {len(tools)}")
    functions: dict[str, dict[str, Any]] = {}
    schema_fields: dict[str, str] = {}
    for index, tool in enumerate(tools):
        name = tool.function.name
        if not _NAME.fullmatch(name):
            raise InvalidField(
                name_field.format(index), "1 to 128 letters, digits, underscores and dashes"
            )
        if name in functions:
            raise InvalidField(name_field.format(index), f"there are two functions {name}")
        functions[name] = tool.function.parameters or _NO_PARAMETERS
        schema_fields[name] = schema_field.format(index)
    several = body.parallel_tool_calls is not False
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in functions:
            raise InvalidField("tool_choice", f"function '{name[:64]}' not found in tools")
        return ToolUse(
            _rendered(tools),
            {name: functions[name]},
            required=True,
            several=False,
            schema_fields=schema_fields,
        )
    if choice == "required" and not functions:
        raise InvalidField("tool_choice", "required needs tools to choose from")
    if choice == "none" or not functions:
        return ToolUse()  # the prompt does not mention functions that must not be called
    strict = frozenset(tool.function.name for tool in tools if tool.function.strict)
    required = choice == "required"
    return ToolUse(_rendered(tools), functions, required, several, strict, schema_fields)


def _rendered(tools: list[Tool]) -> list[dict[str, Any]]:
    """Returns the tools with all fields, because templates do not check for missing ones."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": tool.function.parameters or _NO_PARAMETERS,
            },
        }
        for tool in tools
    ]

"""The grammar of the answer to a conversation: the requested format, calls of tools, or either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mla_router.worker.server.endpoints.chat.tools import ToolUse
from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.text.reasoning import END
from mla_router.worker.server.text.tool_calls.parts import ToolFormat
from mla_router.worker.server.validation.constraint import Constraint, structural_tag

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def constraint_of(
    asked: Constraint | None,
    tools: ToolUse,
    format: ToolFormat | None,
    special: Mapping[str, int],
    *,
    inside: bool,
) -> Constraint | None:
    """Returns the constraint of the answer, or None.

    `asked` is the constraint of an answer without calls. If calls are required, the answer has nothing else. If they
    are possible, a call may take the place of `asked`. In both cases calls follow their schemas; calls of strict
    functions always do. `inside`: the answer begins within the reasoning, which stays free. `special` has the ids of
    the markers of `format` that are special tokens. Raises InvalidRequest, which names the field.
    """
    constraint = asked
    if tools.required:
        if asked is not None:
            raise InvalidField(
                "tool_choice", f"requires a call, so it cannot be combined with {asked.field}"
            )
        if format is None:
            raise InvalidField("tool_choice", "needs a worker without --tool-call-parser none")
        calls = format.grammar(_arguments(tools, tools.functions), several=tools.several)
        constraint = structural_tag(calls, "tools")
    elif asked is None and tools.strict and format is not None:
        schemas = {
            name: schema if name in tools.strict else ANY_OBJECT
            for name, schema in tools.functions.items()
        }
        calls = format.grammar_in_text(_arguments(tools, schemas), special, several=tools.several)
        constraint = structural_tag(calls, "tools")
    elif asked is not None and tools.functions and format is not None:
        calls = format.grammar(_arguments(tools, tools.functions), several=tools.several)
        either = {"type": "or", "elements": [asked.format, calls]}
        constraint = structural_tag(either, asked.field)
    if constraint is None:
        return None
    if inside:
        constraint = constraint.after(END)
    return replace(constraint, inner_fields=tuple(tools.schema_fields.values()))


def _arguments(tools: ToolUse, schemas: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the formats of the arguments of `schemas`, by the name of the function."""
    return {
        name: {
            "type": "json_schema",
            "json_schema": schema,
            "field": tools.schema_fields[name],
        }
        for name, schema in schemas.items()
    }

"""`structured_outputs`: the format of an answer, in vLLM's form."""

from __future__ import annotations

from typing import Any

import msgspec


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """One of these formats."""

    json: str | dict[str, Any] | bool | None = None  # a schema, or a string with one
    regex: str | None = None  # matches the whole answer
    choice: list[str] | None = None  # the answer is one of these texts
    grammar: str | None = None  # EBNF; its first rule is `root`
    json_object: bool | None = None  # true: any JSON object
    structural_tag: str | dict[str, Any] | None = None
    # refused unless neutral
    disable_additional_properties: Any = None
    disable_any_whitespace: Any = None
    whitespace_pattern: Any = None

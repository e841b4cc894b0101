"""`response_format`: the format of an answer, in OpenAI's and SGLang's forms."""

from __future__ import annotations

from typing import Any

import msgspec

JsonSchema = dict[str, Any] | bool


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """Free text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    """Any JSON object, or one that satisfies the schema of llama.cpp's and Together's form."""

    schema: JsonSchema | None = None


class NamedSchema(msgspec.Struct):
    name: str
    schema: JsonSchema | None = None  # null: any JSON
    description: str | None = None
    strict: bool | None = None  # no effect: answers always follow their schema


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """JSON that satisfies a schema."""

    json_schema: NamedSchema


class Structure(msgspec.Struct):
    """JSON that satisfies a schema, between two texts."""

    begin: str
    end: str
    schema: JsonSchema | None = None


class StructuralTagFormat(msgspec.Struct, tag_field="type", tag="structural_tag"):
    """Free text with structures in it. After the text of a trigger the answer must complete a structure whose `begin`
    starts with this trigger. Alternatively `format` is a format of xgrammar."""

    structures: list[Structure] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat

"""What an answer must look like, in OpenAI's words and SGLang's."""

from __future__ import annotations

from typing import Any

import msgspec

JsonSchema = dict[str, Any] | bool


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """Anything."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    """Some JSON object."""


class NamedSchema(msgspec.Struct):
    name: str
    schema: JsonSchema | None = None  # null: any JSON
    description: str | None = None
    strict: bool | None = None  # an answer follows its schema strictly, whether this is set or not


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """JSON of this schema."""

    json_schema: NamedSchema


class Structure(msgspec.Struct):
    """JSON of a schema between two texts."""

    begin: str
    end: str
    schema: JsonSchema | None = None


class StructuralTagFormat(msgspec.Struct, tag_field="type", tag="structural_tag"):
    """Free text with structures in it: those whose `begin` starts with one of `triggers` must be
    finished once such a trigger has been written. Or, in its place, xgrammar's own `format`."""

    structures: list[Structure] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat

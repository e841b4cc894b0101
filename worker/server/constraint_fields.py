"""The fields that ask for a grammar: OpenAI's, SGLang's and vLLM's. At most one of them may be given."""

from __future__ import annotations

from collections.abc import Iterator

from mla_router.worker.messages import Grammar
from mla_router.worker.server.constraint import Constraint, of_schema, of_tag, of_tag_text
from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.schema.fields import SamplingFields
from mla_router.worker.server.schema.response_format import (
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StructuralTagFormat,
)
from mla_router.worker.server.structured_outputs import read_structured_outputs

ANY_OBJECT = '{"type":"object"}'
ANY_JSON = "{}"


def read_constraint(
    fields: SamplingFields, response_format: ResponseFormat | None, prefix: str = ""
) -> Constraint | None:
    """Raises InvalidRequest, naming the field. `prefix` is where `fields` lie in the body."""
    found = [
        *_of_format(response_format),
        *_of_sglang(fields, prefix),
        *read_structured_outputs(fields, prefix),
    ]
    if len(found) > 1:
        raise InvalidField(found[1].field, f"cannot be combined with {found[0].field}")
    return found[0] if found else None


def _of_format(format: ResponseFormat | None) -> Iterator[Constraint]:
    match format:
        case JsonObjectFormat():
            yield of_schema(ANY_OBJECT, "response_format")
        case JsonSchemaFormat(json_schema):
            schema = ANY_JSON if json_schema.schema is None else json_schema.schema
            yield of_schema(schema, "response_format.json_schema.schema")
        case StructuralTagFormat():
            yield of_tag(format, "response_format")


def _of_sglang(fields: SamplingFields, prefix: str) -> Iterator[Constraint]:
    """Empty strings ask for nothing, as SGLang has it."""
    if fields.json_schema is not None:
        yield of_schema(fields.json_schema, prefix + "json_schema")
    if fields.regex:
        yield Constraint(Grammar("regex", fields.regex), prefix + "regex")
    if fields.ebnf:
        yield Constraint(Grammar("ebnf", fields.ebnf), prefix + "ebnf")
    if fields.structural_tag is not None:
        yield of_tag_text(fields.structural_tag, prefix + "structural_tag")

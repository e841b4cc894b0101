"""The request fields with a grammar: OpenAI's, SGLang's and vLLM's. A request may have one of them."""

from __future__ import annotations

from collections.abc import Iterator

from mla_router.worker.messages import Grammar
from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.schema.fields import SamplingFields
from mla_router.worker.server.schema.response_format import (
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    ResponseFormat,
    StructuralTagFormat,
)
from mla_router.worker.server.schema.structured_outputs import StructuredOutputs
from mla_router.worker.server.schema.unsupported import refuse_unsupported
from mla_router.worker.server.validation.constraint import (
    Constraint,
    of_schema,
    of_tag,
    of_tag_text,
    structural_tag,
)

ANY_OBJECT = '{"type":"object"}'
ANY_JSON = "{}"


def read_constraint(
    fields: SamplingFields, response_format: ResponseFormat | None, prefix: str = ""
) -> Constraint | None:
    """Returns the constraint of a request, or None. `prefix` is the path of `fields` in the body.

    Raises InvalidRequest, which names the field.
    """
    found = [
        *_of_format(response_format),
        *_of_sglang(fields, prefix),
        *_of_vllm(fields, prefix),
    ]
    if len(found) > 1:
        raise InvalidField(found[1].field, f"cannot be combined with {found[0].field}")
    return found[0] if found else None


def _of_format(format: ResponseFormat | None) -> Iterator[Constraint]:
    match format:
        case JsonObjectFormat(None):
            yield of_schema(ANY_OBJECT, "response_format")
        case JsonObjectFormat(schema):
            yield of_schema(schema, "response_format.schema")
        case JsonSchemaFormat(NamedSchema(schema=None)):
            yield of_schema(ANY_JSON, "response_format.json_schema.schema")
        case JsonSchemaFormat(NamedSchema(schema=schema)):
            yield of_schema(schema, "response_format.json_schema.schema")
        case StructuralTagFormat():
            yield of_tag(format, "response_format")


def _of_sglang(fields: SamplingFields, prefix: str) -> Iterator[Constraint]:
    """Yields the constraints of SGLang's fields. Empty strings count as missing, as in SGLang."""
    if fields.json_schema is not None:
        yield of_schema(fields.json_schema, prefix + "json_schema")
    if fields.regex:
        yield Constraint(Grammar("regex", fields.regex), prefix + "regex")
    if fields.ebnf:
        yield Constraint(Grammar("ebnf", fields.ebnf), prefix + "ebnf")
    if fields.structural_tag is not None:
        yield of_tag_text(fields.structural_tag, prefix + "structural_tag")


def _of_vllm(fields: SamplingFields, prefix: str) -> list[Constraint]:
    """Returns the constraints of vLLM's fields: `structured_outputs`, and the older `guided_...`.

    Raises InvalidRequest, which names the field.
    """
    guided = StructuredOutputs(
        json=fields.guided_json,
        regex=fields.guided_regex,
        choice=fields.guided_choice,
        grammar=fields.guided_grammar,
    )
    found = _of_structured_outputs(guided, prefix + "guided_")
    if fields.structured_outputs is not None:
        place = prefix + "structured_outputs"
        asked = _of_structured_outputs(fields.structured_outputs, place + ".")
        if not asked:
            raise InvalidField(
                place, "give one of json, regex, choice, grammar, json_object and structural_tag"
            )
        found += asked
    return found


def _of_structured_outputs(outputs: StructuredOutputs, prefix: str) -> list[Constraint]:
    refuse_unsupported(outputs, prefix)
    found = []
    if outputs.json is not None:
        found.append(of_schema(outputs.json, prefix + "json"))
    if outputs.regex is not None:
        found.append(Constraint(Grammar("regex", outputs.regex), prefix + "regex"))
    if outputs.choice is not None:
        found.append(_of_choice(outputs.choice, prefix + "choice"))
    if outputs.grammar is not None:
        found.append(Constraint(Grammar("ebnf", outputs.grammar), prefix + "grammar"))
    if outputs.json_object:
        found.append(of_schema(ANY_OBJECT, prefix + "json_object"))
    if outputs.structural_tag is not None:
        found.append(of_tag_text(outputs.structural_tag, prefix + "structural_tag"))
    return found


def _of_choice(texts: list[str], field: str) -> Constraint:
    if not texts:
        raise InvalidField(field, "give at least one text")
    elements = [{"type": "const_string", "value": text} for text in texts]
    return structural_tag({"type": "or", "elements": elements}, field)

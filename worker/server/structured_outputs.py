"""vLLM's fields that ask for a grammar: `structured_outputs`, and `guided_...`, which came before it."""

from __future__ import annotations

from mla_router.worker.messages import Grammar
from mla_router.worker.server.constraint import Constraint, of_schema, of_tag_text, structural_tag
from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.schema.fields import SamplingFields
from mla_router.worker.server.schema.structured_outputs import StructuredOutputs
from mla_router.worker.server.schema.unsupported import refuse_unsupported

ANY_OBJECT = '{"type":"object"}'


def read_structured_outputs(fields: SamplingFields, prefix: str) -> list[Constraint]:
    """One constraint for each kind that is asked for; the caller allows one. Raises InvalidRequest, naming the
    field."""
    guided = StructuredOutputs(
        json=fields.guided_json,
        regex=fields.guided_regex,
        choice=fields.guided_choice,
        grammar=fields.guided_grammar,
    )
    found = _read(guided, prefix + "guided_")
    if fields.structured_outputs is not None:
        place = prefix + "structured_outputs"
        asked = _read(fields.structured_outputs, place + ".")
        if not asked:
            raise InvalidField(
                place, "give one of json, regex, choice, grammar, json_object and structural_tag"
            )
        found += asked
    return found


def _read(outputs: StructuredOutputs, prefix: str) -> list[Constraint]:
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

"""The grammar of an answer, and the request field that contains it.

This module makes the cheap checks. The grammar is compiled later in a process of its own (`worker/grammar`); an error
from there names the field, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from mla_router.worker.messages import Grammar
from mla_router.worker.server.errors import InvalidField, InvalidRequest
from mla_router.worker.server.schema.response_format import StructuralTagFormat

MAX_SOURCE = 256 << 10  # bytes


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar from the client. Raises InvalidRequest if it is too large."""

    grammar: Grammar
    field: str  # the client's field, for error messages
    inner_fields: tuple[str, ...] = ()  # fields of schemas within the grammar: see `Grammar.source`

    def __post_init__(self) -> None:
        size = len(self.grammar.source.encode())
        if size > MAX_SOURCE:
            raise self.refused(f"has {size} bytes, more than {MAX_SOURCE}")

    def refused(self, reason: str) -> InvalidRequest:
        """Returns the error for a wrong grammar."""
        field, _, rest = reason.partition(": ")
        if field not in self.inner_fields:
            field, rest = self.field, reason
        return InvalidField(field, rest, code="invalid_grammar")

    @property
    def format(self) -> dict[str, Any]:
        """The grammar as a format of xgrammar's structural tags. Raises InvalidRequest for invalid JSON."""
        kind, source = self.grammar.kind, self.grammar.source
        match kind:
            case "json_schema":
                return {"type": kind, "json_schema": self._decoded()}
            case "regex":
                return {"type": kind, "pattern": source}
            case "ebnf":
                return {"type": "grammar", "grammar": source}
            case "structural_tag":
                inner: dict[str, Any] = self._decoded()["format"]
                return inner

    def _decoded(self) -> Any:
        try:
            return msgspec.json.decode(self.grammar.source)
        except (msgspec.MsgspecError, RecursionError):
            raise self.refused("not valid JSON") from None

    def after(self, marker: str) -> Constraint:
        """Returns the constraint that allows any text up to `marker` before the grammar: the reasoning of the model."""
        thoughts = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": marker}
        # JSON's blanks, which the parser of answers drops
        blanks = {"type": "regex", "pattern": r"[ \t\r\n]{0,4}"}
        elements = [thoughts, blanks, self.format]
        return structural_tag({"type": "sequence", "elements": elements}, self.field)


def structural_tag(format: dict[str, Any], field: str) -> Constraint:
    """Returns the constraint of a format in xgrammar's language of structural tags (`xgrammar.structural_tag`)."""
    tag = {"type": "structural_tag", "format": format}
    return Constraint(_grammar("structural_tag", tag, field), field)


def of_schema(schema: Any, field: str) -> Constraint:
    """Returns the constraint of JSON by `schema`: a schema, or a string that contains one."""
    return Constraint(_grammar("json_schema", schema, field), field)


def of_tag(tag: StructuralTagFormat, field: str) -> Constraint:
    """Returns the constraint of a tag in SGLang's or xgrammar's form. Raises InvalidRequest for other forms."""
    if tag.format is not None and tag.structures is None and tag.triggers is None:
        return structural_tag(tag.format, field)
    if tag.format is not None or not tag.structures or not tag.triggers:
        raise InvalidField(field, "a structural_tag needs structures and triggers, or a format")
    tags = [
        {
            "begin": structure.begin,
            "content": {
                "type": "json_schema",
                "json_schema": {} if structure.schema is None else structure.schema,
            },
            "end": structure.end,
        }
        for structure in tag.structures
    ]
    return structural_tag({"type": "triggered_tags", "triggers": tag.triggers, "tags": tags}, field)


def of_tag_text(value: str | dict[str, Any], field: str) -> Constraint:
    """Returns the constraint of a tag that is a JSON object or a string with JSON. Raises InvalidRequest."""
    try:
        text = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
        tag = _tag_decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidField(field, str(error)) from None
    return of_tag(tag, field)


def _grammar(kind: Literal["json_schema", "structural_tag"], value: Any, field: str) -> Grammar:
    try:
        source = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    except RecursionError:
        raise InvalidField(field, "nested too deeply") from None
    return Grammar(kind, source)


_tag_decoder = msgspec.json.Decoder(StructuralTagFormat)

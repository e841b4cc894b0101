"""The texts that a field of a request may have, for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec import Struct, inspect

# A step of a path in msgspec's messages: a name, or an index or key in brackets
_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")


def choices(kind: type[Struct], path: str) -> list[str]:
    """Returns the texts that the field at `path` of a struct may have, `messages[0].role` for example. Empty if it is not
    limited to some texts."""
    found: list[Any] = [_described(kind)]
    for step in _STEP.findall(path):
        found = [inner for outer in found for inner in _inside(outer, step)]
    texts = [value for one in found for value in _texts(one)]
    return list(dict.fromkeys(texts))


@cache
def _described(kind: type[Struct]) -> inspect.Type:
    return inspect.type_info(kind)


def _inside(outer: inspect.Type, step: str) -> Iterator[Any]:
    """Yields the types of a member of `outer`, and the tag of a struct if `step` is its field."""
    match outer:
        case inspect.UnionType(types=types):
            for one in types:
                yield from _inside(one, step)
        case inspect.ListType(item_type=item) if step.startswith("["):
            yield item
        case inspect.DictType(value_type=value) if step.startswith("["):
            yield value
        case inspect.StructType(fields=fields, tag=tag, tag_field=tag_field):
            if step == tag_field:
                yield tag
            for field in fields:
                if field.encode_name == step:
                    yield field.type


def _texts(one: Any) -> list[str]:
    match one:
        case str():
            return [one]  # a tag
        case inspect.LiteralType(values=values):
            return [value for value in values if isinstance(value, str)]
        case inspect.UnionType(types=types):
            return [text for inner in types for text in _texts(inner)]
    return []

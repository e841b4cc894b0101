"""Fields of a body that its type does not have.

Clients and gateways send fields of other servers, so an unknown field is ignored. A misspelt one would be ignored as well,
so a name that is one slip away from a field's is refused. Lists of such clients' fields are in the tests: none is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct, inspect

from mla_router.worker.server.errors import InvalidRequest

# Fields of other servers that change no answer: sender, accounting, logging, routing.
NO_EFFECT = frozenset(
    [
        "cache_control",
        "conversation_id",
        "custom_labels",
        "diagnostics",
        "external_trace_header",
        "http_worker_ipc",
        "include_obfuscation",
        "inference_geo",
        "log_metrics",
        "metadata",
        "no_logs",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "received_time",
        "requestId",
        "return_mm_kwargs",
        "return_token_offsets",
        "routing_key",
        "safety_identifier",
        "service_tier",
        "session_id",
        "speed",
        "store",
        "stream_options",
        "user",
        "user_profile_id",
        "workspace_id",
    ]
)
# Shorter names have foreign neighbours: `models` of OpenRouter, `top_a` of text-generation-webui.
MIN_LENGTH = 6
MAX_LENGTH = 64  # longer names are no slips
MAX_EXAMINED = 64  # unknown fields of a body; clients send a few
MAX_ITEMS = 128  # examined objects of a list; OpenAI's limit of tools
MAX_LIST = 1 << 20  # bytes of an examined list; one of digits takes 36 times as much memory here
DEPTH = 2  # `tools[0].function`, `response_format.json_schema`
# Conversations: they have the fields of other servers' answers, and most of a body's bytes.
NOT_EXAMINED = frozenset(["messages", "input"])

BRACE, BRACKET = b"{["

_names = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])
_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of an object."""

    known: frozenset[str]
    spellings: dict[str, str]  # the field of each plain name
    slips: dict[str, str]  # the field of each plain name with at most one letter left out
    objects: dict[str, _Fields]  # the fields of those fields that are objects, or lists of objects

    def meant(self, name: str) -> str | None:
        """Returns the field whose name differs by case, `-`, `_` or one slip: a letter more, less or wrong, or two
        swapped."""
        if len(name) > MAX_LENGTH:
            return None
        plain = _plain(name)
        if field := self.spellings.get(plain):
            return field
        # Names are one slip apart if they are equal after at most one letter of each is left out.
        return next((self.slips[text] for text in _shortened(plain) if text in self.slips), None)


def unknown_fields(body: bytes, kind: type[Struct]) -> list[str]:
    """Returns the unknown fields of a body, and of the objects in its fields, that are ignored. A field of an
    object in a list is named without the index. Raises InvalidRequest for a misspelt field."""
    ignored: list[str] = []
    _examine(body, _fields_of(kind), "", ignored)
    return [_INDEX.sub("[]", name) for name in ignored]


def _examine(text: bytes | msgspec.Raw, fields: _Fields, prefix: str, ignored: list[str]) -> None:
    """Adds to `ignored`."""
    given = _names.decode(text)
    if not fields.known.issuperset(given):
        foreign = (name for name in given if name not in fields.known and name not in NO_EFFECT)
        for name in islice(foreign, MAX_EXAMINED - len(ignored)):
            if meant := fields.meant(name):
                raise InvalidRequest(
                    f"unknown field `{prefix}{name}`; did you mean `{prefix}{meant}`?",
                    param=prefix + name,
                    code="unknown_parameter",
                )
            ignored.append(prefix + name)
    for name in fields.objects.keys() & given.keys():
        within, value = fields.objects[name], given[name]
        value_text = memoryview(value)
        if value_text[0] == BRACE:
            _examine(value, within, f"{prefix}{name}.", ignored)
        elif value_text[0] == BRACKET and len(value_text) <= MAX_LIST:
            for index, item in enumerate(islice(_items.decode(value), MAX_ITEMS)):
                if memoryview(item)[0] == BRACE:
                    _examine(item, within, f"{prefix}{name}[{index}].", ignored)


@cache
def _fields_of(kind: type[Struct]) -> _Fields:
    return _read([inspect.type_info(kind)], DEPTH)


def _read(kinds: list[Any], depth: int) -> _Fields:
    """Returns the fields of structs. An object is one of these."""
    types = {field.encode_name: field.type for kind in kinds for field in kind.fields}
    tags = {kind.tag_field for kind in kinds if kind.tag_field}
    supported = [name for name, kind in types.items() if not isinstance(kind, inspect.AnyType)]
    examined = types.keys() - NOT_EXAMINED if depth else ()
    objects = {name: _structs(types[name]) for name in examined}
    plain = {_plain(name): name for name in supported}
    return _Fields(
        known=frozenset(tags | types.keys()),
        spellings=plain,
        slips={
            text: name
            for spelling, name in plain.items()
            if len(spelling) >= MIN_LENGTH
            for text in _shortened(spelling)
        },
        objects={name: _read(kinds, depth - 1) for name, kinds in objects.items() if kinds},
    )


def _structs(kind: Any) -> list[Any]:
    """Returns the structs among the types of a field, and of the items of a list."""
    if isinstance(kind, inspect.UnionType):
        return [struct for one in kind.types for struct in _structs(one)]
    if isinstance(kind, inspect.ListType):
        return _structs(kind.item_type)
    return [kind] if isinstance(kind, inspect.StructType) else []


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _shortened(text: str) -> Iterator[str]:
    """Yields a text, and the text without each of its letters."""
    yield text
    for index in range(len(text)):
        yield text[:index] + text[index + 1 :]

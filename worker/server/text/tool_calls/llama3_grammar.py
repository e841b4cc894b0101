r"""Grammars of Llama 3's call format: calls alone, and free text that may contain calls.

Free text must not contain a call that the parser (`llama3.py`) finds and that breaks its schema. The parser looks for
JSON objects at the beginning of an answer and after the tag. So an object there is either a call whose arguments
follow the schema, or certainly not a call:

    answer ::= text | (text? TAG)? blanks object?
    text   ::= blanks [^{ \t\r\n] any_text_without_TAG
    object ::= calls | no_call any_text
    no_call ::= "{" blanks (not_json | "}" | members)   # no member "name" names an offered function
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mla_router.worker.server.text.tool_calls.machine import BLANKS

Format = dict[str, Any]  # of xgrammar's structural tags

TAG = "<|python_tag|>"
BETWEEN_CALLS = BLANKS + ";,"

_BLANKS = r"[ \t\r\n]*"
_COLON, _COMMA = f"{_BLANKS}:{_BLANKS}", f"{_BLANKS},{_BLANKS}"
_STRING_TAIL = r'([^\x00-\x1f"\\]|\\["\\/bfnrt]|\\u[0-9A-Fa-f]{4})*"'


def calls_alone(functions: dict[str, Format], *, several: bool) -> Format:
    """Returns the format of one or more calls without other text."""
    return {
        "type": "tags_with_separator",
        "tags": [
            {
                "type": "tag",
                "begin": f'{{"name": "{name}", "parameters": ',
                "content": arguments,
                "end": "}",
            }
            for name, arguments in functions.items()
        ],
        "separator": "; ",
        "at_least_one": True,
        "stop_after_first": not several,
    }


def calls_in_text(functions: dict[str, Format], tag: int | None, *, several: bool) -> Format:
    """Returns the format of text without calls, with calls at its beginning or after the tag.

    `tag` is the id of the tag's token if it is a special token, which has no text.
    """
    one_call = _either(*(_call(name, arguments) for name, arguments in functions.items()))
    calls = (
        {"type": "plus", "content": _sequence(one_call, _regex(r"[ \t\r\n;,]*"))}
        if several
        else _sequence(one_call, _regex(_BLANKS))
    )
    found = _optional(_either(calls, _sequence(_no_call(functions), {"type": "any_text"})))
    # The first character may be that of the tag. The rest of the tag must not follow anywhere.
    text = _sequence(_regex(_BLANKS + r"[^{ \t\r\n]"), {"type": "any_text", "excludes": [TAG[1:]]})
    marker: Format = (
        {"type": "const_string", "value": TAG} if tag is None else {"type": "token", "token": tag}
    )
    to_marker = _optional(_sequence(_optional(text), marker))
    return _either(text, _sequence(to_marker, _regex(_BLANKS), found))


def _call(name: str, arguments: Format) -> Format:
    """Returns the format of one object with any spacing. Some models write its type first; some write `arguments` instead
    of `parameters`."""
    kind = rf'("type"{_COLON}"function"{_COMMA})?'
    head = rf'\{{{_BLANKS}{kind}"name"{_COLON}"{name}"{_COMMA}"(parameters|arguments)"{_COLON}'
    return _sequence(_regex(head), arguments, _regex(_BLANKS + r"\}"))


def _no_call(names: Collection[str]) -> Format:
    """Returns the format of a text that begins with a brace and is no call: an object in which no member `name` has one
    of `names` as its value, or no JSON at all."""
    value: Format = {"type": "json_schema", "json_schema": {}}
    no_string: Format = {
        "type": "json_schema",
        "json_schema": {"type": ["object", "array", "number", "boolean", "null"]},
    }
    member = _either(
        _sequence(_regex(f'"{_none_of(["name"])}{_COLON}'), value),
        _sequence(_regex(f'"name"{_COLON}'), no_string),
        _regex(f'"name"{_COLON}"{_none_of(names)}'),
    )
    more = {"type": "star", "content": _sequence(_regex(_COMMA), member)}
    members = _sequence(member, more, _regex(_BLANKS + r"\}"))
    return _sequence(
        _regex(r"\{" + _BLANKS), _either(_regex(r'[^"} \t\r\n]'), _regex(r"\}"), members)
    )


def _none_of(words: Collection[str]) -> str:
    r"""Returns an expression for the rest of a JSON string, after its first quote, that is none of `words`.

    `words` are of letters, digits, `_` and `-`, and none is empty. As long as the string is the beginning of one, it
    holds no `\u`, which might stand for the word's next letter.
    """
    return f'({_deviation(words)}{_STRING_TAIL}|{_beginning(words)}")'


def _deviation(words: Collection[str]) -> str:
    """Returns an expression for a prefix of one of `words` and one more character, which continues no word."""
    following = _by_first(words)
    others = "".join(following).replace("-", r"\-")
    ways = [rf'[^\x00-\x1f"\\{others}]', r'\\["\\/bfnrt]']
    ways += [first + _deviation(rest) for first, rest in following.items()]
    return f"({'|'.join(ways)})"


def _beginning(words: Collection[str]) -> str | None:
    """Returns an expression for the proper prefixes of `words` that are not words themselves; None if there is none."""
    longer = [
        first + beginning
        for first, rest in _by_first(words).items()
        if (beginning := _beginning(rest)) is not None
    ]
    if not longer:
        return None if "" in words else ""
    return f"({'|'.join(longer)})" + ("" if "" in words else "?")


def _by_first(words: Collection[str]) -> dict[str, list[str]]:
    """Groups the rest of each word by its first character."""
    following: dict[str, list[str]] = {}
    for word in words:
        if word:
            following.setdefault(word[0], []).append(word[1:])
    return following


def _regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _either(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)} if len(elements) > 1 else elements[0]


def _optional(content: Format) -> Format:
    return {"type": "optional", "content": content}

"""Calls as JSON objects, the format of Llama 3.1 and later:

    <|python_tag|>{"name": NAME, "parameters": ARGUMENTS}; {"name": ...

At the beginning of an answer the tag may be missing. Models of other families mostly use this format, too, with
`arguments` in place of `parameters`.
Source: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from mla_router.worker.server.text.tool_calls.llama3_grammar import (
    BETWEEN_CALLS,
    TAG,
    calls_alone,
    calls_in_text,
)
from mla_router.worker.server.text.tool_calls.machine import BLANKS, TextMachine
from mla_router.worker.server.text.tool_calls.parts import Arguments, Call, Content, Part


@dataclass(frozen=True, slots=True)
class Llama3Format:
    @property
    def markers(self) -> frozenset[str]:
        return frozenset({TAG})

    def parser(self, names: Collection[str]) -> Llama3Parser:
        return Llama3Parser(names)

    def grammar(self, functions: dict[str, dict[str, Any]], *, several: bool) -> dict[str, Any]:
        return calls_alone(functions, several=several)

    def grammar_in_text(
        self, functions: dict[str, dict[str, Any]], special: Mapping[str, int], *, several: bool
    ) -> dict[str, Any]:
        return calls_in_text(functions, special.get(TAG), several=several)


LLAMA3 = Llama3Format()


class _CallObject(msgspec.Struct):
    name: str
    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    @property
    def given(self) -> str:
        """The arguments in the model's own text; `{}` if there are none."""
        for raw in (self.parameters, self.arguments):
            if raw is not msgspec.UNSET:
                return bytes(raw).decode()
        return "{}"


class Llama3Parser(TextMachine):
    """Returns a call when its object is complete, because only then it is certain."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(self._start, {TAG})
        self._names = names
        self._object = _ObjectEnd()

    def finish(self) -> list[Part]:
        rest = self._taken + self._buffer
        between = self._state == self._between and not rest.strip(BETWEEN_CALLS)
        text = "" if between else self._without_markers(rest)
        return [Content(text)] if text else []

    def _start(self, parts: list[Part]) -> bool:
        del parts
        rest = self._buffer.lstrip(BLANKS)
        if not rest:
            return False
        self._state = self._outside
        if rest.startswith("{"):
            self._begin_object(rest)
        return True

    def _outside(self, parts: list[Part]) -> bool:
        marker = self._take_content(parts)
        if marker:
            self._taken = TAG
            self._state = self._after_tag
        return bool(marker)

    def _after_tag(self, parts: list[Part]) -> bool:
        rest = self._buffer.lstrip(BLANKS)
        if not rest:
            return False
        if not rest.startswith("{"):
            return self._give_up(parts)  # code for an interpreter, which is not supported
        self._begin_object(rest)
        return True

    def _between(self, parts: list[Part]) -> bool:
        del parts
        rest = self._buffer.lstrip(BETWEEN_CALLS)
        if rest.startswith("{"):
            self._begin_object(rest)
            return True
        if TAG.startswith(rest) and rest != TAG:
            return False
        if rest.startswith(TAG):
            self._taken = self._buffer[: len(self._buffer) - len(rest)] + TAG
            self._buffer = rest.removeprefix(TAG)
            self._state = self._after_tag
            return True
        self._state = self._outside
        return True

    def _in_object(self, parts: list[Part]) -> bool:
        end = self._object.find(self._buffer)
        if end is None:
            return False
        call = self._read(self._buffer[:end])
        if call is None:
            return self._give_up(parts)
        parts += [Call(call.name), Arguments(call.given)]
        self._buffer, self._taken = self._buffer[end:], ""
        self._state = self._between
        return True

    def _begin_object(self, rest: str) -> None:
        self._taken += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        self._object = _ObjectEnd()
        self._state = self._in_object

    def _read(self, text: str) -> _CallObject | None:
        try:
            call = msgspec.json.decode(text, type=_CallObject)
        except (msgspec.MsgspecError, RecursionError):
            return None
        return call if call.name in self._names and call.given.startswith("{") else None


class _ObjectEnd:
    """Finds the end of the JSON object at the beginning of a growing text. It reads each character once."""

    def __init__(self) -> None:
        self._seen = self._depth = 0
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        """Returns the position after the closing brace; None if it has not arrived."""
        for at in range(self._seen, len(text)):
            char = text[at]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char == "{":
                self._depth += 1
            elif char == "}":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        self._seen = len(text)
        return None

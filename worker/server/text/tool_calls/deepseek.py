"""The call formats of the DeepSeek models.

DeepSeek-V3 and R1, from their chat templates:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
    ```json
    ARGUMENTS
    ```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>...<｜tool▁calls▁end｜>

and V3.1:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mla_router.worker.server.text.stop_strings import overlap
from mla_router.worker.server.text.tool_calls.machine import TextMachine
from mla_router.worker.server.text.tool_calls.parts import Arguments, Call, Content, Part

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"

NAME = re.compile(r"[\w.-]+")
MAX_HEAD = 160  # characters between the begin marker of a call and its arguments


@dataclass(frozen=True, slots=True)
class DeepSeekFormat:
    before_name: str
    after_name: str
    after_arguments: str
    between_calls: str

    @property
    def markers(self) -> frozenset[str]:
        return frozenset({CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR})

    def parser(self, names: Collection[str]) -> DeepSeekParser:
        return DeepSeekParser(self, names)

    def grammar(self, functions: dict[str, dict[str, Any]], *, several: bool) -> dict[str, Any]:
        calls = {
            "type": "tags_with_separator",
            "tags": [
                {
                    "type": "tag",
                    "begin": CALL_BEGIN + self.before_name + name + self.after_name,
                    "content": arguments,
                    "end": self.after_arguments,
                }
                for name, arguments in functions.items()
            ],
            "separator": self.between_calls,
            "at_least_one": True,
            "stop_after_first": not several,
        }
        return {"type": "tag", "begin": CALLS_BEGIN, "content": calls, "end": CALLS_END}

    def grammar_in_text(
        self, functions: dict[str, dict[str, Any]], special: Mapping[str, int], *, several: bool
    ) -> dict[str, Any]:
        del special  # the markers are ordinary tokens of these models
        return {
            "type": "triggered_tags",
            "triggers": [CALLS_BEGIN],
            "tags": [self.grammar(functions, several=several)],
            "stop_after_first": True,
        }


DEEPSEEK_V3 = DeepSeekFormat("function" + SEPARATOR, "\n```json\n", "\n```" + CALL_END, "\n")
DEEPSEEK_V31 = DeepSeekFormat("", SEPARATOR, CALL_END, "")


class DeepSeekParser(TextMachine):
    """Divides the text of an answer into content, calls and their arguments, as it arrives. A malformed call, or one of a
    function that the request does not offer, becomes content."""

    def __init__(self, format: DeepSeekFormat, names: Collection[str]) -> None:
        super().__init__(self._outside, format.markers)
        self._format = format
        self._names = names

    def finish(self) -> list[Part]:
        if self._state == self._arguments:
            return []  # the held text is a part of the end marker
        rest = self._taken + self._buffer
        if self._state == self._between and not rest.strip():
            return []
        text = self._without_markers(rest)
        return [Content(text)] if text else []

    def _outside(self, parts: list[Part]) -> bool:
        marker = self._take_content(parts)
        if marker == CALLS_BEGIN:
            self._taken = CALLS_BEGIN
            self._state = self._between
        return bool(marker)

    def _between(self, parts: list[Part]) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith(CALL_BEGIN):
            self._taken += self._buffer[: len(self._buffer) - len(rest)] + CALL_BEGIN
            self._buffer = rest.removeprefix(CALL_BEGIN)
            self._state = self._head
            return True
        if rest.startswith(CALLS_END):
            self._taken = ""
            self._buffer = rest.removeprefix(CALLS_END)
            self._state = self._outside
            return True
        if CALL_BEGIN.startswith(rest) or CALLS_END.startswith(rest):
            return False
        return self._give_up(parts)

    def _head(self, parts: list[Part]) -> bool:
        end = self._buffer.find(self._format.after_name, 0, MAX_HEAD)
        if end < 0:
            return len(self._buffer) >= MAX_HEAD and self._give_up(parts)
        head = self._buffer[:end]
        name = head.removeprefix(self._format.before_name)
        if not head.startswith(self._format.before_name) or not NAME.fullmatch(name):
            return self._give_up(parts)
        self._taken = ""
        if name in self._names:
            parts.append(Call(name))
            self._buffer = self._buffer[end + len(self._format.after_name) :]
            self._state = self._arguments
        else:
            self._buffer = self._buffer[len(self._format.before_name) :]
            self._state = self._other_call
        return True

    def _other_call(self, parts: list[Part]) -> bool:
        """Turns a call of a function that the request does not offer into content."""
        marker = self._take_content(parts)
        if marker == CALL_END:
            self._state = self._between
        return bool(marker)

    def _arguments(self, parts: list[Part]) -> bool:
        text, found = self._take_until(self._format.after_arguments)
        if text:
            parts.append(Arguments(text))
        if found:
            self._state = self._between
        return found

    def _take_until(self, marker: str) -> tuple[str, bool]:
        """Returns the text before the marker, and whether the marker was found. Holds back a beginning of the
        marker."""
        at = self._buffer.find(marker)
        if at >= 0:
            text, self._buffer = self._buffer[:at], self._buffer[at + len(marker) :]
            return text, True
        shown = len(self._buffer) - overlap(self._buffer, marker)
        text, self._buffer = self._buffer[:shown], self._buffer[shown:]
        return text, False

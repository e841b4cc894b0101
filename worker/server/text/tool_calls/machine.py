"""The base of the parsers of answers: a state machine over text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from mla_router.worker.server.text.stop_strings import overlap
from mla_router.worker.server.text.tool_calls.parts import Content, Part

BLANKS = " \t\r\n"  # JSON's white space
NOTHING = "(?!)"  # matches nowhere

# A state takes the certain part of the buffer, and returns whether the next state should look at the rest.
State = Callable[[list[Part]], bool]


class TextMachine:
    """States are methods of subclasses. The result does not depend on the boundaries of the pieces."""

    def __init__(self, start: State, markers: Collection[str] = ()) -> None:
        """`markers` never become content."""
        self._state = start
        self._markers = markers
        self._any_marker = re.compile("|".join(map(re.escape, markers)) or NOTHING)
        self._buffer = ""
        self._taken = ""  # read since the last part; it becomes content again if the format breaks

    @property
    def held(self) -> int:
        """The number of characters that are held back."""
        return len(self._taken) + len(self._buffer)

    def push(self, text: str) -> list[Part]:
        """Takes the next piece. Returns the parts that are certain, and holds back a possible beginning of a marker."""
        self._buffer += text
        parts: list[Part] = []
        while self._state(parts):
            pass
        return parts

    def _give_up(self, parts: list[Part]) -> bool:
        """Handles a text that breaks the format: this text and all later text become content, without the markers."""
        self._buffer, self._taken = self._taken + self._buffer, ""
        self._state = self._plain
        return self._plain(parts)

    def _plain(self, parts: list[Part]) -> bool:
        while self._take_content(parts):
            pass
        return False

    def _take_content(self, parts: list[Part]) -> str:
        """Takes the text up to the first marker, and the marker. Returns the marker, or "" if there is none yet."""
        found = self._any_marker.search(self._buffer)
        end, rest = found.span() if found else (len(self._buffer) - self._held_tail(), None)
        if end:
            parts.append(Content(self._buffer[:end]))
        self._buffer = self._buffer[end if rest is None else rest :]
        return found.group() if found else ""

    def _held_tail(self) -> int:
        """The number of characters at the end that may be the beginning of a marker."""
        return max((overlap(self._buffer, marker) for marker in self._markers), default=0)

    def _without_markers(self, text: str) -> str:
        return self._any_marker.sub("", text)

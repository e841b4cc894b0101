"""What the parsers of answers have in common: text that comes in pieces, read by states."""

from __future__ import annotations

from collections.abc import Callable

from mla_router.worker.server.tool_calls.parts import Content, Part

# Looks at the buffer, takes from it what it is sure of, and says whether the next state should look
# at the rest.
State = Callable[[list[Part]], bool]


class TextMachine:
    """States are methods of the subclasses. How the text was split makes no difference."""

    def __init__(self, start: State) -> None:
        self._state = start
        self._buffer = ""
        self._taken = (
            ""  # since the last thing that was told: content again, if nothing comes of it
        )

    def push(self, text: str) -> list[Part]:
        """What is certain by now. Text that may be the beginning of a marker is held back."""
        self._buffer += text
        parts: list[Part] = []
        while self._state(parts):
            pass
        return parts

    def _give_up(self, parts: list[Part]) -> bool:
        """Not the format: this and all that follows is content."""
        self._buffer, self._taken = self._taken + self._buffer, ""
        self._state = self._plain
        return self._plain(parts)

    def _plain(self, parts: list[Part]) -> bool:
        if self._buffer:
            parts.append(Content(self._buffer))
            self._buffer = ""
        return False

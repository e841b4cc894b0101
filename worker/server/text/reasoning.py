"""Splits the reasoning of a model, between `<think>` and `</think>`, from its answer.

DeepSeek-R1 and V3.1 reason before they answer. Most chat templates end the prompt with `<think>`; then the generated
text begins within the reasoning.
"""

from __future__ import annotations

from mla_router.worker.server.text.stop_strings import overlap
from mla_router.worker.server.text.tool_calls.machine import BLANKS, TextMachine
from mla_router.worker.server.text.tool_calls.parts import Content, Part, Reasoning

BEGIN = "<think>"
END = "</think>"


def begins_inside(prompt: str) -> bool:
    """Returns whether the prompt ends with an open reasoning."""
    return prompt.rstrip().endswith(BEGIN)


class ReasoningSplitter(TextMachine):
    """Drops the white space around the reasoning and before the answer. A text that ends within the reasoning has no
    content."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__(self._opened if inside else self._start)

    def finish(self) -> list[Part]:
        if self._state in (self._opened, self._thinking):
            rest = self._buffer.rstrip()
            return [Reasoning(rest)] if rest else []
        return [Content(self._buffer)] if self._buffer else []

    def _start(self, parts: list[Part]) -> bool:
        del parts
        rest = self._buffer.lstrip()
        if rest.startswith(BEGIN):
            self._buffer = rest.removeprefix(BEGIN)
            self._state = self._opened
            return True
        if BEGIN.startswith(rest):
            return False
        self._state = self._plain
        return True

    def _opened(self, parts: list[Part]) -> bool:
        """Skips a second `<think>`, which some models write after that of the prompt."""
        del parts
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(BEGIN):
            self._buffer = self._buffer.removeprefix(BEGIN)
            return True
        if BEGIN.startswith(self._buffer):
            return False
        self._state = self._thinking
        return True

    def _thinking(self, parts: list[Part]) -> bool:
        at = self._buffer.find(END)
        end = at if at >= 0 else len(self._buffer) - overlap(self._buffer, END)
        text = self._buffer[:end].rstrip()
        if text:
            parts.append(Reasoning(text))
        if at < 0:
            self._buffer = self._buffer[len(text) :]
            return False
        self._buffer = self._buffer[at + len(END) :]
        self._state = self._after
        return True

    def _after(self, parts: list[Part]) -> bool:
        del parts
        self._buffer = self._buffer.lstrip(BLANKS)  # the grammars of calls skip the same characters
        if not self._buffer:
            return False
        self._state = self._plain
        return True

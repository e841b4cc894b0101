"""What a model says to itself, between `<think>` and `</think>`, apart from its answer.

DeepSeek-R1 and V3.1 think first and then answer. Most chat templates write `<think>` themselves at the
end of the prompt; then the answer begins inside.
"""

from __future__ import annotations

from mla_router.worker.server.text.stop_strings import overlap
from mla_router.worker.server.text.tool_calls.machine import BLANKS, TextMachine
from mla_router.worker.server.text.tool_calls.parts import Content, Part, Reasoning

BEGIN = "<think>"
END = "</think>"


def begins_inside(prompt: str) -> bool:
    """Whether the prompt has opened the reasoning."""
    return prompt.rstrip().endswith(BEGIN)


class ReasoningSplitter(TextMachine):
    """The white space around the reasoning and before the answer belongs to neither. An answer that ends
    before the reasoning does has no content.
    """

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
        """A model may open the reasoning although the prompt has done so."""
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
        self._state = self._behind
        return True

    def _behind(self, parts: list[Part]) -> bool:
        del parts
        self._buffer = self._buffer.lstrip(BLANKS)  # the same as the grammars of calls skip
        if not self._buffer:
            return False
        self._state = self._plain
        return True

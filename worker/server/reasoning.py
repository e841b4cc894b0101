"""What a model says to itself, between `<think>` and `</think>`, apart from its answer.

DeepSeek-R1 and V3.1 think first and then answer. Most chat templates write `<think>` themselves at the
end of the prompt; then the answer begins inside.
"""

from __future__ import annotations

from collections.abc import Callable

from mla_router.worker.server.stop_strings import overlap
from mla_router.worker.server.tool_calls.parts import Content, Part, Reasoning

BEGIN = "<think>"
END = "</think>"


def begins_inside(prompt: str) -> bool:
    """Whether the prompt has opened the reasoning."""
    return prompt.rstrip().endswith(BEGIN)


class ReasoningSplitter:
    """Splits text that arrives in pieces; how it was split makes no difference to the result.

    The white space around the reasoning and before the answer belongs to neither. An answer that ends
    before the reasoning does has no content.
    """

    def __init__(self, *, inside: bool) -> None:
        self._state: Callable[[list[Part]], bool] = self._opened if inside else self._start
        self._buffer = ""

    def push(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._state(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        if self._state in (self._opened, self._thinking):
            rest = self._buffer.rstrip()
            return [Reasoning(rest)] if rest else []
        return [Content(self._buffer)] if self._buffer else []

    # Each state looks at the buffer, takes from it what it is sure of, and says whether the next one
    # should look at the rest.

    def _start(self, parts: list[Part]) -> bool:
        del parts
        rest = self._buffer.lstrip()
        if rest.startswith(BEGIN):
            self._buffer = rest.removeprefix(BEGIN)
            self._state = self._opened
            return True
        if BEGIN.startswith(rest):
            return False
        self._state = self._answering
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
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._state = self._answering
        return True

    def _answering(self, parts: list[Part]) -> bool:
        if self._buffer:
            parts.append(Content(self._buffer))
            self._buffer = ""
        return False

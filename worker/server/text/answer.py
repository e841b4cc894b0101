"""Splits the text of an answer into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mla_router.worker.server.text.reasoning import ReasoningSplitter
from mla_router.worker.server.text.tool_calls import deepseek
from mla_router.worker.server.text.tool_calls.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from mla_router.worker.server.text.tool_calls.llama3 import LLAMA3
from mla_router.worker.server.text.tool_calls.parts import (
    Arguments,
    Call,
    Content,
    Part,
    ToolCallParser,
    ToolFormat,
)

TOOL_FORMATS: dict[str, ToolFormat] = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "llama3": LLAMA3,
}


class AnswerParser:
    """Parses a text that arrives in pieces. The result does not depend on the boundaries of the pieces."""

    def __init__(
        self, reasoning: ReasoningSplitter | None, tools: ToolCallParser | None, *, several: bool
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._several = several  # an answer may have more than one call
        self._calls = 0

    @property
    def held(self) -> int:
        """The number of characters that the parsers hold back."""
        parsers = (self._reasoning, self._tools)
        return sum(parser.held for parser in parsers if parser is not None)

    def push(self, text: str) -> list[Part]:
        """Takes the next piece of text. Returns the parts that are certain, in order."""
        split: list[Part] = [Content(text)] if text else []
        return self._find_calls(self._reasoning.push(text) if self._reasoning else split)

    def finish(self) -> list[Part]:
        """Ends the text. Returns the parts that were held back."""
        parts = self._find_calls(self._reasoning.finish()) if self._reasoning else []
        return parts + self._allowed(self._tools.finish()) if self._tools else parts

    def _find_calls(self, parts: list[Part]) -> list[Part]:
        if self._tools is None:
            return parts
        found: list[Part] = []
        for part in parts:
            found += self._tools.push(part.text) if isinstance(part, Content) else [part]
        return self._allowed(found)

    def _allowed(self, parts: list[Part]) -> list[Part]:
        allowed = []
        for part in parts:
            self._calls += isinstance(part, Call)
            if self._several or self._calls < 2 or not isinstance(part, Call | Arguments):
                allowed.append(part)
        return allowed


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format in which a model writes reasoning and tool calls."""

    tools: ToolFormat | None
    reasons: bool

    @classmethod
    def of(cls, tool_call_parser: str, reasoning_parser: str, template: str) -> AnswerFormat:
        """Returns the format that the two flags name. `auto` detects it in the text of the chat template."""
        tools: ToolFormat | None
        if tool_call_parser == "auto":
            tools = _tool_format_of(template)
        else:
            tools = TOOL_FORMATS.get(tool_call_parser)
        reasons = (
            "</think>" in template if reasoning_parser == "auto" else reasoning_parser != "none"
        )
        return cls(tools, reasons)

    def parser(
        self, functions: Collection[str], *, reasoning: bool, inside: bool, several: bool
    ) -> AnswerParser:
        """Returns the parser of one answer.

        `functions` are the names that the answer may call; `inside`: the prompt has opened the reasoning already.
        """
        splitter = ReasoningSplitter(inside=inside) if reasoning and self.reasons else None
        calls = self.tools.parser(functions) if self.tools and functions else None
        return AnswerParser(splitter, calls, several=several)


def _tool_format_of(template: str) -> ToolFormat:
    if deepseek.CALL_BEGIN in template:
        return DEEPSEEK_V3 if "```json" in template else DEEPSEEK_V31
    return LLAMA3  # the most common format of models with an unknown template

"""Builds the blocks of a message, and the events of its stream, from the parts of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from mla_router.worker.server.endpoints.chat.choice import ChatChoice
from mla_router.worker.server.endpoints.event_writer import Event
from mla_router.worker.server.endpoints.messages.schema import (
    AnswerBlock,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from mla_router.worker.server.text.tool_calls.parts import Arguments, Call, Part, Reasoning


class MessageBuilder:
    def __init__(self, choice: ChatChoice) -> None:
        self.blocks: list[AnswerBlock] = []  # complete blocks
        self._choice = choice
        self._block: AnswerBlock | None = None  # the open block
        self._text: list[str] = []  # of the open block
        # White space. It may be the beginning of a text, or it separates other blocks.
        self._blank = ""

    def add(self, part: Part) -> Iterator[Event]:
        """Takes the next part. Yields its events, which must be exhausted before the next call."""
        if isinstance(part, Arguments):
            yield self._delta("input_json_delta", "partial_json", part.text)
        elif isinstance(part, Call):
            call_id = self._choice.next_call_id()
            yield from self._begin(ToolUseBlock(call_id, part.name, {}))
        elif isinstance(part, Reasoning):
            if not isinstance(self._block, ThinkingBlock):
                yield from self._begin(ThinkingBlock(""))
            yield self._delta("thinking_delta", "thinking", part.text)
        else:
            text = self._blank + part.text
            if not isinstance(self._block, TextBlock):
                if text.isspace():
                    self._blank = text
                    return
                yield from self._begin(TextBlock(""))
            yield self._delta("text_delta", "text", text)

    def close(self) -> Iterator[Event]:
        """Ends the open block, if there is one."""
        if self._block is None:
            return
        yield {"type": "content_block_stop", "index": len(self.blocks)}
        self.blocks.append(_with_text(self._block, "".join(self._text)))
        self._block = None

    def _begin(self, block: AnswerBlock) -> Iterator[Event]:
        yield from self.close()
        self._block, self._text, self._blank = block, [], ""
        index = len(self.blocks)
        yield {"type": "content_block_start", "index": index, "content_block": block}

    def _delta(self, kind: str, field: str, text: str) -> Event:
        assert self._block is not None, f"{kind} without a block"
        self._text.append(text)
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": len(self.blocks), "delta": delta}


def _with_text(block: AnswerBlock, text: str) -> AnswerBlock:
    if isinstance(block, ToolUseBlock):
        arguments = _object(text)
        # A call without valid arguments cannot be made: its text stays visible as a text block.
        return (
            TextBlock(block.name + text)
            if arguments is None
            else msgspec.structs.replace(block, input=arguments)
        )
    return TextBlock(text) if isinstance(block, TextBlock) else ThinkingBlock(text)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.MsgspecError, RecursionError):
        return None
    return value if isinstance(value, dict) else None

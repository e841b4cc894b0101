"""Builds the items of a response, and the events of its stream, from the parts of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from mla_router.worker.server.endpoints.chat.choice import ChatChoice
from mla_router.worker.server.endpoints.event_writer import Event
from mla_router.worker.server.endpoints.logprobs import TokenLogprob
from mla_router.worker.server.endpoints.responses.schema import (
    CallItem,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from mla_router.worker.server.text.tool_calls.parts import Arguments, Call, Part, Reasoning


class ResponseBuilder:
    def __init__(self, choice: ChatChoice) -> None:
        self.items: list[Item] = []  # complete items
        self._choice = choice
        self._item: Item | None = None  # the open item
        self._text: list[str] = []  # of the open item
        self._logprobs: list[TokenLogprob] = []  # of the open item
        # White space. It may be the beginning of a message, or it separates other items.
        self._blank = ""
        self._blank_logprobs: list[TokenLogprob] = []

    def add(self, part: Part, logprobs: list[TokenLogprob]) -> Iterator[Event]:
        """Takes the next part, with the logprobs of its tokens if it is text of a message. Yields its events, which
        must be exhausted before the next call."""
        if isinstance(part, Arguments):
            yield self._delta("response.function_call_arguments.delta", part.text)
        elif isinstance(part, Call):
            call_id = self._choice.next_call_id()
            yield from self._begin(
                CallItem(id=self._id("fc"), status="in_progress", call_id=call_id, name=part.name)
            )
        elif isinstance(part, Reasoning):
            if not isinstance(self._item, ReasoningItem):
                yield from self._begin(ReasoningItem(id=self._id("rs"), status="in_progress"))
            yield self._delta("response.reasoning_text.delta", part.text, content_index=0)
        else:
            text, logprobs = self._blank + part.text, self._blank_logprobs + logprobs
            if not isinstance(self._item, MessageItem):
                if text.isspace():
                    self._blank, self._blank_logprobs = text, logprobs
                    return
                yield from self._begin(MessageItem(id=self._id("msg"), status="in_progress"))
            self._logprobs += logprobs
            yield self._delta(
                "response.output_text.delta", text, content_index=0, logprobs=logprobs
            )

    def close(self, status: str) -> Iterator[Event]:
        """Closes the open item, if any, with `status`: `completed` or `incomplete`."""
        if self._item is None:
            return
        text, index = "".join(self._text), len(self.items)
        item = _with_text(self._item, status, text, self._logprobs)
        place = {"item_id": item.id, "output_index": index}
        if isinstance(item, CallItem):
            done = {"type": "response.function_call_arguments.done", **place, "name": item.name}
            yield {**done, "arguments": text}
        else:
            place["content_index"] = 0
            if isinstance(item, ReasoningItem):
                yield {"type": "response.reasoning_text.done", **place, "text": text}
            else:
                done = {"type": "response.output_text.done", **place, "text": text}
                yield {**done, "logprobs": self._logprobs}
            yield {"type": "response.content_part.done", **place, "part": item.content[0]}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
        self.items.append(item)
        self._item = None

    def _begin(self, item: Item) -> Iterator[Event]:
        """Closes the open item and opens `item`, whose id already has the next position."""
        yield from self.close("completed")
        self._item, self._text, self._blank = item, [], ""
        self._logprobs, self._blank_logprobs = [], []
        index = len(self.items)
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
        if not isinstance(item, CallItem):
            place = {"item_id": item.id, "output_index": index, "content_index": 0}
            part = ReasoningText("") if isinstance(item, ReasoningItem) else OutputText("")
            yield {"type": "response.content_part.added", **place, "part": part}

    def _delta(self, kind: str, text: str, **fields: Any) -> Event:
        assert self._item is not None, f"{kind} without an item"
        self._text.append(text)
        place = {"item_id": self._item.id, "output_index": len(self.items)}
        return {"type": kind, **place, **fields, "delta": text}

    def _id(self, prefix: str) -> str:
        place = len(self.items) + (self._item is not None)
        return f"{prefix}_{self._choice.prepared.handler.origin.id.hex()}_{place}"


def _with_text(item: Item, status: str, text: str, logprobs: list[TokenLogprob]) -> Item:
    replace = msgspec.structs.replace
    if isinstance(item, CallItem):
        return replace(item, status=status, arguments=text)
    if isinstance(item, ReasoningItem):
        return replace(item, status=status, content=[ReasoningText(text)])
    return replace(item, status=status, content=[OutputText(text, logprobs=logprobs)])

"""Messages in the form of chat templates."""

from __future__ import annotations

from typing import Any

import pytest

from mla_router.worker.server.endpoints.chat.messages import for_template
from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.schema.chat import CalledFunction, ChatMessage, ContentPart, ToolCall


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"city": "Paris"}', {"city": "Paris"}),
        ("", {}),
        ('{"city": "Par', '{"city": "Par'),  # a client returns arguments that were cut off
        ("[1]", "[1]"),
        ("[" * 5000, "[" * 5000),
    ],
)
def test_arguments_are_objects_where_they_can_be(written: str, read: Any) -> None:
    call = ToolCall("1", CalledFunction("f", written))
    (message,) = for_template(
        [ChatMessage("assistant", tool_calls=[call])], arguments_as_objects=True
    )
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": read}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (ChatMessage("assistant"), ""),
        (ChatMessage("assistant", refusal="No."), "No."),
        (ChatMessage("assistant", [ContentPart("refusal", refusal="No.")]), "No."),
        (ChatMessage("assistant", "Yes.", refusal=""), "Yes."),
    ],
)
def test_an_answer_of_another_server(message: ChatMessage, text: str) -> None:
    (read,) = for_template([message], arguments_as_objects=True)
    assert read == {"role": "assistant", "content": text}


def test_a_question_needs_content() -> None:
    with pytest.raises(InvalidField) as caught:
        for_template([ChatMessage("user")], arguments_as_objects=True)
    assert caught.value.body.error.param == "messages[0].content"

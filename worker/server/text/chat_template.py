"""Renders a conversation with the model's chat template.

The template is the only program from the model's folder that runs. transformers runs it in Jinja's sandbox.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jinja2

from mla_router.worker.server.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a template. Messages and tools have OpenAI's form, except for the arguments of calls: see
    `ChatTemplate.wants_objects`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True  # the prompt ends with the opening of the assistant's answer
    continue_final_message: bool = False  # the prompt ends within the last message
    variables: Mapping[str, Any] = field(default_factory=dict)  # variables of the template, by name


class ChatTemplate:
    """The template of `tokenizer`, a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        named = template if isinstance(template, dict) else {"default": template}
        self.text = "\n".join(text for text in named.values() if text)  # for detection of formats
        # Parameters of the renderer, which a request must not set.
        arguments = inspect.signature(tokenizer.apply_chat_template).parameters
        self.reserved = frozenset(arguments) | {"self", "messages", "conversations"}
        self.wants_objects = self._wants_objects()
        # Whether it takes the content of a message as a list of parts
        self.takes_parts = self._takes_parts()

    def render(self, conversation: Conversation) -> str:
        """Returns the text of the prompt. Raises InvalidRequest if the template fails or refuses."""
        if not self.text:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions", param="messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                conversation.messages,
                tools=conversation.tools,
                tokenize=False,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                **conversation.variables,
            )
        except jinja2.TemplateError as error:
            # Templates raise errors of their own, for example about the order of roles.
            raise InvalidRequest(f"The chat template says: {error}", param="messages") from None
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError):
            raise InvalidRequest(
                "The chat template cannot render these messages", param="messages"
            ) from None
        return str(text)

    def _wants_objects(self) -> bool:
        """Returns whether the template expects the arguments of calls as objects, and not as JSON strings.

        Templates do not declare this, so the method renders an object and looks for its key.
        """
        call = {"name": "probe", "arguments": {"probe-key": 1}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "0", "type": "function", "function": call}],
            },
        ]
        try:
            return '"probe-key"' in self.render(Conversation(messages))
        except InvalidRequest:
            return False

    def _takes_parts(self) -> bool:
        """Returns whether the template reads the parts of a content. One that does not writes the list itself."""
        content = [{"type": "text", "text": "probe-text"}]
        try:
            text = self.render(Conversation([{"role": "user", "content": content}]))
        except InvalidRequest:
            return False
        return "probe-text" in text and "'type'" not in text

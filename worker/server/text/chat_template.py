"""The model's chat template: from a conversation to the text of a prompt.

Nothing from the model's folder is executed but this template, in the sandbox that transformers puts
around it.
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
    """What a template renders. Messages and tools are in the form that Hugging Face's templates
    read, which is OpenAI's but for the arguments of calls: see `ChatTemplate.wants_objects`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True  # end where the assistant's answer begins
    continue_final_message: bool = False  # end within the last message
    variables: Mapping[str, Any] = field(default_factory=dict)  # the template's own, by name


class ChatTemplate:
    """`tokenizer` is transformers', which holds the template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        named = template if isinstance(template, dict) else {"default": template}
        self.text = "\n".join(text for text in named.values() if text)  # for looking at
        # Names in a call of the renderer that are not variables of the template.
        arguments = inspect.signature(tokenizer.apply_chat_template).parameters
        self.reserved = frozenset(arguments) | {"self", "messages", "conversations"}
        self.wants_objects = self._wants_objects()

    def render(self, conversation: Conversation) -> str:
        """The prompt's text. Raises InvalidRequest if the template cannot or will not render it."""
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
            # What a template raises is its own sentence about the order of roles and the like.
            raise InvalidRequest(f"The chat template says: {error}", param="messages") from None
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError):
            raise InvalidRequest(
                "The chat template cannot render these messages", param="messages"
            ) from None
        return str(text)

    def _wants_objects(self) -> bool:
        """Whether the template wants the arguments of calls as objects, which it writes as JSON, and
        not as JSON already. Templates do not tell: so we look what it makes of an object."""
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

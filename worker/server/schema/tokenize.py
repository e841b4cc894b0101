"""The bodies of /tokenize and /detokenize, with the fields of vLLM and SGLang."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from mla_router.worker.server.schema.chat import (
    ChatMessage,
    ChatRequest,
    Effort,
    NamedToolChoice,
    Tool,
)


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """One prompt, several prompts, or a conversation."""

    prompt: str | list[str] | None = None
    messages: list[ChatMessage] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None  # default: true for prompts, false for conversations
    return_token_strs: bool | None = None
    # as in a chat
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # refused unless neutral
    chat_template: Any = None

    def as_chat(self) -> ChatRequest:
        return ChatRequest(
            messages=self.messages,
            tools=self.tools,
            tool_choice=self.tool_choice,
            reasoning_effort=self.reasoning_effort,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool | None = None

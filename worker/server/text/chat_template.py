"""Renders a conversation with the model's chat template.

The template is the only program from the model's folder that runs, in Jinja's sandbox. The environment is that of
transformers, for which templates are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mla_router.worker.server.errors import InvalidRequest

# The inputs of templates that are no variables of the client, and the other parameters of transformers' renderer, so
# that a client's variable has the same meaning with both
RESERVED = frozenset(
    [
        "self",
        "messages",
        "conversation",
        "conversations",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "kwargs",
    ]
)
# Marks the end of a message that the answer continues. Templates may remove its space.
OPEN_END = "THE_END_OF_THE_OPEN_MESSAGE "


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
    """The templates of a tokenizer by name, of which `tool_use` is for conversations with tools. `special_tokens` are
    variables of the template: `bos_token`, ..."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = templates
        self._special_tokens = special_tokens
        self._compiled: dict[str, jinja2.Template] = {}
        self.text = "\n".join(text for text in templates.values() if text)  # to detect formats
        self.reserved = RESERVED
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
            if conversation.continue_final_message:
                return self._render_open(conversation)
            return self._render(conversation, conversation.messages)
        except jinja2.TemplateError as error:
            # Templates raise errors of their own, for example about the order of roles.
            raise InvalidRequest(f"The chat template says: {error}", param="messages") from None
        except Exception as error:  # the template is a program, which may raise anything
            raise InvalidRequest(
                "The chat template cannot render these messages", param="messages"
            ) from error

    def _render(self, conversation: Conversation, messages: list[dict[str, Any]]) -> str:
        if not messages:
            raise ValueError("no messages")
        with_tools = conversation.tools is not None and "tool_use" in self._templates
        return self._template("tool_use" if with_tools else "default").render(
            {
                **self._special_tokens,
                **conversation.variables,
                "messages": messages,
                "tools": conversation.tools,
                "documents": None,
                "add_generation_prompt": conversation.add_generation_prompt,
            }
        )

    def _render_open(self, conversation: Conversation) -> str:
        """Returns the text up to the end of the last message's content. Raises ValueError if it is not in the text."""
        messages = [*conversation.messages[:-1], deepcopy(conversation.messages[-1])]
        content = _mark_end(messages[-1])
        text = self._render(conversation, messages)
        end = text.rfind(OPEN_END.strip())
        if end < 0 or content.strip() not in text:
            raise ValueError("the template leaves the last message out")
        keeps_spaces = text[end:].startswith(OPEN_END)
        return text[:end] if keeps_spaces else text[:end].rstrip()

    def _template(self, name: str) -> jinja2.Template:
        """Raises KeyError, jinja2.TemplateError."""
        if name not in self._compiled:
            self._compiled[name] = _ENVIRONMENT.from_string(self._templates[name])
        return self._compiled[name]

    def syntax_error(self) -> jinja2.TemplateSyntaxError | None:
        """Returns the error of the first template that cannot be compiled; None if there is none."""
        try:
            for name in self._templates:
                self._template(name)
        except jinja2.TemplateSyntaxError as error:
            return error
        return None

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


def _mark_end(message: dict[str, Any]) -> str:
    """Appends OPEN_END to the content of `message`, or to the last text among its parts. Returns that text as it was.
    Raises LookupError or TypeError if there is none."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + OPEN_END
        return content
    part = [part for part in content if "text" in part][-1]
    text: str = part["text"]
    part["text"] = text + OPEN_END
    return text


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: templates mark the texts of the assistant with it, for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


_ENVIRONMENT = _make_environment()

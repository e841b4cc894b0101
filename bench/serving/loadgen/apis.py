"""The three APIs of a generation: the body of a request, and the parsing of its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from loadgen.tokens import Prompt


class BadAnswer(Exception):
    """The answer is an error, or it does not follow its API."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The common fields of all requests of a run."""

    model: str
    stream: bool
    ignore_eos: bool
    token_ids: bool  # send prompts as ids; one-turn conversations only
    extra: dict[str, Any]  # overrides fields of the body


@dataclass(slots=True)
class Answer:
    """The parsed part of one answer. The counts come from the server; None if it sent none."""

    parts: list[str] = field(default_factory=list)
    characters: int = 0
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add(self, text: str | None) -> bool:
        """Adds a piece of text. Returns whether it is not empty."""
        if not text:
            return False
        self.parts.append(text)
        self.characters += len(text)
        return True


class Api(ABC):
    """One endpoint. `history` are the questions and answers before the prompt."""

    path: ClassVar[str]

    @abstractmethod
    def body(
        self,
        options: RequestOptions,
        history: list[tuple[str, str]],
        prompt: Prompt,
        output_tokens: int,
    ) -> dict[str, Any]: ...

    @abstractmethod
    def read(self, data: bytes, answer: Answer) -> bool:
        """Adds the data of an event, or a complete body, to the answer. Returns whether it has text. Raises
        `BadAnswer`, or `msgspec.MsgspecError` for another form."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    """A choice of a completion (`text`), of a chat (`message`) or of a stream of a chat (`delta`)."""

    text: str | None = None
    message: _Message | None = None
    delta: _Message | None = None
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _OpenAI(Api):
    _decoder: ClassVar = msgspec.json.Decoder(_Completion)

    def _common(self, options: RequestOptions, output_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": options.model,
            "temperature": 0.0,
            "max_tokens": output_tokens,
            "stream": options.stream,
            "ignore_eos": options.ignore_eos,
        }
        if options.stream:
            body["stream_options"] = {"include_usage": True}
        return body

    def read(self, data: bytes, answer: Answer) -> bool:
        chunk = self._decoder.decode(data)
        if chunk.error is not None:
            raise BadAnswer(f"error in the answer: {chunk.error}")
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            answer.prompt_tokens = chunk.usage.prompt_tokens
            answer.output_tokens = chunk.usage.completion_tokens
            answer.cached_tokens = None if details is None else details.cached_tokens
        brought = False
        for choice in chunk.choices:
            brought |= answer.add(choice.text)
            message = choice.delta or choice.message
            if message is not None:
                brought |= answer.add(message.reasoning_content)
                brought |= answer.add(message.content)
            answer.finish_reason = choice.finish_reason or answer.finish_reason
        return brought


class Completions(_OpenAI):
    path = "/v1/completions"

    def body(
        self,
        options: RequestOptions,
        history: list[tuple[str, str]],
        prompt: Prompt,
        output_tokens: int,
    ) -> dict[str, Any]:
        whole = prompt.ids if options.token_ids else _in_one(history, prompt)
        return {**self._common(options, output_tokens), "prompt": whole, **options.extra}


class ChatCompletions(_OpenAI):
    path = "/v1/chat/completions"

    def body(
        self,
        options: RequestOptions,
        history: list[tuple[str, str]],
        prompt: Prompt,
        output_tokens: int,
    ) -> dict[str, Any]:
        messages = []
        for question, reply in history:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": reply})
        messages.append({"role": "user", "content": prompt.text})
        return {**self._common(options, output_tokens), "messages": messages, **options.extra}


class _Meta(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    finish_reason: Any = None  # an object, or a string


class _Generated(msgspec.Struct):
    text: str = ""
    meta_info: _Meta | None = None
    error: Any = None


class Generate(Api):
    """SGLang's native API; each event of a stream repeats the text so far."""

    path = "/generate"
    _decoder: ClassVar = msgspec.json.Decoder(_Generated)

    def body(
        self,
        options: RequestOptions,
        history: list[tuple[str, str]],
        prompt: Prompt,
        output_tokens: int,
    ) -> dict[str, Any]:
        sampling = {
            "temperature": 0.0,
            "max_new_tokens": output_tokens,
            "ignore_eos": options.ignore_eos,
        }
        asked = (
            {"input_ids": prompt.ids} if options.token_ids else {"text": _in_one(history, prompt)}
        )
        return {"sampling_params": sampling, "stream": options.stream, **asked, **options.extra}

    def read(self, data: bytes, answer: Answer) -> bool:
        event = self._decoder.decode(data)
        if event.error is not None:
            raise BadAnswer(f"error in the answer: {event.error}")
        if event.meta_info is None:
            raise BadAnswer("an answer without meta_info")
        meta = event.meta_info
        answer.prompt_tokens = meta.prompt_tokens
        answer.output_tokens = meta.completion_tokens
        answer.cached_tokens = meta.cached_tokens
        if meta.finish_reason is not None:
            reason = meta.finish_reason
            answer.finish_reason = str(reason["type"] if isinstance(reason, dict) else reason)
        return answer.add(event.text[answer.characters :])


def _in_one(history: list[tuple[str, str]], prompt: Prompt) -> str:
    return "".join(part for pair in history for part in pair) + prompt.text


_COMPLETIONS, _CHAT, _GENERATE = Completions(), ChatCompletions(), Generate()

# The names of SGLang's and vLLM's benchmarks.
BACKENDS: dict[str, Api] = {
    "sglang-oai": _COMPLETIONS,
    "vllm": _COMPLETIONS,
    "sglang-oai-chat": _CHAT,
    "vllm-chat": _CHAT,
    "sglang": _GENERATE,
}

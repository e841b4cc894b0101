"""One choice of a conversation: its outputs become the parts of a message."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from mla_router.worker.generation import FinishReason, Logprobs
from mla_router.worker.server.endpoints.chat.prepare import PreparedChat
from mla_router.worker.server.endpoints.logprobs import ChatLogprobs, LoggedTokens, chat_logprobs
from mla_router.worker.server.requests.choice import Finish, Output
from mla_router.worker.server.requests.usage import CompletionTokensDetails, Usage
from mla_router.worker.server.text.answer import AnswerParser
from mla_router.worker.server.text.tool_calls.parts import Call, Content, Part, Reasoning


@dataclass(slots=True)
class ChatChoice:
    """Makes the parts of one choice of a chat completion from its outputs."""

    prepared: PreparedChat
    index: int
    calls: int = 0  # number of calls so far
    prompt_logprobs: Logprobs | None = None
    _tokens: LoggedTokens = field(default_factory=LoggedTokens)  # logprobs that are not sent yet
    _token_ids: list[int] = field(default_factory=list)  # not sent yet
    _reasoning: list[str] = field(default_factory=list)
    _parser: AnswerParser = field(init=False)
    _echoed: str = field(init=False)
    _ended: bool = False

    def __post_init__(self) -> None:
        self._parser = self.prepared.parser()
        self._echoed = self.prepared.echoed

    def take(self, output: Output) -> list[Part]:
        """Takes `output`. Returns the parts that it makes certain.

        The parts depend on the tokens only and not on their grouping, so that another worker can continue (replay.py).
        """
        details, parts = self.prepared.details, self._echo()
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if details.logprobs is not None:
            self._tokens.add(output)
        if details.token_ids:
            self._token_ids += output.token_ids
        parts += self._parser.push(output.text)
        if output.finish is not None and not self._ended:
            self._ended = True
            parts += self._parser.finish()
        if self.prepared.splits_reasoning:
            self._reasoning += [part.text for part in parts if isinstance(part, Reasoning)]
        if self.prepared.reasoning_shown:
            return parts
        return [part for part in parts if not isinstance(part, Reasoning)]

    def _echo(self) -> list[Part]:
        """Returns the echoed message once, as content."""
        echoed, self._echoed = self._echoed, ""
        return [Content(echoed)] if echoed else []

    @property
    def held(self) -> int:
        """The number of characters that are in no part yet."""
        return self._parser.held

    def skip(self, output: Output) -> None:
        """Takes an output that the client has received."""
        self.calls += sum(isinstance(part, Call) for part in self.take(output))
        self._tokens, self._token_ids = LoggedTokens(), []

    @property
    def has_details(self) -> bool:
        """Whether logprobs or token ids wait to be sent."""
        return bool(self._tokens.token_ids or self._token_ids)

    def take_logprobs(self) -> ChatLogprobs | None:
        """Returns the logprobs of the tokens since the last call; None if the request wants none."""
        if self.prepared.details.logprobs is None:
            return None
        tokens, self._tokens = self._tokens, LoggedTokens()
        return chat_logprobs(self.prepared.handler.service.tokenizer, tokens, self.prepared.details)

    def take_token_ids(self) -> list[int]:
        """Returns the token ids since the last call."""
        token_ids, self._token_ids = self._token_ids, []
        return token_ids

    async def reasoning_tokens(self) -> int:
        """Returns the number of tokens of the reasoning text, without the marks around it."""
        text = "".join(self._reasoning)
        if not text:
            return 0
        tokenizer = self.prepared.handler.service.tokenizer
        limit = len(text)  # a token has at least one character
        return len(await tokenizer.encode_rendered(text, context_length=limit))

    def next_call_id(self) -> str:
        """Returns the id of the next call. It is the same on every worker that continues this answer."""
        name = f"{self.prepared.handler.origin.id.hex()} {self.index} {self.calls}"
        self.calls += 1
        return "call_" + hashlib.sha256(name.encode()).hexdigest()[:24]

    def reason_of(self, finish: Finish | None) -> str | None:
        """OpenAI's finish_reason."""
        if finish is None:
            return None
        stopped = finish.reason == FinishReason.STOP.value
        return "tool_calls" if stopped and self.calls else finish.reason


async def usage_of(prepared: PreparedChat, choices: Iterable[ChatChoice]) -> Usage:
    """Returns the final token counts. They include the reasoning tokens if reasoning is split from content, and those of a
    prediction if the client sent one."""
    handler, details = prepared.handler, CompletionTokensDetails()
    usage = handler.usage
    if not prepared.splits_reasoning and handler.prediction is None:
        return usage
    if prepared.splits_reasoning:
        tokens = sum([await choice.reasoning_tokens() for choice in choices])
        details = CompletionTokensDetails(tokens)
    if handler.prediction is not None:
        accepted = handler.accepted_prediction_tokens
        details = msgspec.structs.replace(
            details,
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=len(handler.prediction) * handler.size - accepted,
        )
    return msgspec.structs.replace(usage, completion_tokens_details=details)

"""One choice of a conversation: from its outputs to the parts of a message."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from mla_router.worker.core import FinishReason
from mla_router.worker.server.answer import AnswerParser
from mla_router.worker.server.chat.run import ChatRun
from mla_router.worker.server.generation import Output
from mla_router.worker.server.logprobs import ChatLogprobs, chat_logprobs
from mla_router.worker.server.scored_tokens import ScoredTokens
from mla_router.worker.server.tool_calls.parts import Call, Part


@dataclass(slots=True)
class ChatChoice:
    run: ChatRun
    index: int
    calls: int = 0  # begun so far
    tokens: ScoredTokens = field(default_factory=ScoredTokens)  # whose logprobs are not shown yet
    _is_scored: bool = field(init=False)
    _parser: AnswerParser = field(init=False)
    _ended: bool = False

    def __post_init__(self) -> None:
        self._is_scored = self.run.generation.sampling.params.logprobs
        self._parser = self.run.parser()

    def take(self, output: Output) -> list[Part]:
        """What has become certain by `output`. Depends on the tokens so far and not on how they came,
        so that another worker can go on (replay.py)."""
        if self._is_scored:
            self.tokens.add(output)
        parts = self._parser.push(output.text)
        if output.finish is not None and not self._ended:
            self._ended = True
            parts += self._parser.finish()
        return parts

    def skip(self, output: Output) -> None:
        """The client has had what `output` made certain."""
        self.calls += sum(isinstance(part, Call) for part in self.take(output))
        self.tokens = ScoredTokens()

    def take_logprobs(self) -> ChatLogprobs | None:
        """Those of the tokens since the last time; None if nobody wants them."""
        if not self._is_scored:
            return None
        tokens, self.tokens = self.tokens, ScoredTokens()
        return chat_logprobs(self.run.generation.service.tokenizer, tokens)

    def next_call_id(self) -> str:
        """The same on every worker that goes on with this answer."""
        name = f"{self.run.generation.origin.id.hex()} {self.index} {self.calls}"
        self.calls += 1
        return "call_" + hashlib.sha256(name.encode()).hexdigest()[:24]

    def reason_of(self, output: Output) -> str | None:
        """OpenAI's finish_reason."""
        if output.finish is None:
            return None
        stopped = output.finish.reason == FinishReason.STOP.value
        return "tool_calls" if stopped and self.calls else output.finish.reason

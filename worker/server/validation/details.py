"""What a client wants to see of answers besides their text: log-probabilities, token ids, token counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.schema.fields import OpenAIFields
from mla_router.worker.server.text.tokenizer import Tokenizer

MAX_PROMPT_LOGPROBS = 20  # likely tokens in each place of the prompt


@dataclass(frozen=True, slots=True)
class Details:
    logprobs: int | None = None  # of so many likely tokens in each place; None: no logprobs at all
    prompt_logprobs: int | None = None  # the same of the prompt, in vLLM's form
    token_ids: bool = False
    named_by_id: bool = False  # tokens in logprobs: `token_id:5` for the text

    @classmethod
    def of(cls, body: OpenAIFields, logprobs: int | None) -> Details:
        """`logprobs` has been checked. Raises InvalidField."""
        top = body.prompt_logprobs
        if top is not None and not 0 <= top <= MAX_PROMPT_LOGPROBS:
            raise InvalidField("prompt_logprobs", f"must be between 0 and {MAX_PROMPT_LOGPROBS}")
        if top is not None and body.stream:
            raise InvalidField("prompt_logprobs", "not with stream")
        if body.stream_options is not None and not body.stream:
            raise InvalidField("stream_options", "only with stream: true")
        return cls(
            logprobs, top, bool(body.return_token_ids), bool(body.return_tokens_as_token_ids)
        )

    @property
    def scored(self) -> bool:
        """The scheduler has to score tokens."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def top(self) -> int:
        """How many of the likeliest tokens the scheduler has to name."""
        return max(self.logprobs or 0, self.prompt_logprobs or 0)

    def name_of(self, tokenizer: Tokenizer) -> Callable[[int], str]:
        """Writes a token in logprobs."""
        return "token_id:{}".format if self.named_by_id else tokenizer.text_of

"""Optional details of an answer: log-probabilities and token ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.schema.fields import OpenAIFields
from mla_router.worker.server.text.tokenizer import Tokenizer

MAX_PROMPT_LOGPROBS = 20  # likely tokens at each position of the prompt


@dataclass(frozen=True, slots=True)
class Details:
    logprobs: int | None = None  # number of likely tokens at each position; None: no logprobs
    prompt_logprobs: int | None = None  # the same for the prompt, in vLLM's form
    token_ids: bool = False
    named_by_id: bool = False  # tokens in logprobs are written as `token_id:5`

    @classmethod
    def of(cls, body: OpenAIFields, logprobs: int | None) -> Details:
        """Reads the details of a request. The caller has checked `logprobs`. Raises InvalidField."""
        top = body.prompt_logprobs
        if top is not None and not 0 <= top <= MAX_PROMPT_LOGPROBS:
            raise InvalidField("prompt_logprobs", f"must be between 0 and {MAX_PROMPT_LOGPROBS}")
        if top is not None and body.stream:
            raise InvalidField("prompt_logprobs", "cannot be combined with stream")
        if body.stream_options is not None and not body.stream:
            raise InvalidField("stream_options", "only with stream: true")
        return cls(
            logprobs, top, bool(body.return_token_ids), bool(body.return_tokens_as_token_ids)
        )

    @property
    def wants_logprobs(self) -> bool:
        """Whether the scheduler has to compute logprobs."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    @property
    def top(self) -> int:
        """The number of likely tokens that the scheduler has to return at each position."""
        return max(self.logprobs or 0, self.prompt_logprobs or 0)

    def name_of(self, tokenizer: Tokenizer) -> Callable[[int], str]:
        """Returns the function that writes a token in logprobs."""
        return "token_id:{}".format if self.named_by_id else tokenizer.text_of

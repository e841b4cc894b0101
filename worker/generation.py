"""The generation of one request, as server and scheduler know it: its settings, its log-probabilities and its end."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Reasons why a request ended, with OpenAI's names where it has one."""

    STOP = "stop"  # an EOS or stop token, or a stop string
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the client disconnected or aborted it
    ERROR = "error"  # its computation failed
    LOST = "lost"  # this worker lost state of the request; another worker can compute it
    REFUSED = "refused"  # the request is invalid


MAX_PREDICTION = 1 << 14  # maximum number of tokens of a prediction


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Sampling parameters of one request. The HTTP server validates them.

    The sampled tokens depend on these parameters and on the request's own tokens, not on the batch. By default every
    feature is off.
    """

    max_tokens: int
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0  # smallest probability of a token, as a share of the largest
    seed: int = 0
    repetition_penalty: float = 1.0  # for tokens in prompt or output (CTRL, arXiv:1909.05858)
    frequency_penalty: float = 0.0  # for each occurrence in the output
    presence_penalty: float = 0.0  # for tokens that occur in the output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit)
    min_tokens: int = 0  # output tokens before any of `stop_token_ids` may be sampled
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: bool = False  # of the sampled tokens
    top_logprobs: int = 0  # number of most likely tokens for each token with a logprob
    # First prompt token with a logprob; None: no prompt logprobs
    prompt_logprobs_from: int | None = None
    # Bitmask of the tokens that may be sampled: bit t % 8 of byte t // 8 is token t. Empty: all tokens.
    allowed: bytes = b""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Whether the logits depend on all tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


class Logprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural log-probabilities of consecutive tokens, and of the most likely tokens at their positions."""

    logprobs: list[float] = []
    top_ids: list[list[int]] = []  # one list a token, most likely first; empty without top_logprobs
    top_logprobs: list[list[float]] = []

    def first(self, count: int) -> Logprobs:
        """Returns the logprobs of the first `count` tokens."""
        return self._part(slice(count))

    def only(self, index: int) -> Logprobs:
        """Returns the logprobs of token number `index`."""
        return self._part(slice(index, index + 1))

    def _part(self, tokens: slice) -> Logprobs:
        return Logprobs(self.logprobs[tokens], self.top_ids[tokens], self.top_logprobs[tokens])

    @classmethod
    def joined(cls, parts: Sequence[Logprobs]) -> Logprobs:
        """Returns the logprobs of all tokens of `parts`."""
        return cls(
            [one for part in parts for one in part.logprobs],
            [one for part in parts for one in part.top_ids],
            [one for part in parts for one in part.top_logprobs],
        )

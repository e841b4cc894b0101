"""The log-probabilities of a request's prompt tokens, which its chunks give."""

from __future__ import annotations

from mla_router.worker.generation import Logprobs
from mla_router.worker.step.plan import PrefillChunk


class PromptLogprobs:
    """Those of the prompt from `first` on, but the first token of a prompt never has one."""

    __slots__ = ("_prompt", "found", "next")

    def __init__(self, prompt: list[int], first: int) -> None:
        self._prompt = prompt
        self.found = Logprobs()
        self.next = min(max(1, first), len(prompt))  # the next token of the prompt that needs one

    @property
    def is_complete(self) -> bool:
        return self.next == len(self._prompt)

    def in_chunk(self, start: int, end: int) -> tuple[int, tuple[int, ...]]:
        """Returns `logprob_start` and `logprob_tokens` of the chunk from `start` to `end`: a row predicts the token after
        its own."""
        first = max(start + 1, self.next)
        tokens = tuple(self._prompt[first : end + 1])
        return first - 1 - start if tokens else 0, tokens

    def add(self, chunk: PrefillChunk, logprobs: Logprobs | None) -> None:
        """Adds those of a computed chunk."""
        if not chunk.logprob_tokens:
            return
        assert logprobs is not None, f"{chunk!r}"
        self.found.logprobs.extend(logprobs.logprobs)
        self.found.top_ids.extend(logprobs.top_ids)
        self.found.top_logprobs.extend(logprobs.top_logprobs)
        self.next += len(chunk.logprob_tokens)

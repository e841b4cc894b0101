"""The way of a step's tokens to the host: one asynchronous copy, waited for a step later."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.core import Scores, StepResult


class Readback:
    """A step's sampled tokens on their way to the host. Implements `PendingStep`."""

    def __init__(
        self, tokens: Tensor, logprobs: Tensor | None, copied: torch.cuda.Event | None
    ) -> None:
        self._tokens = tokens
        self._logprobs = logprobs
        self._copied = copied

    def wait(self) -> StepResult:
        if self._copied is not None:
            self._copied.synchronize()
        scores: list[Scores | None] | None = None
        if self._logprobs is not None:
            scores = [Scores([logprob]) for logprob in self._logprobs.tolist()]
        return StepResult(self._tokens.tolist(), scores)


class ReadbackRing:
    """Two pinned buffers in turn: a step's result is read before the step after next samples."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._turn = 0
        if self._on_cuda:
            self._tokens = torch.empty(2, num_slots, dtype=torch.int64, pin_memory=True)
            self._logprobs = torch.empty(2, num_slots, dtype=torch.float32, pin_memory=True)

    def start(self, tokens: Tensor, logprobs: Tensor | None) -> Readback:
        if not self._on_cuda:
            return Readback(tokens, logprobs, None)
        self._turn ^= 1
        count = tokens.shape[0]
        host_tokens = self._tokens[self._turn, :count].copy_(tokens, non_blocking=True)
        host_logprobs = None
        if logprobs is not None:
            host_logprobs = self._logprobs[self._turn, :count].copy_(logprobs, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return Readback(host_tokens, host_logprobs, copied)

"""The way of a step's results to the host: nobody waits for them until a step later."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_router.worker.core import Scores, StepPlan, StepResult
from mla_router.worker.engine.sampling.scores import RowScores


@dataclass(slots=True)
class StepClock:
    """Measures how long a device that works asynchronously is busy with each step."""

    done_at: float = 0.0  # when the last step was found complete

    def complete(self, began: float) -> float:
        """Seconds of a step that is complete now and was launched at `began`. The device began it when the
        step before was complete. Both times are of `time.perf_counter`."""
        start, self.done_at = max(began, self.done_at), time.perf_counter()
        return self.done_at - start


class Readback:
    """A step's tokens and scores on their way to the host. Implements `PendingStep`."""

    def __init__(
        self,
        plan: StepPlan,
        tokens: Tensor,
        scores: RowScores | None,
        prompt_scores: RowScores | None,
        copied: torch.cuda.Event | None,
        *,
        began: float,
        clock: StepClock,
    ) -> None:
        """`copied`: None where the device is the host, which has computed the step by now."""
        self._plan = plan
        self._tokens = tokens
        self._scores = scores
        self._prompt_scores = prompt_scores
        self._copied = copied
        self._began = began
        self._clock = clock
        self._seconds = time.perf_counter() - began if copied is None else 0.0

    def wait(self) -> StepResult:
        if self._copied is not None:
            self._copied.synchronize()
            self._seconds = self._clock.complete(self._began)
        scores: list[Scores | None] | None = None
        if self._scores is not None:
            scores = self._scores.by_owner(len(self._tokens))
        prompt_scores: list[Scores | None] | None = None
        if self._prompt_scores is not None:
            prompt_scores = self._prompt_scores.by_owner(len(self._plan.chunks))
        return StepResult(self._tokens.tolist(), scores, prompt_scores, self._seconds)


class ReadbackRing:
    """Two pinned buffers in turn: a step's result is read before the step after next samples. They
    grow to the largest result seen."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._tokens = [torch.empty(0, dtype=torch.int32)] * 2
        self._scores = [torch.empty(0, dtype=torch.int32)] * 2
        self._turn = 0
        self._clock = StepClock()

    def tokens(self, rows: int) -> Tensor:
        """[rows] int32, to be written by the kernel that draws the tokens of the next result: the device writes
        them to the host's memory itself. A copy of its own takes longer than drawing them."""
        self._turn ^= 1
        if not self._on_cuda:
            return torch.empty(rows, dtype=torch.int32, device=self._device)
        return self._take(self._tokens, rows)

    def start(
        self,
        plan: StepPlan,
        tokens: Tensor,
        scores: RowScores | None,
        prompt_scores: RowScores | None,
        *,
        began: float,
    ) -> Readback:
        """`tokens` are the last that were given out, and all that writes to them has been launched; the launch
        of the step's forward pass began at `began`, by `time.perf_counter`."""
        if not self._on_cuda:
            return Readback(
                plan, tokens, scores, prompt_scores, None, began=began, clock=self._clock
            )
        if parts := [*_tensors(scores), *_tensors(prompt_scores)]:
            scores, rest = _with(scores, self._copy(parts))
            prompt_scores, rest = _with(prompt_scores, rest)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return Readback(plan, tokens, scores, prompt_scores, copied, began=began, clock=self._clock)

    def _copy(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """`parts`, of int64 that fits in 32 bits or float32, on the host once the stream is there."""
        packed = torch.cat(
            [
                (part.view(torch.int32) if part.is_floating_point() else part.int()).flatten()
                for part in parts
            ]
        )
        host = self._take(self._scores, len(packed)).copy_(packed, non_blocking=True)
        return [
            (some.view(torch.float32) if part.is_floating_point() else some).view(part.shape)
            for some, part in zip(
                torch.split(host, [part.numel() for part in parts]), parts, strict=True
            )
        ]

    def _take(self, buffers: list[Tensor], size: int) -> Tensor:
        """That of this turn, [size]."""
        if size > len(buffers[self._turn]):
            buffers[self._turn] = torch.empty(2 * size, dtype=torch.int32, pin_memory=True)
        return buffers[self._turn][:size]


def _tensors(scores: RowScores | None) -> list[Tensor]:
    return [] if scores is None else [scores.logprobs, scores.top_ids, scores.top_logprobs]


def _with(scores: RowScores | None, on_host: list[Tensor]) -> tuple[RowScores | None, list[Tensor]]:
    """`scores` with the first of the tensors `on_host`, and the others."""
    if scores is None:
        return None, on_host
    logprobs, top_ids, top_logprobs, *rest = on_host
    moved = replace(scores, logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)
    return moved, rest

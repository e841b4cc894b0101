"""The asynchronous copy of a step's results to the host. The host waits for it one step later."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_router.worker.engine.sampling.logprobs import RowLogprobs
from mla_router.worker.generation import Logprobs
from mla_router.worker.step.plan import StepPlan
from mla_router.worker.step.result import UNUSED, StepResult


@dataclass(slots=True)
class StepClock:
    """Measures how long an asynchronous device is busy with each step."""

    done_at: float = 0.0  # time at which the previous step was found complete

    def complete(self, began: float) -> float:
        """Returns the seconds of a step that was launched at `began` and is complete now. The device starts a step
        when the previous one is complete. Times are of `time.perf_counter`."""
        start, self.done_at = max(began, self.done_at), time.perf_counter()
        return self.done_at - start


class AsyncCopy:
    """The copy of a step's tokens and logprobs to the host. Implements `PendingStep`."""

    def __init__(
        self,
        plan: StepPlan,
        tokens: Tensor,
        logprobs: RowLogprobs | None,
        prompt_logprobs: RowLogprobs | None,
        copied: torch.cuda.Event | None,
        *,
        began: float,
        clock: StepClock,
    ) -> None:
        """`copied`: the event after the copy; None on a CPU, which has computed the step by now."""
        self._plan = plan
        self._tokens = tokens
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs
        self._copied = copied
        self._began = began
        self._clock = clock
        self._seconds = time.perf_counter() - began if copied is None else 0.0
        self._drafts: Tensor | None = None
        self._drafts_copied: torch.cuda.Event | None = None

    def extend(self) -> None:
        """Counts the work since the start of the copy as part of the step. On a GPU it runs within the next step's
        time."""
        if self._copied is None:
            self._seconds = time.perf_counter() - self._began

    def wait(self) -> StepResult:
        if self._copied is not None:
            self._copied.synchronize()
            self._seconds = self._clock.complete(self._began)
        logprobs: list[Logprobs | None] | None = None
        if self._logprobs is not None:
            logprobs = self._logprobs.by_owner(len(self._tokens))
        prompt_logprobs: list[Logprobs | None] | None = None
        if self._prompt_logprobs is not None:
            prompt_logprobs = self._prompt_logprobs.by_owner(len(self._plan.chunks))
        tokens = self._tokens.numpy().tolist()  # torch's takes twice as long
        if self._plan.num_drafts:
            tokens = [[token for token in row if token != UNUSED] for row in tokens]
            if logprobs is not None:
                logprobs = [
                    some and some.first(len(row))
                    for some, row in zip(logprobs, tokens, strict=True)
                ]
        return StepResult(tokens, logprobs, prompt_logprobs, self._seconds)

    def add_drafts(self, drafts: Tensor, copied: torch.cuda.Event | None) -> None:
        """Adds `drafts` [S, K] on the host, valid after the event `copied`."""
        self._drafts, self._drafts_copied = drafts, copied

    def drafts(self) -> list[list[int]]:
        assert self._drafts is not None, f"no drafts, {self._plan}"
        if self._drafts_copied is not None:
            self._drafts_copied.synchronize()
        return [[token for token in row if token != UNUSED] for row in self._drafts.tolist()]


class AsyncCopyBuffers:
    """Two pinned host buffers that alternate: a step's result is read before the step after next samples. Each grows
    to the largest result so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._tokens = [torch.empty(0, dtype=torch.int32)] * 2
        self._logprobs = [torch.empty(0, dtype=torch.int32)] * 2
        self._drafts = [torch.empty(0, dtype=torch.int32)] * 2
        self._turn = 0
        self._clock = StepClock()

    def tokens(self, slots: int, per_slot: int) -> Tensor:
        """Returns [slots, per_slot] int32, to which the sampling kernel writes the tokens of the next result. On a GPU the
        tensor lies in pinned host memory: a separate copy takes longer than the sampling."""
        self._turn ^= 1
        if not self._on_cuda:
            return torch.empty(slots, per_slot, dtype=torch.int32, device=self._device)
        return self._take(self._tokens, slots * per_slot).view(slots, per_slot)

    def start(
        self,
        plan: StepPlan,
        tokens: Tensor,
        logprobs: RowLogprobs | None,
        prompt_logprobs: RowLogprobs | None,
        *,
        began: float,
    ) -> AsyncCopy:
        """Starts the copy. `tokens` are those of the last call of `tokens`, and all kernels that write to them are
        launched. `began`: time at which the launch of the step began, of `time.perf_counter`."""
        if not self._on_cuda:
            return AsyncCopy(
                plan, tokens, logprobs, prompt_logprobs, None, began=began, clock=self._clock
            )
        if parts := [*_tensors(logprobs), *_tensors(prompt_logprobs)]:
            logprobs, rest = _replaced(logprobs, self._copy(parts))
            prompt_logprobs, rest = _replaced(prompt_logprobs, rest)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return AsyncCopy(
            plan, tokens, logprobs, prompt_logprobs, copied, began=began, clock=self._clock
        )

    def start_drafts(self, pending: AsyncCopy, drafts: Tensor) -> None:
        """Starts the copy of `drafts` [S, K] int64, UNUSED after the last one, of the step of the last `start`, which
        returned `pending`."""
        if not self._on_cuda:
            pending.add_drafts(drafts, None)
            return
        host = self._take(self._drafts, drafts.numel()).view(drafts.shape)
        host.copy_(drafts.int(), non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        pending.add_drafts(host, copied)

    def _copy(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Copies tensors of float32, or of int64 that fits in 32 bits, to the host in one piece. Returns them in order;
        they are valid once the stream has reached this point."""
        packed = torch.cat(
            [
                (part.view(torch.int32) if part.is_floating_point() else part.int()).flatten()
                for part in parts
            ]
        )
        host = self._take(self._logprobs, len(packed)).copy_(packed, non_blocking=True)
        return [
            (some.view(torch.float32) if part.is_floating_point() else some).view(part.shape)
            for some, part in zip(
                torch.split(host, [part.numel() for part in parts]), parts, strict=True
            )
        ]

    def _take(self, buffers: list[Tensor], size: int) -> Tensor:
        """Returns [size] of the current one of the two `buffers`."""
        if size > len(buffers[self._turn]):
            buffers[self._turn] = torch.empty(2 * size, dtype=torch.int32, pin_memory=True)
        return buffers[self._turn][:size]


def _tensors(rows: RowLogprobs | None) -> list[Tensor]:
    return [] if rows is None else [rows.logprobs, rows.top_ids, rows.top_logprobs]


def _replaced(
    rows: RowLogprobs | None, on_host: list[Tensor]
) -> tuple[RowLogprobs | None, list[Tensor]]:
    """Returns `rows` with its tensors replaced by the first of `on_host`, and the rest of `on_host`."""
    if rows is None:
        return None, on_host
    logprobs, top_ids, top_logprobs, *rest = on_host
    return replace(rows, logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs), rest

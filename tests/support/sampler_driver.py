"""Calls a `Sampler` as the engine does, with logits of the test."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from mla_router.worker.engine.async_copy import AsyncCopyBuffers
from mla_router.worker.engine.sampling.drafted_rows import SlotTokens
from mla_router.worker.engine.sampling.sampler import Sampler
from mla_router.worker.engine.upload import Upload
from mla_router.worker.generation import SamplingParams
from mla_router.worker.step.plan import Admitted, StepPlan, TokenMasks
from mla_router.worker.step.result import StepResult


class SamplerDriver:
    """`guard` wraps all work of the engine between two waits."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: str = "cpu",
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.device = torch.device(device)
        self.guard = guard
        self.sampler = Sampler(num_slots, vocab_size, self.device)
        self.copies = AsyncCopyBuffers(self.device)
        self.last_token = torch.zeros(num_slots, dtype=torch.int64, device=self.device)
        self.lengths = torch.zeros(num_slots, dtype=torch.int32, device=self.device)
        self.contexts: dict[int, list[int]] = {}  # by slot: prompt and output
        self._upload = Upload(self.device)
        self._admitted: list[Admitted] = []

    def admit(
        self,
        slot: int,
        sampling: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int] = (),
    ) -> None:
        """Admits the requests with the next step."""
        self._admitted.append(Admitted(slot, sampling, prompt, output))
        self.contexts[slot] = [*prompt, *output]

    def step(self, logits: Mapping[int, Tensor], masks: TokenMasks | None = None) -> StepResult:
        """Samples a token for each slot in `logits`."""
        return self.step_and_look(logits, masks)[0]

    @torch.inference_mode()
    def step_and_look(
        self, logits: Mapping[int, Tensor], masks: TokenMasks | None = None
    ) -> tuple[StepResult, Tensor]:
        """Returns the same, and the logits [R, V] after penalties, biases and bitmasks."""
        slots = tuple(logits)
        lengths = tuple(len(self.contexts[slot]) for slot in slots)
        plan = StepPlan(slots, lengths, (), (), tuple(self._admitted))
        self._admitted = []
        rows = torch.stack([*logits.values()]).to(self.device)
        with self.guard():
            at, positions = self._upload([np.array(slots), np.array(lengths, dtype=np.int32)])
            self.lengths[at] = positions
            self.sampler.admit(plan.admitted)
            tokens = self.copies.tokens(len(slots), 1)
            sampled = self.sampler.sample(
                rows,
                at,
                plan,
                masks,
                tokens=SlotTokens(self.lengths, self.last_token, self.last_token[:, None]),
                out=tokens,
            )
            pending = self.copies.start(plan, tokens, sampled.logprobs, None, began=0.0)
        result = pending.wait()
        for slot, (token,) in zip(slots, result.tokens, strict=True):
            self.contexts[slot].append(token)
        return result, rows.cpu()

"""One forward step on the device: what a plan becomes, launch by launch.

Nothing in `forward` and `sample` waits for the device; `Readback.wait` is the only place that does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_router.worker.core import Capacity, StepPlan, TokenMasks
from mla_router.worker.engine.attention.layout import AttentionBackend, ChunkExtent, StepLayout
from mla_router.worker.engine.inputs import InputPacker
from mla_router.worker.engine.readback import Readback, ReadbackRing
from mla_router.worker.engine.sampling.sampler import Sampler
from mla_router.worker.engine.sampling.scores import RowScores, Run, score_hidden
from mla_router.worker.engine.slots import SlotState
from mla_router.worker.model.batch import ForwardBatch
from mla_router.worker.model.causal_lm import CausalLM


@dataclass(frozen=True, slots=True)
class Launched:
    """A launched forward pass: logits of the rows that sample, and where those rows belong."""

    plan: StepPlan
    logits: Tensor  # [R, V] float32; sampling writes over them
    slots: Tensor  # [R] int64
    positions: Tensor  # [R] int64, of the tokens about to be sampled
    prompt_scores: RowScores | None


class Engine:
    """The model, its KV cache and the per-slot state of one device. Implements `StepEngine`."""

    def __init__(
        self,
        model: CausalLM,
        capacity: Capacity,
        *,
        device: torch.device,
        dtype: torch.dtype,
        attention: AttentionBackend,
    ) -> None:
        self.model = model
        self.capacity = capacity
        self.device = device
        config = model.config
        # Page 0 belongs to nobody: unused entries of a page table point to it.
        self.cache = torch.zeros(
            config.cache_shape(capacity.num_pages + 1, capacity.page_size),
            dtype=dtype,
            device=device,
        )
        self.slots = SlotState(capacity, device)
        self.sampler = Sampler(capacity.num_slots, config.vocab_size, device)
        self._attention = attention
        self._packer = InputPacker(device)
        self._readback = ReadbackRing(device)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Launched:
        inputs = self._packer.pack(plan)
        self.slots.apply(inputs)
        self.sampler.admit(plan.admitted)
        decodes = len(plan.decode_slots)
        batch = ForwardBatch(
            tokens=self.slots.input_tokens(inputs),
            positions=inputs.positions,
            cache_locations=self.slots.cache_locations(inputs, self.capacity.page_size),
            num_decodes=decodes,
            attention=self._attention.plan(
                StepLayout(
                    page_table=self.slots.page_table,
                    decode_slots=inputs.token_slots[:decodes],
                    decode_lengths=inputs.decode_lengths.to(torch.int32),
                    max_decode_length=max(plan.decode_lengths, default=0),
                    chunks=tuple(ChunkExtent(c.slot, c.start, len(c.tokens)) for c in plan.chunks),
                )
            ),
            output_rows=inputs.output_rows,
        )
        hidden = self.model(batch, self.cache)
        num_scored = len(inputs.score_tokens)
        num_sampled = len(inputs.output_rows) - num_scored
        rows = inputs.output_rows[:num_sampled]
        prompt_scores = None
        if num_scored:
            runs = [
                Run(i, len(chunk.score_tokens), self.sampler.wants.num_top(chunk.slot))
                for i, chunk in enumerate(plan.chunks)
                if chunk.score_tokens
            ]
            prompt_scores = score_hidden(
                hidden[num_sampled:], self.model.logits, inputs.score_tokens, runs
            )
        return Launched(
            plan,
            self.model.logits(hidden[:num_sampled]),
            inputs.token_slots[rows],
            inputs.positions[rows] + 1,
            prompt_scores,
        )

    @torch.inference_mode()
    def sample(self, launched: Launched, masks: TokenMasks | None = None) -> Readback:
        sampled = self.sampler.sample(
            launched.logits, launched.slots, launched.positions, launched.plan, masks
        )
        # A row without a token gets 0 for one: its request ends, but the next step has begun with it.
        self.slots.last_token[launched.slots] = sampled.tokens.clamp_min(0)
        return self._readback.start(launched.plan, sampled, launched.prompt_scores)

    def is_usable_after(self, error: Exception) -> bool:
        # A failed kernel leaves the CUDA context unusable; memory that ran out does not.
        return not isinstance(error, torch.AcceleratorError)

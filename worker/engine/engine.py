"""One forward step on the device: what a plan becomes, launch by launch.

Nothing in `forward` and `sample` waits for the device; `Readback.wait` is the only place that does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_router.worker.core import Capacity, SamplingParams, StepPlan, TokenMasks
from mla_router.worker.engine.inputs import InputPacker
from mla_router.worker.engine.readback import Readback, ReadbackRing
from mla_router.worker.engine.sampling import logprobs_of, sample
from mla_router.worker.engine.slots import SlotState
from mla_router.worker.model.batch import ChunkExtent, ForwardBatch
from mla_router.worker.model.deepseek import DeepseekForCausalLM


@dataclass(frozen=True, slots=True)
class Launched:
    """A launched forward pass: logits of the rows that sample, and where those rows belong."""

    plan: StepPlan
    logits: Tensor  # [R, V] float32
    slots: Tensor  # [R] int64
    positions: Tensor  # [R] int64, of the tokens about to be sampled


class Engine:
    """The model, its KV cache and the per-slot state of one device. Implements `StepEngine`."""

    def __init__(
        self,
        model: DeepseekForCausalLM,
        capacity: Capacity,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model = model
        self.capacity = capacity
        self.device = device
        config = model.config
        # Page 0 belongs to nobody: unused entries of a page table point to it.
        self.cache = torch.zeros(
            (config.num_layers, capacity.num_pages + 1, capacity.page_size, config.cache_width),
            dtype=dtype,
            device=device,
        )
        self.slots = SlotState(capacity, device)
        self._packer = InputPacker(device)
        self._readback = ReadbackRing(capacity.num_slots, device)
        self._sampling = [SamplingParams(max_tokens=1)] * capacity.num_slots  # the host's copy

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Launched:
        inputs = self._packer.pack(plan)
        self.slots.apply(inputs)
        for request in plan.admitted:
            self._sampling[request.slot] = request.sampling
        decodes = len(plan.decode_slots)
        batch = ForwardBatch(
            tokens=self.slots.input_tokens(inputs),
            positions=inputs.positions,
            cache_locations=self.slots.cache_locations(inputs, self.capacity.page_size),
            page_table=self.slots.page_table,
            decode_slots=inputs.token_slots[:decodes],
            decode_lengths=inputs.decode_lengths.to(torch.int32),
            max_decode_length=max(plan.decode_lengths, default=0),
            chunks=tuple(ChunkExtent(c.slot, c.start, len(c.tokens)) for c in plan.chunks),
            sampled_rows=inputs.sampled_rows,
        )
        logits = self.model(batch, self.cache)
        rows = inputs.sampled_rows
        return Launched(plan, logits, inputs.token_slots[rows], inputs.positions[rows] + 1)

    @torch.inference_mode()
    def sample(self, launched: Launched, masks: TokenMasks | None = None) -> Readback:
        assert masks is None, "no request can ask for a grammar yet"
        wanted = [self._sampling[slot] for slot in launched.plan.sampled_slots]
        if all(sampling.greedy for sampling in wanted):
            tokens = launched.logits.argmax(dim=-1)
        else:
            slots, state = launched.slots, self.slots
            tokens = sample(
                launched.logits,
                state.temperature[slots],
                state.top_k[slots],
                state.top_p[slots],
                state.seed[slots],
                launched.positions,
                filtered=any(s.top_k > 0 or s.top_p < 1 for s in wanted),
            )
        self.slots.last_token[launched.slots] = tokens
        logprobs = None
        if any(sampling.logprobs for sampling in wanted):
            logprobs = logprobs_of(launched.logits, tokens)
        return self._readback.start(tokens, logprobs)

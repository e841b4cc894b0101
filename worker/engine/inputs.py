"""One step's inputs as one copy to the device.

Everything that a step needs from the host is a few integers a token, packed into one buffer and
copied once. Two pinned host buffers take turns: a step is packed only after the tokens of the step
two before it were waited for, so the buffer it overwrites has certainly been read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mla_router.worker.core import StepPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Views into the device buffer, all int64. T tokens, R sampled rows, W page table writes, A
    requests admitted in this step."""

    token_slots: Tensor  # [T]
    positions: Tensor  # [T]
    prompt_tokens: Tensor  # [T - D], the tokens of the chunks; decode tokens are on the device
    decode_lengths: Tensor  # [D]
    sampled_rows: Tensor  # [R]
    page_writes: Tensor  # [3, W]: slot, index, page
    admitted: Tensor  # [5, A]: slot, top_k, seed, and the bits of temperature and top_p as float64


class InputPacker:
    """Turns plans into `StepInputs` on `device`. Buffers grow to the largest step seen."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = [self._new_host(0), self._new_host(0)]
        self._on_device = torch.empty(0, dtype=torch.int64, device=device)
        self._turn = 0

    def pack(self, plan: StepPlan) -> StepInputs:
        token_slots, positions, prompt_tokens, sampled_rows = _rows(plan)
        parts = (
            token_slots,
            positions,
            prompt_tokens,
            np.asarray(plan.decode_lengths, dtype=np.int64),
            sampled_rows,
            np.asarray(plan.page_writes, dtype=np.int64).reshape(-1, 3).T.ravel(),
            _admitted(plan).ravel(),
        )
        slots, places, tokens, lengths, sampled, writes, admitted = torch.split(
            self._copy(np.concatenate(parts)), [part.size for part in parts]
        )
        return StepInputs(
            slots, places, tokens, lengths, sampled, writes.view(3, -1), admitted.view(5, -1)
        )

    def _copy(self, packed: np.ndarray) -> Tensor:
        if self._device.type == "cpu":
            return torch.from_numpy(packed)
        self._turn ^= 1
        if packed.size > self._host[self._turn].numel():
            self._host[self._turn] = self._new_host(2 * packed.size)
        if packed.size > self._on_device.numel():
            self._on_device = torch.empty(2 * packed.size, dtype=torch.int64, device=self._device)
        host = self._host[self._turn][: packed.size]
        host.numpy()[:] = packed
        return self._on_device[: packed.size].copy_(host, non_blocking=True)

    def _new_host(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, pin_memory=self._device.type == "cuda")


def _rows(plan: StepPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Slot and position of every token, the prompt tokens, and the rows that sample."""
    decodes = len(plan.decode_slots)
    slots = np.empty(plan.num_tokens, dtype=np.int64)
    positions = np.empty(plan.num_tokens, dtype=np.int64)
    tokens = np.empty(plan.num_tokens - decodes, dtype=np.int64)
    slots[:decodes] = plan.decode_slots
    positions[:decodes] = plan.decode_lengths
    positions[:decodes] -= 1
    sampled = list(range(decodes))
    at = decodes
    for chunk in plan.chunks:
        end = at + len(chunk.tokens)
        slots[at:end] = chunk.slot
        positions[at:end] = np.arange(chunk.start, chunk.start + len(chunk.tokens))
        tokens[at - decodes : end - decodes] = chunk.tokens
        at = end
        if chunk.is_last:
            sampled.append(at - 1)
    return slots, positions, tokens, np.asarray(sampled, dtype=np.int64)


def _admitted(plan: StepPlan) -> np.ndarray:
    table = np.empty((5, len(plan.admitted)), dtype=np.int64)
    for column, request in enumerate(plan.admitted):
        sampling = request.sampling
        table[:3, column] = (request.slot, sampling.top_k, sampling.seed)
        table[3:, column] = np.array([sampling.temperature, sampling.top_p]).view(np.int64)
    return table

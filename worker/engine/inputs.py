"""One step's inputs as one copy to the device: a few integers for every token."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from mla_router.worker.core import StepPlan
from mla_router.worker.engine.decode_rows import DecodeRows
from mla_router.worker.engine.upload import Upload


@dataclass(frozen=True, slots=True)
class StepInputs:
    """On the device, all int64. T tokens, R sampled rows, S scored rows, W page table writes."""

    token_slots: Tensor  # [T]
    positions: Tensor  # [T]
    prompt_tokens: Tensor  # [T - D], the tokens of the chunks; decode tokens are on the device
    decode_lengths: Tensor  # [D]
    output_rows: Tensor  # [R + S], rows of T: those that sample, then those that are scored
    score_tokens: Tensor  # [S], whose logprobs are wanted of the scored rows
    sampled_slots: Tensor  # [R]
    sampled_lengths: Tensor  # [R], where the tokens about to be sampled will stand
    page_writes: Tensor  # [3, W]: slot, index, page


@dataclass(frozen=True, slots=True)
class RowInputs:
    """Of a step that is decode rows alone: on the device, all int64. R sampled rows."""

    rows: Tensor  # [3, size], contiguous: slots, lengths and places of `DecodeRows`
    given: Tensor  # [G]
    sampled: Tensor  # [R], rows
    sampled_slots: Tensor  # [R]
    sampled_lengths: Tensor  # [R]
    page_writes: Tensor  # [3, W]: slot, index, page


class InputPacker:
    """Turns plans into `StepInputs` or `RowInputs` on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._upload = Upload(device)

    def pack(self, plan: StepPlan) -> StepInputs:
        slots, positions, prompt_tokens, output_rows = _rows(plan)
        score_tokens = list(chain.from_iterable(chunk.score_tokens for chunk in plan.chunks))
        sampled = output_rows[: len(output_rows) - len(score_tokens)]
        return StepInputs(
            *self._upload(
                [
                    slots,
                    positions,
                    prompt_tokens,
                    np.asarray(plan.decode_lengths, dtype=np.int64),
                    output_rows,
                    np.asarray(score_tokens, dtype=np.int64),
                    slots[sampled],
                    positions[sampled] + 1,
                    _page_writes(plan),
                ]
            )
        )

    def pack_rows(self, plan: StepPlan, rows: DecodeRows) -> RowInputs:
        """`rows` are the plan's."""
        all_rows = np.array([rows.slots, rows.lengths, rows.places], dtype=np.int64)
        sampled = np.array(rows.sampled, dtype=np.int64)
        slots, lengths = all_rows[:2, sampled]
        given = np.array(rows.given, dtype=np.int64)
        return RowInputs(
            *self._upload([all_rows, given, sampled, slots, lengths, _page_writes(plan)])
        )


def _page_writes(plan: StepPlan) -> np.ndarray:
    return np.asarray(plan.page_writes, dtype=np.int64).reshape(-1, 3).T


def _rows(plan: StepPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Slot and position of every token, the prompt tokens, and the rows of which the model's output
    is wanted: those that sample, then those that are scored."""
    decodes = len(plan.decode_slots)
    slots = np.empty(plan.num_tokens, dtype=np.int64)
    positions = np.empty(plan.num_tokens, dtype=np.int64)
    tokens = np.empty(plan.num_tokens - decodes, dtype=np.int64)
    slots[:decodes] = plan.decode_slots
    positions[:decodes] = plan.decode_lengths
    positions[:decodes] -= 1
    sampled = list(range(decodes))
    scored: list[int] = []
    at = decodes
    for chunk in plan.chunks:
        end = at + len(chunk.tokens)
        slots[at:end] = chunk.slot
        positions[at:end] = np.arange(chunk.start, chunk.start + len(chunk.tokens))
        tokens[at - decodes : end - decodes] = chunk.tokens
        first = at + chunk.score_start
        assert first + len(chunk.score_tokens) <= end, f"{chunk=} scores rows it does not have"
        scored += range(first, first + len(chunk.score_tokens))
        at = end
        if chunk.is_last:
            sampled.append(at - 1)
    return slots, positions, tokens, np.asarray(sampled + scored, dtype=np.int64)

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
    """On the device, all int64 but pages. T tokens, R sampled rows, S scored rows, W page table writes."""

    rows: Tensor  # [3, T]: tokens, slots and positions; the D decode rows' tokens are on the device, and 0 here
    decode_lengths: Tensor  # [D]
    output_rows: Tensor  # [R + S], rows of T: those that sample, then those that are scored
    score_tokens: Tensor  # [S], whose logprobs are wanted of the scored rows
    sampled_slots: Tensor  # [R]
    sampled_lengths: Tensor  # [R], where the tokens about to be sampled will stand
    page_places: Tensor  # [W], numbers of the page table's entries, counted through all slots
    pages: Tensor  # [W] int32, that are written there


@dataclass(frozen=True, slots=True)
class RowInputs:
    """Of a step that is decode rows alone: on the device, all int64 but pages. R sampled rows."""

    rows: Tensor  # [3, size], contiguous: slots, lengths and places of `DecodeRows`
    given: Tensor  # [G]
    sampled: Tensor  # [R], rows
    sampled_slots: Tensor  # [R]
    sampled_lengths: Tensor  # [R]
    page_places: Tensor  # [W]
    pages: Tensor  # [W] int32


class InputPacker:
    """Turns plans into `StepInputs` or `RowInputs` on `device`."""

    def __init__(self, device: torch.device, pages_per_slot: int) -> None:
        self._upload = Upload(device)
        self._pages_per_slot = pages_per_slot

    def pack(self, plan: StepPlan) -> StepInputs:
        rows, output_rows = _rows(plan)
        score_tokens = list(chain.from_iterable(chunk.score_tokens for chunk in plan.chunks))
        _, slots, positions = rows[:, output_rows[: len(output_rows) - len(score_tokens)]]
        on_device, *others = self._upload(
            [
                rows,
                np.asarray(plan.decode_lengths, dtype=np.int64),
                output_rows,
                np.asarray(score_tokens, dtype=np.int64),
                slots,
                positions + 1,
                *self._page_writes(plan),
            ]
        )
        return StepInputs(on_device[:, : plan.num_tokens], *others)

    def pack_rows(self, plan: StepPlan, rows: DecodeRows) -> RowInputs:
        """`rows` are the plan's."""
        all_rows = np.array([rows.slots, rows.lengths, rows.places], dtype=np.int64)
        sampled = np.array(rows.sampled, dtype=np.int64)
        slots, lengths = all_rows[:2, sampled]
        given = np.array(rows.given, dtype=np.int64)
        return RowInputs(
            *self._upload([all_rows, given, sampled, slots, lengths, *self._page_writes(plan)])
        )

    def _page_writes(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        slots, indices, pages = np.asarray(plan.page_writes, dtype=np.int64).reshape(-1, 3).T
        return slots * self._pages_per_slot + indices, pages.astype(np.int32)


def _rows(plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """Token, slot and position of every row; and the rows of which the model's output is wanted: those that
    sample, then those that are scored. One row more if they are odd, so that each of the three begins where
    kernels can read 16 bytes at once."""
    decodes, size = len(plan.decode_slots), plan.num_tokens
    rows = np.zeros((3, size + size % 2), dtype=np.int64)
    tokens, slots, positions = rows
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
        tokens[at:end] = chunk.tokens
        first = at + chunk.score_start
        assert first + len(chunk.score_tokens) <= end, f"{chunk=} scores rows it does not have"
        scored += range(first, first + len(chunk.score_tokens))
        at = end
        if chunk.is_last:
            sampled.append(at - 1)
    return rows, np.asarray(sampled + scored, dtype=np.int64)

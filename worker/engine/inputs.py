"""A step's integers on the device, a few for every token: one copy for what its layers need, one for what is
wanted of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mla_router.worker.core import StepPlan
from mla_router.worker.engine.decode_rows import DecodeRows
from mla_router.worker.engine.upload import Upload


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the layers need, on the device, all int64 but pages. T tokens, W page table writes."""

    rows: Tensor  # [3, T]: tokens, slots and positions; the D decode rows' tokens are on the device, and 0 here
    decode_lengths: Tensor  # [D]
    page_places: Tensor  # [W], numbers of the page table's entries, counted through all slots
    pages: Tensor  # [W] int32, that are written there


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """The same of a step that is one prompt, from its beginning on."""

    prompt: Tensor  # [2 + T]: slot, length, tokens
    page_places: Tensor  # [W]
    pages: Tensor  # [W] int32


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What is wanted of the same step, on the device, all int64. R sampled rows, S scored rows."""

    rows: Tensor  # [R + S], rows of T: those that sample, then those that are scored
    score_tokens: Tensor  # [S], whose logprobs are wanted of the scored rows
    slots: Tensor  # [R]
    lengths: Tensor  # [R], where the tokens about to be sampled will stand


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
    """Turns plans into what they are on `device`. Each part is packed when it is needed: the device waits for
    the first of a step, and is at work during the others."""

    def __init__(self, device: torch.device, pages_per_slot: int) -> None:
        self._upload, self._upload_outputs = Upload(device), Upload(device)
        self._pages_per_slot = pages_per_slot

    def pack(self, plan: StepPlan) -> StepInputs:
        places, pages = self._page_writes(plan)
        rows, *others = self._upload(
            [
                _rows(plan),
                np.array(plan.decode_lengths, dtype=np.int64),
                np.array(places, dtype=np.int64),
                np.array(pages, dtype=np.int32),
            ]
        )
        return StepInputs(rows[:, : plan.num_tokens], *others)

    def pack_prompt(self, plan: StepPlan) -> PromptInputs:
        (chunk,) = plan.chunks
        prompt = [chunk.slot, len(chunk.tokens), *chunk.tokens]
        return PromptInputs(*self._upload.integers("qqi", prompt, *self._page_writes(plan)))

    def pack_outputs(self, plan: StepPlan) -> StepOutputs:
        at = len(plan.decode_slots)
        rows, lengths = list(range(at)), list(plan.decode_lengths)
        scored: list[int] = []
        score_tokens: list[int] = []
        for chunk in plan.chunks:
            first = at + chunk.score_start
            at += len(chunk.tokens)
            last = first + len(chunk.score_tokens)
            assert last <= at, f"{chunk=} scores rows it does not have"
            scored += range(first, last)
            score_tokens += chunk.score_tokens
            if chunk.is_last:
                rows.append(at - 1)
                lengths.append(chunk.start + len(chunk.tokens))
        wanted = rows + scored, score_tokens, plan.sampled_slots, lengths
        return StepOutputs(*self._upload_outputs.integers("qqqq", *wanted))

    def pack_rows(self, plan: StepPlan, rows: DecodeRows) -> RowInputs:
        """`rows` are the plan's."""
        on_device, *others = self._upload.integers(
            "qqqqqqi",
            [*rows.slots, *rows.lengths, *rows.places],
            rows.given,
            rows.sampled,
            [rows.slots[row] for row in rows.sampled],
            [rows.lengths[row] for row in rows.sampled],
            *self._page_writes(plan),
        )
        return RowInputs(on_device.view(3, len(rows.slots)), *others)

    def _page_writes(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        places = [slot * self._pages_per_slot + index for slot, index, _ in plan.page_writes]
        return places, [page for _, _, page in plan.page_writes]


def _rows(plan: StepPlan) -> NDArray[np.int64]:
    """Token, slot and position of every row. One row more if they are odd, so that each of the three begins
    where kernels can read 16 bytes at once."""
    decodes, size = len(plan.decode_slots), plan.num_tokens
    rows = np.zeros((3, size + size % 2), dtype=np.int64)
    tokens, slots, positions = rows
    slots[:decodes] = plan.decode_slots
    positions[:decodes] = plan.decode_lengths
    positions[:decodes] -= 1
    at = decodes
    for chunk in plan.chunks:
        end = at + len(chunk.tokens)
        tokens[at:end] = chunk.tokens
        slots[at:end] = chunk.slot
        positions[at:end] = np.arange(chunk.start, chunk.start + len(chunk.tokens))
        at = end
    return rows

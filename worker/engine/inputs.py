"""Packs the integers of a step and copies them to the device: one copy for the layers, one for the output rows.

Each runner has its own layout, packed with the fewest host operations: the device waits for the first copy of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mla_router.worker.core import StepPlan
from mla_router.worker.engine.runners.decode_rows import DecodeRows
from mla_router.worker.engine.upload import Upload

PROMPT_HEADER = 2  # integers before a prompt's tokens: slot and length


@dataclass(frozen=True, slots=True)
class RowInputs:
    """Inputs of the eager and the piecewise runner, on the device, int64 if not noted. T rows with padding, W page table
    writes."""

    rows: Tensor  # [3, T]: tokens, slots and positions; the tokens of the D decode rows are 0 here
    decode_lengths: Tensor  # [D] int32
    page_entries: Tensor  # [W], indices into the flattened page table
    pages: Tensor  # [W] int32, the new values of these entries


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """Inputs of the prefill graph runner, for a step of one prompt of N tokens, on the device."""

    size: int  # rows of the graph
    prompt: Tensor  # [2 + N]: slot, length, tokens
    page_entries: Tensor  # [W]
    pages: Tensor  # [W] int32


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of the decode graph runner, on the device, int64 if not noted. R sampled rows."""

    on_host: DecodeRows
    rows: Tensor  # [3, size], contiguous: slots, lengths and indices of `on_host`
    input_tokens: Tensor  # [G]
    sampled: Tensor  # [R], indices of the sampled rows
    sampled_slots: Tensor  # [R]
    sampled_lengths: Tensor  # [R]
    page_entries: Tensor  # [W]
    pages: Tensor  # [W] int32


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Rows whose output is needed: R sampled rows and S prompt rows with logprobs. All int64, on the device."""

    rows: Tensor  # [R + S], sampled rows, then those with logprobs
    logprob_tokens: Tensor  # [S], the tokens whose logprobs are computed
    slots: Tensor  # [R]
    lengths: Tensor  # [R], positions of the tokens to sample


class InputPacker:
    """Packs plans for `device`. A step calls one of the first three methods, then at most `pack_outputs`. Their results
    are valid until the next step."""

    def __init__(self, device: torch.device, pages_per_slot: int, idle_slot: int) -> None:
        self._upload, self._upload_outputs = Upload(device), Upload(device)
        self._pages_per_slot = pages_per_slot
        self._idle_slot = idle_slot

    def pack_rows(self, plan: StepPlan, size: int) -> RowInputs:
        """Packs `plan` as `size` rows, padding included."""
        entries, pages = self._page_writes(plan)
        rows, *others = self._upload(
            [
                _rows(plan, size, self._idle_slot),
                np.array(plan.decode_bounds, dtype=np.int32),
                np.array(entries, dtype=np.int64),
                np.array(pages, dtype=np.int32),
            ]
        )
        return RowInputs(rows[:, :size], *others)

    def pack_prompt(self, plan: StepPlan, size: int) -> PromptInputs:
        """Packs a step that is one chunk without a cached prefix."""
        (chunk,) = plan.chunks
        prompt = [chunk.slot, len(chunk.tokens), *chunk.tokens]
        return PromptInputs(size, *self._upload.integers("qqi", prompt, *self._page_writes(plan)))

    def pack_decode_rows(self, plan: StepPlan, rows: DecodeRows) -> DecodeInputs:
        """Packs a step as decode rows. `rows`: those of `plan`."""
        on_device, *others = self._upload.integers(
            "qqqqqqi",
            [*rows.slots, *rows.lengths, *rows.indices],
            rows.input_tokens,
            rows.sampled,
            [rows.slots[row] for row in rows.sampled],
            [rows.lengths[row] for row in rows.sampled],
            *self._page_writes(plan),
        )
        return DecodeInputs(rows, on_device.view(3, len(rows.slots)), *others)

    def pack_outputs(self, plan: StepPlan) -> OutputRows:
        """Packs the rows whose output is needed: sampled rows, and prompt rows with logprobs."""
        at = len(plan.decode_slots)
        rows, lengths = list(range(at)), list(plan.decode_bounds)
        with_logprobs: list[int] = []
        logprob_tokens: list[int] = []
        for chunk in plan.chunks:
            first = at + chunk.logprob_start
            at += len(chunk.tokens)
            last = first + len(chunk.logprob_tokens)
            assert last <= at, f"{chunk=} has no row for one of its logprobs"
            with_logprobs += range(first, last)
            logprob_tokens += chunk.logprob_tokens
            if chunk.is_last:
                rows.append(at - 1)
                lengths.append(chunk.start + len(chunk.tokens))
        wanted = rows + with_logprobs, logprob_tokens, plan.sampled_slots, lengths
        return OutputRows(*self._upload_outputs.integers("qqqq", *wanted))

    def _page_writes(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        entries = [slot * self._pages_per_slot + index for slot, index, _ in plan.page_writes]
        return entries, [page for _, _, page in plan.page_writes]


def _rows(plan: StepPlan, size: int, idle_slot: int) -> NDArray[np.int64]:
    """Returns the tokens, slots and positions of `size` rows: [3, size rounded up to even]. Padding rows are at position
    0 of the idle slot. An even number aligns each of the three to 16 bytes, for vectorized reads."""
    decodes = len(plan.decode_slots)
    rows = np.zeros((3, size + size % 2), dtype=np.int64)
    tokens, slots, positions = rows
    slots[:decodes] = plan.decode_slots
    positions[:decodes] = plan.decode_bounds
    positions[:decodes] -= 1
    at = decodes
    for chunk in plan.chunks:
        end = at + len(chunk.tokens)
        tokens[at:end] = chunk.tokens
        slots[at:end] = chunk.slot
        positions[at:end] = np.arange(chunk.start, chunk.start + len(chunk.tokens))
        at = end
    slots[at:] = idle_slot
    return rows

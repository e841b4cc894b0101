"""Packs the integers of a step and copies them to the device: one copy for the layers, one for the output rows.

Each runner has its own layout, packed with the fewest host operations: the device waits for the first copy of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mla_router.worker.engine.runners.decode_rows import DecodeRows
from mla_router.worker.engine.slots import SlotState
from mla_router.worker.engine.upload import Upload
from mla_router.worker.step.plan import StepPlan

PROMPT_HEADER = 2  # integers before a prompt's tokens: slot and length


@dataclass(frozen=True, slots=True)
class RowInputs:
    """Inputs of the eager and the piecewise runner, on the device, int64 if not noted. T rows with padding, W writes to
    the state of the slots."""

    rows: Tensor  # [3, T]: slots, lengths and tokens, for `SlotState.look_up`
    kinds: Tensor  # [T] int8
    entries: Tensor  # [W], for `SlotState.write`
    values: Tensor  # [W] int32


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """Inputs of the prefill graph runner, for a step of one prompt of N tokens, on the device."""

    size: int  # rows of the graph
    prompt: Tensor  # [2 + N]: slot, length, tokens
    entries: Tensor  # [W]
    values: Tensor  # [W] int32


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of the decode graph runner, on the device, int64 if not noted. R sampled rows."""

    on_host: DecodeRows
    rows: Tensor  # [3, size], contiguous: slots, lengths and tokens, for `SlotState.look_up`
    kinds: Tensor  # [size] int8
    sampled: Tensor  # [R], indices of the sampled rows
    sampled_slots: Tensor  # [R]
    entries: Tensor  # [W]
    values: Tensor  # [W] int32


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Rows whose output is needed: R sampled rows and S prompt rows with logprobs. All int64, on the device."""

    rows: Tensor  # [R + S], sampled rows, then those with logprobs
    logprob_tokens: Tensor  # [S], the tokens whose logprobs are computed
    slots: Tensor  # [R]


class InputPacker:
    """Packs plans for `device`. A step calls one of the first three methods, then at most `pack_outputs`. Their results
    are valid until the next step."""

    def __init__(self, device: torch.device, slots: SlotState) -> None:
        self._upload, self._upload_outputs = Upload(device), Upload(device)
        self._slots = slots

    def pack_rows(self, plan: StepPlan, size: int) -> RowInputs:
        """Packs `plan` as `size` rows, padding included."""
        entries, values = self._slots.writes(plan)
        return RowInputs(
            *self._upload(
                [
                    _rows(plan, size, self._slots.idle_slot),
                    np.frombuffer(bytearray(plan.row_kinds(size)), dtype=np.int8),
                    np.array(entries, dtype=np.int64),
                    np.array(values, dtype=np.int32),
                ]
            )
        )

    def pack_prompt(self, plan: StepPlan, size: int) -> PromptInputs:
        """Packs a step that is one chunk without a cached prefix."""
        (chunk,) = plan.chunks
        prompt = [chunk.slot, len(chunk.tokens), *chunk.tokens]
        return PromptInputs(size, *self._upload.integers("qqi", prompt, *self._slots.writes(plan)))

    def pack_decode_rows(self, plan: StepPlan, rows: DecodeRows) -> DecodeInputs:
        """Packs a step as decode rows. `rows`: those of `plan`."""
        on_device, *others = self._upload.integers(
            "qbqqqi",
            [*rows.slots, *rows.lengths, *rows.tokens],
            rows.kinds,
            rows.sampled,
            plan.sampled_slots,
            *self._slots.writes(plan),
        )
        return DecodeInputs(rows, on_device.view(3, len(rows.slots)), *others)

    def pack_outputs(self, plan: StepPlan) -> OutputRows:
        """Packs the rows whose output is needed: sampled rows, and prompt rows with logprobs."""
        at = plan.num_decode_rows
        rows = list(range(at))
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
        wanted = rows + with_logprobs, logprob_tokens, plan.sampled_slots
        return OutputRows(*self._upload_outputs.integers("qqq", *wanted))


def _rows(plan: StepPlan, size: int, idle_slot: int) -> NDArray[np.int64]:
    """Returns the slots, lengths and tokens of `size` rows, [3, size]. A row of a chunk has as many tokens in the KV
    cache as its length; for a decode row that is a bound. The token of a row of a draft is the number of the draft."""
    at, each = plan.num_decode_rows, plan.rows_per_decode
    rows = np.zeros((3, size), dtype=np.int64)
    slots, lengths, tokens = rows
    slots[:at] = np.repeat(np.array(plan.decode_slots, dtype=np.int64), each)
    lengths[:at] = np.repeat(np.array(plan.decode_bounds, dtype=np.int64), each)
    tokens[:at] = np.tile(np.arange(each), len(plan.decode_slots))
    for chunk in plan.chunks:
        end = at + len(chunk.tokens)
        slots[at:end] = chunk.slot
        lengths[at:end] = np.arange(chunk.start + 1, chunk.start + len(chunk.tokens) + 1)
        tokens[at:end] = chunk.tokens
        at = end
    slots[at:] = idle_slot
    return rows

"""Expresses a step with few prompt tokens as decode rows, for decode graphs (`decode_graph.py`).

Each layer writes all rows of a step to the KV cache before any row attends, and a row attends to as many tokens as its
length. So n tokens of a chunk are n decode rows of one slot with the lengths start + 1 .. start + n. Their input tokens
are not the last tokens of the slot. Therefore each row has an index into the input-token buffer
(`SlotState.input_tokens`): the last tokens of all slots, then the tokens of the chunks.

Such steps compute tokens that a grammar forces, or the end of a prompt with a cached prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_router.worker.core import StepPlan


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Decode rows, rows of chunks, and padding, in this order, on the host."""

    slots: list[int]  # [size]
    lengths: list[int]  # [size], tokens in the KV cache including the row's token
    indices: list[int]  # [size], indices of the rows' tokens in the input-token buffer
    input_tokens: list[int]  # tokens of the chunks, in the buffer from index `idle_slot + 1` on
    sampled: list[
        int
    ]  # indices of the sampled rows, ascending, in the order of `StepPlan.sampled_slots`

    @property
    def first_are_sampled(self) -> bool:
        """Whether the sampled rows come first, as in every step without chunks."""
        return not self.sampled or self.sampled[-1] == len(self.sampled) - 1


def decode_rows(plan: StepPlan, size: int, idle_slot: int) -> DecodeRows:
    """Returns `plan`, of at most `size` tokens, as `size` rows. Padding rows have length 1 in the idle slot."""
    slots, lengths = list(plan.decode_slots), list(plan.decode_bounds)
    sampled = list(range(len(slots)))
    tokens: list[int] = []
    for chunk in plan.chunks:
        slots += [chunk.slot] * len(chunk.tokens)
        lengths += range(chunk.start + 1, chunk.start + len(chunk.tokens) + 1)
        tokens += chunk.tokens
        if chunk.is_last:
            sampled.append(len(slots) - 1)
    spare = size - len(slots)
    assert spare >= 0, f"{len(slots)} rows for {size}"
    behind = idle_slot + 1
    indices = [*plan.decode_slots, *range(behind, behind + len(tokens)), *[idle_slot] * spare]
    return DecodeRows(slots + [idle_slot] * spare, lengths + [1] * spare, indices, tokens, sampled)

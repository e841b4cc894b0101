"""A step as decode rows alone, for which there are CUDA graphs (`decode_graph.py`).

In every layer all rows of a step are written to the KV cache before any is attended from, and a row sees as
many rows of its request as its length says. So the n tokens of a chunk are n decode rows of one slot with
the lengths start + 1 .. start + n. Their tokens are not those that the slot sampled last, so that each row has
an index into the input-token buffer (`SlotState.input_tokens`): the last tokens of all slots, then the tokens
that the step brings.

Such steps follow a run of tokens that a grammar forces, or compute the end of a prompt whose rest is cached.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_router.worker.core import StepPlan


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """On the host: decode rows, rows of chunks, and padding, in this order."""

    slots: list[int]  # [size]
    lengths: list[int]  # [size], tokens in the cache including the row's own
    indices: list[int]  # [size], of the rows' tokens in the input-token buffer
    input_tokens: list[int]  # the chunks' tokens, in the buffer from index `idle_slot + 1` on
    sampled: list[int]  # rows, ascending, in the order of `StepPlan.sampled_slots`

    @property
    def first_are_sampled(self) -> bool:
        """Whether the sampled rows are the first ones: always so without chunks."""
        return not self.sampled or self.sampled[-1] == len(self.sampled) - 1


def decode_rows(plan: StepPlan, size: int, idle_slot: int) -> DecodeRows:
    """`plan`, of at most `size` tokens, as `size` rows. Padding rows have length 1 in the idle slot, the last one."""
    slots, lengths = list(plan.decode_slots), list(plan.decode_lengths)
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

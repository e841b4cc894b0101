"""Expresses a step with few prompt tokens as decode rows, for decode graphs (`decode_graph.py`).

Each layer writes all rows of a step to the KV cache before any row attends, and a row attends to as many tokens as its
length. So n tokens of a chunk are n rows of one slot with the lengths start + 1 .. start + n in decode attention. Only
their kind differs: the host knows their tokens.

Such steps compute tokens that a grammar forces, or the end of a prompt with a cached prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_router.worker.step.plan import StepPlan


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Decode rows, rows of chunks, and padding, in this order, on the host. All lists but the last are [size]."""

    kinds: bytes  # `RowKind`s
    slots: list[int]
    lengths: list[int]  # tokens in the KV cache including the row's token, for decode rows a bound
    tokens: list[int]  # of rows of a chunk; of rows of drafts the number of the draft, otherwise 0
    # Indices of the sampled rows, ascending, in the order of `StepPlan.sampled_slots`: all decode rows, and last rows
    # of chunks
    sampled: list[int]

    @property
    def first_are_sampled(self) -> bool:
        """Whether the sampled rows come first, as in every step without chunks."""
        return not self.sampled or self.sampled[-1] == len(self.sampled) - 1


def decode_rows(plan: StepPlan, size: int, idle_slot: int) -> DecodeRows:
    """Returns `plan`, of at most `size` tokens, as `size` rows. Padding rows have length 1 in the idle slot."""
    rows = range(plan.rows_per_decode)
    slots = [slot for slot in plan.decode_slots for _ in rows]
    lengths = [bound for bound in plan.decode_bounds for _ in rows]
    tokens = [*rows] * len(plan.decode_slots)
    sampled = list(range(len(slots)))
    for chunk in plan.chunks:
        slots += [chunk.slot] * len(chunk.tokens)
        lengths += range(chunk.start + 1, chunk.start + len(chunk.tokens) + 1)
        tokens += chunk.tokens
        if chunk.is_last:
            sampled.append(len(slots) - 1)
    spare = size - len(slots)
    assert spare >= 0, f"{len(slots)} rows for {size}"
    return DecodeRows(
        plan.row_kinds(size),
        slots + [idle_slot] * spare,
        lengths + [1] * spare,
        tokens + [0] * spare,
        sampled,
    )

"""Steps with few prompt tokens as steps of decode rows alone, for which there are CUDA graphs (`graphs.py`).

In every layer all rows of a step are written to the KV cache before any is attended from, and a row sees as
many rows of its request as its length says. So the n tokens of a chunk are n decode rows of one slot with
the lengths start + 1 .. start + n; but their tokens are not those that the slot sampled last. A row
therefore has a *place*: an index into `SlotState.tokens`, where each slot's last token lies, and behind those
of all slots the tokens that a step is given.

Such steps are what follows a run of tokens that a grammar forces, and prompts of which the prefix cache has
all but the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from mla_router.worker.core import StepPlan

# Tokens of all chunks of a step together. With more of them the device is longer at work, so that there is less
# left to save, and each is one more row that attends by itself.
MAX_GIVEN = 64
# Rows of the KV cache that are read once more than a chunk's own attention would, which reads its request once
# for all tokens: in each layer 75 MB of V2-Lite's latents.
MAX_READ_AGAIN = 1 << 16


def fit_for_decode(plan: StepPlan) -> bool:
    """Whether the step has rows, all of which can be decode rows at little cost. Rows of which
    tokens are scored cannot: that takes hidden states, and a graph has only logits left at its end."""
    given = again = 0
    for chunk in plan.chunks:
        if chunk.score_tokens:
            return False
        given += len(chunk.tokens)
        again += (len(chunk.tokens) - 1) * (chunk.start + len(chunk.tokens))
    return plan.num_tokens > 0 and given <= MAX_GIVEN and again <= MAX_READ_AGAIN


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """On the host: decode rows, those of chunks, and padding, in this order."""

    slots: list[int]  # [size]
    lengths: list[int]  # [size], tokens in the cache including the row's own
    places: list[int]  # [size], of the rows' tokens
    given: list[int]  # the chunks' tokens, in the places from `idle_slot + 1` on
    sampled: list[int]  # rows, ascending, in the order of `StepPlan.sampled_slots`

    @property
    def first_are_sampled(self) -> bool:
        """Whether the rows that sample are the first so many: always so without chunks."""
        return not self.sampled or self.sampled[-1] == len(self.sampled) - 1


def decode_rows(plan: StepPlan, size: int, idle_slot: int) -> DecodeRows:
    """`plan`, which is `fit_for_decode` and has at most `size` tokens, as `size` rows. Those too many are of
    length 1 in the idle slot, which is the last one."""
    slots, lengths = list(plan.decode_slots), list(plan.decode_lengths)
    sampled = list(range(len(slots)))
    given: list[int] = []
    for chunk in plan.chunks:
        slots += [chunk.slot] * len(chunk.tokens)
        lengths += range(chunk.start + 1, chunk.start + len(chunk.tokens) + 1)
        given += chunk.tokens
        if chunk.is_last:
            sampled.append(len(slots) - 1)
    spare = size - len(slots)
    assert spare >= 0, f"{len(slots)} rows for {size}"
    behind = idle_slot + 1
    places = [*plan.decode_slots, *range(behind, behind + len(given)), *[idle_slot] * spare]
    return DecodeRows(slots + [idle_slot] * spare, lengths + [1] * spare, places, given, sampled)

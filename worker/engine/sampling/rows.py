"""The rows of a step that are sampled: a slot with drafts has several."""

from __future__ import annotations

import numpy as np

from mla_router.worker.step.plan import StepPlan


class SampledRows:
    """The R sampled rows of a plan: those of each decode slot, then the last ones of chunks."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan

    def first(self, indices: np.ndarray) -> np.ndarray:
        """Returns the first row of each of `indices` into `StepPlan.sampled_slots`."""
        plan = self._plan
        if not plan.num_drafts:
            return indices
        decodes = len(plan.decode_slots)
        of_chunks = indices + decodes * (plan.rows_per_decode - 1)
        return np.where(indices < decodes, indices * plan.rows_per_decode, of_chunks)

    def all(self, indices: np.ndarray) -> np.ndarray:
        """Returns all rows of `indices`, ascending."""
        plan = self._plan
        if not plan.num_drafts:
            return indices
        rows = self.first(indices)[:, None] + np.arange(plan.rows_per_decode)
        exists = (indices[:, None] < len(plan.decode_slots)) | (rows == rows[:, :1])
        existing: np.ndarray = rows[exists]
        return existing

    def leading(self, indices: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Returns the first `counts[i]` rows of each of `indices`, ascending."""
        before = np.cumsum(counts) - counts
        ranks = np.arange(int(counts.sum())) - np.repeat(before, counts)
        rows: np.ndarray = np.repeat(self.first(indices), counts) + ranks
        return rows

    def room(self, indices: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Returns the rows of each of the D decode slots that may give a token, [D] int32: the first `counts[i]` for
        each of `indices`, all of the others."""
        most = self._plan.rows_per_decode
        room = np.full(len(self._plan.sampled_slots), most, dtype=np.int32)
        room[indices] = counts
        return room[: len(self._plan.decode_slots)]

    def count(self, index: int) -> int:
        """Returns the maximum number of tokens of an index into `StepPlan.sampled_slots`."""
        return self._plan.tokens_per_decode if index < len(self._plan.decode_slots) else 1

    def on_paths(self, indices: np.ndarray) -> list[np.ndarray]:
        """Returns the rows of all nodes that a tree may accept, for `indices` into `StepPlan.sampled_slots`: the index of
        each node in the accepted paths [S, 1 + num_drafts], and the first row of its slot among the rows `all(indices)`,
        both int64."""
        most, nodes = self._plan.tokens_per_decode, self._plan.rows_per_decode
        is_decode = indices < len(self._plan.decode_slots)
        counts = np.where(is_decode, nodes, 1)
        firsts = np.repeat((np.cumsum(counts) - counts)[:, None], most, axis=1)
        nodes_of = indices[:, None] * most + np.arange(most)
        exists = is_decode[:, None] | (np.arange(most) == 0)
        return [nodes_of[exists], firsts[exists]]

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns, of a plan with drafts: `slots` [R] int64 of the rows, their `numbers` [R] int32 among the rows of
        their slots, and `bounds` [D] int64 of the D decode slots."""
        plan = self._plan
        decodes, each = len(plan.decode_slots), plan.rows_per_decode
        slots = np.array(plan.sampled_slots, dtype=np.int64)
        counts = np.where(np.arange(len(slots)) < decodes, each, 1)
        offsets = np.zeros(int(counts.sum()), dtype=np.int32)
        offsets[: decodes * each] = np.tile(np.arange(each, dtype=np.int32), decodes)
        return {
            "slots": np.repeat(slots, counts),
            "numbers": offsets,
            "bounds": np.array(plan.decode_bounds, dtype=np.int64),
        }

"""Steps of one prompt, from its beginning on, as CUDA graphs: one launch, attention included.

The common case where few requests come at a time, and there the whole of the wait for a first token. With
several requests in a step, or a prefix in the cache, attention depends on more than the number of rows
(`pieces.py`). Here each row sees itself and those before it, so that the rows too many of a larger
recording, which come behind, are seen by none of the prompt's own; they are an idle slot's.
Short ones are decode rows before that (`decode_rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_router.worker.core import StepPlan
from mla_router.worker.engine.alias import alias
from mla_router.worker.engine.padded_rows import PaddedRows
from mla_router.worker.engine.recordings import Recordings, record_sizes

# From tokens, slots and positions of as many rows as it is planned for, their update and stream: those of
# `Decoder.run_layers`.
RunPrompt = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class FreshPrompt:
    """The recording of one number of rows."""

    rows: PaddedRows  # that the graph reads
    run: RunPrompt  # what was recorded, kept because the graph reads tables of its attention
    graph: torch.cuda.CUDAGraph
    update: Tensor
    stream: Tensor

    @property
    def size(self) -> int:
        return self.rows.size

    def replay(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Update and stream of a prompt's tokens, slots and positions [3, T]; the next replay of any of these
        recordings writes over them."""
        self.rows.write(rows)
        self.graph.replay()
        return self.update[: rows.shape[1]], self.stream[: rows.shape[1]]


class FreshPrompts:
    """Recordings of some numbers of rows."""

    def __init__(self, recordings: Iterable[FreshPrompt] = ()) -> None:
        self._recordings = Recordings(recordings)

    def fitting(self, plan: StepPlan) -> FreshPrompt | None:
        """What can be replayed for `plan`, if anything."""
        if plan.decode_slots or len(plan.chunks) != 1 or plan.chunks[0].start:
            return None
        return self._recordings.fitting(plan.num_tokens)


def record_fresh_prompts(
    runs: Mapping[int, RunPrompt], *, idle_slot: int, device: torch.device
) -> FreshPrompts:
    """Record each of `runs`, which are for so many rows."""

    def record(size: int, pool: Any) -> FreshPrompt:
        rows, run = PaddedRows(size, idle_slot, device), runs[size]
        run(*rows.read())  # kernels are compiled and libraries set up before they are recorded
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            update, stream = run(*rows.read())
        return FreshPrompt(rows, run, graph, alias(update), alias(stream))

    return FreshPrompts(record_sizes("prompts alone", record, list(runs), device))

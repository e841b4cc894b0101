"""Steps of one prompt, from its beginning on, as CUDA graphs: one launch, attention included.

The common case where few requests come at a time, and there the whole of the wait for a first token. With
several requests in a step, or a prefix in the cache, attention depends on more than the number of rows
(`pieces.py`). Here each row sees itself and those before it, so that the rows too many of a larger
recording, which come behind, are seen by none of the prompt's own: they have tokens of whoever had them, and lie in
page 0 of the cache, which is nobody's. Short ones are decode rows before that (`decode_rows.py`).

Rows follow from a prompt's slot and length and its tokens, and nothing else is packed for them while the device waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_router.worker.core import StepPlan
from mla_router.worker.engine.alias import alias
from mla_router.worker.engine.recordings import Recordings, record_sizes

# From slot, length and tokens of a prompt, int64 and as many as it is planned for, update and stream of its rows: those
# of `Decoder.run_layers`.
RunPrompt = Callable[[Tensor], tuple[Tensor, Tensor]]

_HEAD = 2  # slot and length


def no_prompt(size: int, idle_slot: int, device: torch.device) -> Tensor:
    """[2 + size], what a `RunPrompt` of `size` rows gets if there is no prompt."""
    inputs = torch.zeros(_HEAD + size, dtype=torch.int64, device=device)
    inputs[0] = idle_slot
    return inputs


@dataclass(frozen=True, slots=True)
class FreshPrompt:
    """The recording of one number of rows."""

    inputs: Tensor  # [2 + size], that the graph reads
    run: RunPrompt  # what was recorded, kept because the graph reads tables of its attention
    graph: torch.cuda.CUDAGraph
    update: Tensor
    stream: Tensor

    @property
    def size(self) -> int:
        return len(self.inputs) - _HEAD

    def replay(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Update and stream of a prompt's rows, `inputs` [2 + T] being its slot, length and tokens; the next
        replay of any of these recordings writes over them."""
        self.inputs[: len(inputs)] = inputs
        self.graph.replay()
        rows = len(inputs) - _HEAD
        return self.update[:rows], self.stream[:rows]


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
        inputs, run = no_prompt(size, idle_slot, device), runs[size]
        run(inputs)  # kernels are compiled and libraries set up before they are recorded
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            update, stream = run(inputs)
        return FreshPrompt(inputs, run, graph, alias(update), alias(stream))

    return FreshPrompts(record_sizes("prompts alone", record, list(runs), device))

"""Decode steps as CUDA graphs: one launch instead of hundreds.

A step of decode rows alone reads nothing from the host but each row's slot, its length and the place of
its token. What they lead to is looked up in front of the graph, into tensors that the graph reads, so the whole
forward pass can be recorded once for each batch size and replayed with others.
Steps with few prompt tokens become such steps (`decode_rows.py`). A batch between two sizes takes
the larger one; the rows too many belong to an idle slot, whose page table points to page 0, and what
they compute is nobody's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_router.worker.core import StepPlan
from mla_router.worker.engine.alias import alias
from mla_router.worker.engine.decode_rows import fit_for_decode
from mla_router.worker.engine.recordings import Recordings, record_sizes
from mla_router.worker.engine.slots import SlotState
from mla_router.worker.kernels.kv_cache.locations import LookedUp

# From what was looked up of decode rows to their logits [B, V].
Decode = Callable[[LookedUp], Tensor]
# Told the slots and lengths of decode rows before they are decoded: `AttentionBackend.prepare_decode`.
Prepare = Callable[[Sequence[int], Sequence[int]], None]


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes worth a graph up to `largest`: every one where a row more costs most, then steps of
    an eighth of the size, so that padding is never more."""
    sizes = [1, 2, 3, 4, 6, 8]
    while sizes[-1] < largest:
        step = max(4, 1 << ((sizes[-1] - 1).bit_length() - 3))
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < largest] + [largest]


@dataclass(frozen=True, slots=True)
class Recording:
    graph: torch.cuda.CUDAGraph
    size: int
    looked_up: LookedUp  # that the graph reads
    logits: Tensor  # [size, V], that it writes

    def replay(self, slots: SlotState, rows: Tensor) -> Tensor:
        """Logits of `rows` [3, size], which are looked up in `slots`; the next replay of any recording writes
        over them."""
        slots.look_up(rows, self.looked_up)
        self.graph.replay()
        return self.logits


class DecodeGraphs:
    """Recordings of some batch sizes; without any, every step is launched kernel by kernel."""

    def __init__(self, recordings: Sequence[Recording] = ()) -> None:
        self._recordings = Recordings(recordings)

    def fitting(self, plan: StepPlan) -> Recording | None:
        """What can be replayed for `plan`, if anything."""
        return self._recordings.fitting(plan.num_tokens) if fit_for_decode(plan) else None


def record_graphs(
    decode: Decode, prepare: Prepare, sizes: Sequence[int], slots: SlotState
) -> DecodeGraphs:
    """Record `decode` for each of `sizes`."""

    def record(size: int, pool: Any) -> Recording:
        return _record(decode, prepare, size, slots, pool)

    return DecodeGraphs(record_sizes("decode steps", record, sizes, slots.tokens.device))


def _record(decode: Decode, prepare: Prepare, size: int, slots: SlotState, pool: Any) -> Recording:
    looked_up = slots.look_up(slots.idle_rows(size))
    prepare((slots.idle_slot,) * size, (1,) * size)
    # Kernels are compiled and libraries set up before they are recorded
    decode(looked_up)
    torch.cuda.synchronize(slots.tokens.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        logits = decode(looked_up)
    return Recording(graph, size, looked_up, alias(logits))

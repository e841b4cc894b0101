"""Runs steps of decode rows as CUDA graphs: one launch instead of hundreds.

The host gives such a step the kind and the slot of each row, and the length and the token of rows of prompts. One
kernel before the graph looks up the rest, and writes it to tensors that the graph reads. So the whole forward pass,
head included, is captured once for each size and replayed with other rows. Steps with few prompt tokens run the same
way (`decode_rows.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mla_router.worker.engine.inputs import DecodeInputs, InputPacker
from mla_router.worker.engine.runners.alias import alias
from mla_router.worker.engine.runners.capture import capture, capture_sizes
from mla_router.worker.engine.runners.compiled_decode import CompiledDecode
from mla_router.worker.engine.runners.decode_rows import decode_rows
from mla_router.worker.engine.runners.forward_pass import ForwardPass
from mla_router.worker.engine.runners.outputs import Decode, ForwardOutput, HeadOutput
from mla_router.worker.engine.slots import SlotState
from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp
from mla_router.worker.step.plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGraph:
    """The captured graph of one size."""

    graph: torch.cuda.CUDAGraph
    looked_up: LookedUp  # inputs of the graph
    output: HeadOutput  # [size, ...], outputs of the graph
    queries: int = 1  # rows of a slot, next to each other

    def replay(self, slots: SlotState, rows: Tensor, kinds: Tensor) -> HeadOutput:
        """Returns the output for `rows` [3, size] of `kinds` [size] (`SlotState.look_up`). The next replay of any
        decode graph overwrites the output."""
        slots.look_up(rows, kinds, self.looked_up, self.queries)
        self.graph.replay()
        return self.output


class DecodeGraphRunner:
    """Implements `Runner` for steps that fit a decode graph, all of whose slots have `queries` rows; with 1, rows of any
    slots."""

    def __init__(self, forward_pass: ForwardPass, packer: InputPacker, queries: int = 1) -> None:
        self._forward = forward_pass
        self._queries = queries
        self._packer = packer
        self._graphs: dict[int, DecodeGraph] = {}

    def capture(self, sizes: Sequence[int], compiled: int = 0) -> None:
        """Captures a graph of each of `sizes`. Those up to `compiled` are captured from modules that torch.compile has
        compiled."""
        decode: Decode = partial(self._forward.decode, queries=self._queries)
        if compiled and sizes:
            decode = CompiledDecode(decode, self._forward.model, compiled)
        self._graphs = capture_sizes(
            "decode graph" if self._queries == 1 else "verify graph",
            lambda size, pool: self.capture_size(decode, size, pool),
            sizes,
        )
        if isinstance(decode, CompiledDecode):
            decode.report()

    @property
    def graphs(self) -> Sequence[DecodeGraph]:
        return [*self._graphs.values()]

    def capture_size(self, decode: Decode, size: int, pool: Any) -> DecodeGraph:
        slots = self._forward.slots
        looked_up = slots.idle_rows(size)
        self._forward.prepare_decode((slots.idle_slot,) * size, (1,) * size)
        graph, output = capture(partial(decode, looked_up), pool, self._forward.device)
        return DecodeGraph(graph, looked_up, HeadOutput(*map(alias, output)), self._queries)

    def pack(self, plan: StepPlan, rows: int) -> DecodeInputs:
        return self._packer.pack_decode_rows(
            plan, decode_rows(plan, rows, self._forward.slots.idle_slot)
        )

    def run(self, plan: StepPlan, inputs: DecodeInputs) -> ForwardOutput:
        slots, rows = self._forward.slots, inputs.on_host
        self._forward.prepare_decode(rows.slots, rows.lengths)
        graph = self._graphs[len(rows.slots)]
        hidden_states, logits = graph.replay(slots, inputs.rows, inputs.kinds)
        if rows.first_are_sampled:
            logits, sampled = logits[: len(rows.sampled)], None
        else:
            logits, sampled = logits.index_select(0, inputs.sampled), inputs.sampled
        return ForwardOutput(
            plan, logits, inputs.sampled_slots, hidden_states, rows=sampled, source=graph
        )

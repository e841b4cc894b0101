"""Runs steps of one prompt without a cached prefix as CUDA graphs: one launch, attention included.

Such steps are common under low load, and are then the whole time to first token. With several requests in a step, or a
cached prefix, attention depends on more than the number of rows (`piecewise.py`). Here each row attends to itself and to
the rows before it. Padding comes last, so no row of the prompt attends to it.

The inputs are the prompt's slot, length and tokens. The host packs nothing else while the device waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mla_router.worker.engine.attention.layout import ChunkExtent
from mla_router.worker.engine.inputs import PROMPT_HEADER, InputPacker, PromptInputs
from mla_router.worker.engine.runners.alias import alias
from mla_router.worker.engine.runners.capture import capture, capture_sizes
from mla_router.worker.engine.runners.forward_pass import ForwardPass
from mla_router.worker.engine.runners.outputs import LayerOutput
from mla_router.worker.model.batch import ForwardBatch
from mla_router.worker.step.plan import PrefillChunk, StepPlan

# The forward pass of a prompt [2 + size] int64: slot, length, tokens and padding.
Prefill = Callable[[Tensor], LayerOutput]


@dataclass(frozen=True, slots=True)
class PrefillGraph:
    """The captured graph of one size."""

    inputs: Tensor  # [2 + size], input of the graph
    prefill: Prefill  # the captured function, kept because the graph reads tables of its attention
    graph: torch.cuda.CUDAGraph
    output: LayerOutput  # [size, hidden_size], output of the graph

    def replay(self, prompt: Tensor) -> LayerOutput:
        """Returns the output for a prompt [2 + T]: slot, length, tokens. The next replay of any prefill graph overwrites
        it."""
        # Padding keeps tokens of an earlier prompt. Its rows are written to page 0, which no request owns.
        self.inputs[: len(prompt)] = prompt
        self.graph.replay()
        rows = len(prompt) - PROMPT_HEADER
        return LayerOutput(self.output.hidden_states[:rows], self.output.residual[:rows])


class PrefillGraphRunner:
    """Implements `Runner` for steps of one prompt without a cached prefix."""

    def __init__(
        self, forward_pass: ForwardPass, packer: InputPacker, *, for_drafter: bool = False
    ) -> None:
        """`for_drafter`: outputs have the batch of the rows."""
        self._forward = forward_pass
        self._packer = packer
        self._for_drafter = for_drafter
        self._graphs: dict[int, PrefillGraph] = {}

    def capture(self, sizes: Sequence[int]) -> None:
        """Captures a graph of each of `sizes`."""
        self._graphs = capture_sizes("prefill graph", self.capture_size, sizes)

    def capture_size(self, size: int, pool: Any) -> PrefillGraph:
        inputs, prefill = self.idle_prompt(size), self.plan_prefill(size)
        graph, output = capture(partial(prefill, inputs), pool, self._forward.device)
        return PrefillGraph(
            inputs, prefill, graph, LayerOutput(alias(output.hidden_states), alias(output.residual))
        )

    def idle_prompt(self, size: int) -> Tensor:
        """Returns [2 + size] int64: an empty prompt in the idle slot, and padding."""
        inputs = torch.zeros(PROMPT_HEADER + size, dtype=torch.int64, device=self._forward.device)
        inputs[0] = self._forward.slots.idle_slot
        return inputs

    def plan_prefill(self, size: int) -> Prefill:
        """Returns the forward pass of prompts that are padded to `size` rows."""
        forward = self._forward
        chunk = ChunkExtent(forward.slots.idle_slot, 0, size)
        attention = forward.attention.plan_prefill_graph(forward.layout([chunk]))
        # Padding may be at any position within the table of rotary angles
        last = forward.capacity.context_length - 1
        positions = torch.arange(size, device=forward.device).clamp_(max=last)

        def prefill(inputs: Tensor) -> LayerOutput:
            prompt = inputs[:PROMPT_HEADER]
            locations = forward.slots.prompt_out_cache_loc(prompt, size)
            windows = forward.slots.prompt_window_cache_loc(prompt, size)
            batch = ForwardBatch(
                tokens=inputs[PROMPT_HEADER:],
                positions=positions,
                out_cache_loc=locations,
                num_decodes=0,
                attention=attention(locations, windows),
                exchange=forward.padded_exchange(locations),
                window_cache_loc=windows,
            )
            return forward.run_layers(batch)

        return prefill

    def pack(self, plan: StepPlan, rows: int) -> PromptInputs:
        return self._packer.pack_prompt(plan, rows)

    def run(self, plan: StepPlan, inputs: PromptInputs) -> LayerOutput:
        graph = self._graphs[inputs.size]
        output = graph.replay(inputs.prompt)
        if self._for_drafter:  # the device is busy with the graph meanwhile
            return output._replace(batch=self._batch(plan.chunks[0], graph.inputs))
        return output

    def _batch(self, chunk: PrefillChunk, inputs: Tensor) -> ForwardBatch:
        """Returns the rows of a prompt in the `inputs` of a graph, without padding, for kernels outside of the graph."""
        forward, rows = self._forward, len(chunk.tokens)
        extent = ChunkExtent(chunk.slot, 0, rows)
        return ForwardBatch(
            tokens=inputs[PROMPT_HEADER : PROMPT_HEADER + rows],
            positions=torch.arange(rows, device=forward.device),
            out_cache_loc=forward.slots.prompt_out_cache_loc(inputs[:PROMPT_HEADER], rows),
            num_decodes=0,
            attention=forward.attention.plan(forward.layout([extent])),
        )

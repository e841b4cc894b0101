"""Steps as piecewise CUDA graphs: attention is launched kernel by kernel between the graphs.

The number of a step's rows decides all launches of a layer but those of its attention, where lengths and the
division into chunks count as well. So the forward pass is captured for some numbers of rows, and each capture is cut
where a layer calls for its attention (`ForwardBatch.attend`). Padding is not attended from.

Without it a GPU waits for its host: some five hundred launches take longer than the work of a prompt of a thousand
tokens. `prefill_graph.py` and `decode_graph.py` have the steps that need no cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_router.worker.core import StepPlan
from mla_router.worker.engine.inputs import RowInputs
from mla_router.worker.engine.runners.alias import alias
from mla_router.worker.engine.runners.capture import capture_sizes
from mla_router.worker.engine.runners.eager import EagerRunner
from mla_router.worker.engine.runners.forward_pass import ForwardPass
from mla_router.worker.engine.runners.outputs import LayerOutput
from mla_router.worker.model.attention import StepAttention
from mla_router.worker.model.batch import Attend, ForwardBatch, Rows


@dataclass(frozen=True, slots=True)
class Cut:
    """A layer's attention: the model's call, with memory that the graphs around it use."""

    attend: Attend
    rows: Rows  # [size, ...] each
    cache: Tensor
    out: Tensor  # [size, ...]


@dataclass(frozen=True, slots=True)
class PiecewiseGraph:
    """The capture of one size: a graph, a cut, a graph, and so on."""

    rows: Tensor  # [3, size] int64, that the first graph reads
    out_cache_loc: Tensor  # [size] int64, that the first graph writes
    graphs: list[torch.cuda.CUDAGraph]
    cuts: list[Cut]
    output: LayerOutput  # [size, hidden_size]

    def replay(
        self, inputs: Tensor, *, rows: int, num_decodes: int, attention: Sequence[StepAttention]
    ) -> LayerOutput:
        """The first `rows` rows of `inputs` [3, size] int64: tokens, slots, positions. The next replay of any
        piecewise graph writes over them."""
        self.rows.copy_(inputs)
        tokens, _, positions = self.rows.unbind()
        batch = ForwardBatch(tokens, positions, self.out_cache_loc, num_decodes, attention)
        for graph, cut in zip(self.graphs, self.cuts, strict=False):
            graph.replay()
            own_rows = tuple(tensor[:rows] for tensor in cut.rows)
            cut.attend(batch, own_rows, cut.cache, cut.out[:rows])
        self.graphs[-1].replay()
        return LayerOutput(self.output.hidden_states[:rows], self.output.residual[:rows])


class PiecewiseRunner:
    def __init__(self, forward_pass: ForwardPass, eager: EagerRunner) -> None:
        """`eager` packs, and plans attention, which is launched as in its own steps."""
        self._forward = forward_pass
        self._eager = eager
        self._graphs: dict[int, PiecewiseGraph] = {}

    def capture(self, sizes: Sequence[int]) -> None:
        """Capture graphs of each of `sizes`."""
        self._graphs = {}
        if not sizes:
            return
        device = self._forward.device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs = capture_sizes(
            "piecewise graph",
            lambda size, pool: self._capture_size(size, stream, pool),
            sizes,
            device,
        )

    def _capture_size(self, size: int, stream: torch.cuda.Stream, pool: Any) -> PiecewiseGraph:
        rows = self._idle_rows(size)
        # Kernels are compiled and libraries set up before the capture
        self._forward.run_layers(self._batch(_Unattended, rows))
        torch.cuda.synchronize(self._forward.device)
        graphs: list[torch.cuda.CUDAGraph] = []
        cuts: list[Cut] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=pool)

        class Cutting(ForwardBatch):
            def attend(self, attend: Attend, rows: Rows, cache: Tensor, out: Tensor) -> None:
                graphs[-1].capture_end()
                cuts.append(Cut(attend, tuple(map(alias, rows)), cache, alias(out)))
                begin()

        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            begin()
            batch = self._batch(Cutting, rows)
            output = self._forward.run_layers(batch)
            graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        output = LayerOutput(*map(alias, output))
        return PiecewiseGraph(rows, batch.out_cache_loc, graphs, cuts, output)

    def _idle_rows(self, size: int) -> Tensor:
        """[3, size] int64: tokens, slots and positions of padding."""
        rows = torch.zeros(3, size, dtype=torch.int64, device=self._forward.device)
        rows[1] = self._forward.slots.idle_slot
        return rows

    def _batch(self, kind: type[ForwardBatch], rows: Tensor) -> ForwardBatch:
        tokens, slots, positions = rows.unbind()
        return kind(
            tokens=tokens,
            positions=positions,
            out_cache_loc=self._forward.slots.locations(slots, positions),
            num_decodes=0,
            attention=self._forward.attention.plan(self._forward.layout()),
        )

    def pack(self, plan: StepPlan, rows: int) -> RowInputs:
        return self._eager.pack(plan, rows)

    def run(self, plan: StepPlan, inputs: RowInputs) -> LayerOutput:
        attention = self._eager.plan_attention(plan, inputs)
        return self._graphs[inputs.rows.shape[1]].replay(
            inputs.rows,
            rows=plan.num_tokens,
            num_decodes=len(plan.decode_slots),
            attention=attention,
        )


class _Unattended(ForwardBatch):
    def attend(self, attend: Attend, rows: Rows, cache: Tensor, out: Tensor) -> None:
        del attend, rows, cache
        out.zero_()

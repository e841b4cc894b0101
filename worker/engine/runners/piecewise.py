"""Runs steps as piecewise CUDA graphs: attention is launched kernel by kernel between the graphs.

All launches of a layer depend only on the number of rows, except for its attention, which depends on the lengths and the
chunks as well. So the forward pass is captured for some numbers of rows, and each capture is cut where a layer calls its
attention (`ForwardBatch.attend`). Attention does not run for padding. If the model takes images, another cut is after
the look-up of embeddings, where those of images replace some (`ForwardBatch.embed`).

Without graphs a GPU waits for its host: about five hundred launches take longer than the work for a prompt of a thousand
tokens. Steps that need no cut have `prefill_graph.py` and `decode_graph.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_router.worker.engine.inputs import RowInputs
from mla_router.worker.engine.runners.alias import alias
from mla_router.worker.engine.runners.capture import capture_sizes
from mla_router.worker.engine.runners.eager import EagerRunner
from mla_router.worker.engine.runners.forward_pass import ForwardPass
from mla_router.worker.engine.runners.outputs import LayerOutput
from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp
from mla_router.worker.model.attention import StepAttention
from mla_router.worker.model.batch import Attend, ForwardBatch, Rows
from mla_router.worker.model.exchange import Exchange
from mla_router.worker.step.plan import StepPlan


@dataclass(frozen=True, slots=True)
class Cut:
    """The attention of a layer: the model's call, on tensors that the graphs before and after it use."""

    attend: Attend
    rows: Rows  # [size, ...] each
    cache: Tensor
    out: Tensor  # [size, ...]


@dataclass(frozen=True, slots=True)
class Embedding:
    """The look-up of embeddings, before the other graphs."""

    graph: torch.cuda.CUDAGraph
    rows: Tensor  # [size, hidden_size], output of the graph


@dataclass(frozen=True, slots=True)
class PiecewiseGraph:
    """The captured graphs of one size, with a cut between each two."""

    looked_up: LookedUp  # [size] each, inputs of the graphs
    embedding: Embedding | None  # None without images: the first of `graphs` looks them up
    graphs: list[torch.cuda.CUDAGraph]
    cuts: list[Cut]
    output: LayerOutput  # [size, hidden_size], output of the last graph

    def replay(
        self,
        *,
        rows: int,
        num_decodes: int,
        attention: Sequence[StepAttention],
        embedded: Sequence[tuple[int, Tensor]],
        exchange: Exchange | None,
    ) -> LayerOutput:
        """Returns the output of the first `rows` rows of `looked_up`. `exchange`: of these rows after the graphs. The
        next replay of any piecewise graph overwrites the output."""
        inputs = self.looked_up
        batch = ForwardBatch(
            inputs.tokens[:rows],
            inputs.positions[:rows],
            inputs.out_cache_loc[:rows],
            num_decodes,
            attention,
            exchange,
            embedded=embedded,
        )
        if self.embedding is not None:
            self.embedding.graph.replay()
            batch.embed(self.embedding.rows)
        for graph, cut in zip(self.graphs, self.cuts, strict=False):
            graph.replay()
            own_rows = tuple(tensor[:rows] for tensor in cut.rows)
            cut.attend(batch, own_rows, cut.cache, cut.out[:rows])
        self.graphs[-1].replay()
        return LayerOutput(self.output.hidden_states[:rows], self.output.residual[:rows], batch)


class PiecewiseRunner:
    """Implements `Runner` for all steps up to the largest captured size."""

    def __init__(self, forward_pass: ForwardPass, eager: EagerRunner) -> None:
        """`eager` packs the inputs and plans the attention."""
        self._forward = forward_pass
        self._eager = eager
        self._graphs: dict[int, PiecewiseGraph] = {}

    def capture(self, sizes: Sequence[int]) -> None:
        """Captures graphs of each of `sizes`."""
        self._graphs = {}
        if not sizes:
            return
        stream = torch.cuda.Stream(self._forward.device)  # type: ignore[no-untyped-call]
        self._graphs = capture_sizes(
            "piecewise graph",
            lambda size, pool: self._capture_size(size, stream, pool),
            sizes,
        )

    def _capture_size(self, size: int, stream: torch.cuda.Stream, pool: Any) -> PiecewiseGraph:
        rows = self._forward.slots.idle_rows(size)
        # The first call compiles kernels and sets up libraries, which a capture does not permit
        self._forward.run_layers(self._batch(_Unattended, rows))
        torch.cuda.synchronize(self._forward.device)
        graphs: list[torch.cuda.CUDAGraph] = []
        cuts: list[Cut] = []
        embeddings: list[Tensor] = []
        takes_images = self._forward.model.vision is not None

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(pool=pool)

        class Cutting(ForwardBatch):
            def embed(self, hidden_states: Tensor) -> None:
                if takes_images:
                    graphs[-1].capture_end()
                    embeddings.append(alias(hidden_states))
                    begin()

            def attend(self, attend: Attend, rows: Rows, cache: Tensor, out: Tensor) -> None:
                graphs[-1].capture_end()
                cuts.append(Cut(attend, tuple(map(alias, rows)), cache, alias(out)))
                begin()

        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            begin()
            output = self._forward.run_layers(self._batch(Cutting, rows))
            graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        output = LayerOutput(alias(output.hidden_states), alias(output.residual))
        embedding = Embedding(graphs.pop(0), embeddings[0]) if takes_images else None
        return PiecewiseGraph(rows, embedding, graphs, cuts, output)

    def _batch(self, kind: type[ForwardBatch], rows: LookedUp) -> ForwardBatch:
        return kind(
            tokens=rows.tokens,
            positions=rows.positions,
            out_cache_loc=rows.out_cache_loc,
            num_decodes=0,
            attention=self._forward.attention.plan(self._forward.layout()),
            exchange=self._forward.padded_exchange(rows.out_cache_loc),
            window_cache_loc=self._forward.slots.window_cache_loc(rows),
        )

    def pack(self, plan: StepPlan, rows: int) -> RowInputs:
        return self._eager.pack(plan, rows)

    def run(self, plan: StepPlan, inputs: RowInputs) -> LayerOutput:
        graph = self._graphs[inputs.rows.shape[1]]
        rows = self._forward.slots.look_up(
            inputs.rows, inputs.kinds, graph.looked_up, plan.rows_per_decode
        )
        return graph.replay(
            rows=plan.num_tokens,
            num_decodes=plan.num_decode_rows,
            attention=self._eager.plan_attention(plan, rows),
            embedded=self._forward.embedded(plan),
            exchange=self._forward.exchange(plan),
        )


class _Unattended(ForwardBatch):
    """A batch whose attention returns zeros."""

    def attend(self, attend: Attend, rows: Rows, cache: Tensor, out: Tensor) -> None:
        del attend, rows, cache
        out.zero_()

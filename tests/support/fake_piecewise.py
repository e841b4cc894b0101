"""Piecewise graphs without a GPU: the layers run at each replay, on padded rows except for attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.runners.forward_pass import ForwardPass
from mla_router.worker.engine.runners.outputs import LayerOutput
from mla_router.worker.model.attention import StepAttention
from mla_router.worker.model.batch import Attend, ForwardBatch, Rows
from mla_router.worker.model.exchange import Exchange


class FakePiecewise:
    """The graphs of one size."""

    def __init__(self, forward_pass: ForwardPass, size: int) -> None:
        self._forward = forward_pass
        self.looked_up = forward_pass.slots.idle_rows(size)
        self.replays = 0
        self.with_images = 0  # replays

    def replay(
        self,
        *,
        rows: int,
        num_decodes: int,
        attention: Sequence[StepAttention],
        embedded: Sequence[tuple[int, Tensor]],
        exchange: Exchange | None,
    ) -> LayerOutput:
        self.replays += 1
        self.with_images += bool(embedded)
        inputs = self.looked_up
        of_step = ForwardBatch(
            inputs.tokens[:rows],
            inputs.positions[:rows],
            inputs.out_cache_loc[:rows],
            num_decodes,
            attention,
            exchange,
        )

        class Padded(ForwardBatch):
            def attend(self, attend: Attend, tensors: Rows, cache: Tensor, out: Tensor) -> None:
                attend(of_step, tuple(tensor[:rows] for tensor in tensors), cache, out[:rows])
                out[rows:] = math.nan  # no attention for padding

        output = self._forward.run_layers(
            Padded(
                inputs.tokens,
                inputs.positions,
                inputs.out_cache_loc,
                0,
                attention,
                self._forward.padded_exchange(inputs.out_cache_loc),
                embedded,
            )
        )
        return LayerOutput(output.hidden_states[:rows], output.residual[:rows], of_step)


def fake_piecewise_graphs(engine: Engine, sizes: Sequence[int]) -> list[FakePiecewise]:
    """Gives `engine`, on the CPU, fake piecewise graphs of `sizes` beside its decode graphs, and returns them."""
    graphs = {size: FakePiecewise(engine.forward_pass, size) for size in sizes}
    runners = engine.runners
    runners.piecewise._graphs = graphs  # type: ignore[assignment]
    runners.sizes = replace(runners.sizes, piecewise=sizes)
    return list(graphs.values())

"""Runs steps of any kind and size kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence

from mla_router.worker.engine.attention.layout import ChunkExtent
from mla_router.worker.engine.inputs import InputPacker, RowInputs
from mla_router.worker.engine.runners.forward_pass import ForwardPass
from mla_router.worker.engine.runners.outputs import LayerOutput
from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp
from mla_router.worker.model.attention import StepAttention
from mla_router.worker.model.batch import ForwardBatch
from mla_router.worker.step.plan import StepPlan


class EagerRunner:
    """Implements `Runner` for all steps."""

    def __init__(self, forward_pass: ForwardPass, packer: InputPacker) -> None:
        self._forward = forward_pass
        self._packer = packer

    def pack(self, plan: StepPlan, rows: int) -> RowInputs:
        """Packs `plan` as `rows` rows, padding included."""
        return self._packer.pack_rows(plan, rows)

    def run(self, plan: StepPlan, inputs: RowInputs) -> LayerOutput:
        exchange = self._forward.exchange(plan)
        if exchange is not None and not plan.num_tokens:
            return self._forward.serve(exchange)
        rows = self._forward.slots.look_up(inputs.rows, inputs.kinds, queries=plan.rows_per_decode)
        batch = ForwardBatch(
            tokens=rows.tokens,
            positions=rows.positions,
            out_cache_loc=rows.out_cache_loc,
            num_decodes=plan.num_decode_rows,
            attention=self.plan_attention(plan, rows),
            exchange=exchange,
            embedded=self._forward.embedded(plan),
            window_cache_loc=self._forward.slots.window_cache_loc(rows),
        )
        return self._forward.run_layers(batch)._replace(batch=batch)

    def plan_attention(self, plan: StepPlan, rows: LookedUp) -> Sequence[StepAttention]:
        """Returns the attention of the step's `rows`, without padding."""
        forward, decodes = self._forward, plan.num_decode_rows
        if decodes:
            forward.prepare_decode(plan.decode_slots, plan.decode_bounds)
        chunks = [ChunkExtent(c.slot, c.start, len(c.tokens)) for c in plan.chunks]
        longest = max(plan.decode_bounds, default=0) + plan.num_drafts
        return forward.attention.plan(
            forward.layout(
                chunks,
                rows.slots[:decodes],
                rows.lengths[:decodes],
                longest,
                plan.rows_per_decode,
            )
        )

"""The forward pass of the model with its KV cache and attention, shared by all runners of an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mla_router.worker.engine.attention.layout import ChunkExtent, StepLayout
from mla_router.worker.engine.attention.model_attention import ModelAttention
from mla_router.worker.engine.images import ImageStore
from mla_router.worker.engine.runners.outputs import HeadOutput, LayerOutput
from mla_router.worker.engine.slots import SlotState
from mla_router.worker.kernels.attention.tree_tail import TreeTail
from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp
from mla_router.worker.kv_cache.pool import KVCachePool
from mla_router.worker.model.batch import ForwardBatch
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.exchange import Exchange
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import StepPlan


class ForwardPass:
    """Runs the model over the rows of a step, kernel by kernel or in the capture of a graph."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCachePool,
        slots: SlotState,
        attention: ModelAttention,
        capacity: Capacity,
    ) -> None:
        self.model = model
        self.slots = slots
        self.attention = attention
        self.capacity = capacity
        self.images = ImageStore(model.vision, slots.last_token.device)
        self._caches = kv_cache.layers
        self._no_slots = slots.last_token[:0]
        self._no_lengths = self._no_slots.to(torch.int32)

    @property
    def caches(self) -> Sequence[Tensor]:
        """The KV cache of each layer, [pages, page_size, width], those of a drafter included."""
        return self._caches

    @property
    def device(self) -> torch.device:
        return self._no_slots.device

    def layout(
        self,
        chunks: Sequence[ChunkExtent] = (),
        decode_slots: Tensor | None = None,
        decode_lengths: Tensor | None = None,
        max_decode_length: int = 0,
        queries_per_slot: int = 1,
        tree: TreeTail | None = None,
    ) -> StepLayout:
        """Returns the layout of a step with decode rows of `decode_slots` [D] int64 and `decode_lengths` [D] int32, by
        default none, then `chunks`. `tree`: by default the tail of the verified nodes, if the step verifies nodes."""
        if tree is None and self.slots.tree is not None and queries_per_slot > 1:
            assert decode_slots is not None, "nodes without slots"
            tree = self.slots.tree.tail(len(decode_slots))
        return StepLayout(
            page_table=self.slots.page_table,
            page_size=self.capacity.page_size,
            decode_slots=self._no_slots if decode_slots is None else decode_slots,
            decode_lengths=self._no_lengths if decode_lengths is None else decode_lengths,
            max_decode_length=max_decode_length,
            chunks=tuple(chunks),
            window_page_table=self.slots.window_page_table,
            queries_per_slot=queries_per_slot,
            tree=tree,
        )

    def prepare_decode(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Calls `AttentionBackend.prepare_decode` of all backends."""
        self.attention.prepare_decode(
            self.slots.page_table, self.capacity.page_size, slots, lengths
        )

    def exchange(self, plan: StepPlan) -> Exchange | None:
        """Returns the exchange of the rows of `plan`, without padding; None without other DP ranks."""
        if plan.group is None:
            return None
        return Exchange(None, self.model.groups.exchange, plan.group.rows)

    def embedded(self, plan: StepPlan) -> Sequence[tuple[int, Tensor]]:
        """Returns `ForwardBatch.embedded` of the rows of `plan`."""
        return [*self.images.rows(plan.num_decode_rows, plan.chunks)]

    def padded_exchange(self, out_cache_loc: Tensor) -> Exchange:
        """Returns the exchange of a graph, which has equally many rows on all DP ranks, here with `out_cache_loc` [T]."""
        group = self.model.groups.exchange
        return Exchange(
            group.all_gather(out_cache_loc, 0), group, (len(out_cache_loc),) * group.size
        )

    @torch.inference_mode()
    def serve(self, exchange: Exchange) -> LayerOutput:
        """Does the part of a DP rank without rows in the `exchange` of a step."""
        return LayerOutput(*self.model.model.serve(exchange))

    @torch.inference_mode()
    def run_layers(self, batch: ForwardBatch) -> LayerOutput:
        return LayerOutput(*self.model.model.run_layers(batch, self._caches))

    @torch.inference_mode()
    def decode(self, rows: LookedUp, queries: int = 1) -> HeadOutput:
        """Runs decode rows, `queries` of each slot, of which the host needs to know only the number."""
        batch = self.decode_batch(rows, queries)
        return self.head(self.model(batch, self._caches))

    def decode_batch(
        self,
        rows: LookedUp,
        queries: int = 1,
        longest: int | None = None,
        tree: TreeTail | None = None,
    ) -> ForwardBatch:
        """Returns a batch of decode rows, of at most `longest` tokens, by default as many as a row may have. `tree`: as
        of `layout`."""
        most = self.capacity.longest_row if longest is None else longest
        layout = self.layout((), rows.slots, rows.lengths, most, queries, tree)
        return ForwardBatch(
            tokens=rows.tokens,
            positions=rows.positions,
            out_cache_loc=rows.out_cache_loc,
            num_decodes=len(rows.slots),
            attention=self.attention.plan(layout),
            exchange=self.padded_exchange(rows.out_cache_loc),
            window_cache_loc=self.slots.window_cache_loc(rows),
        )

    def head(self, hidden_states: Tensor) -> HeadOutput:
        """Computes the logits of normalized `hidden_states` [N, hidden_size]."""
        return HeadOutput(hidden_states, self.model.logits(hidden_states))

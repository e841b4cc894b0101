"""The backend of our Triton kernels, for 16-bit models on a GPU. `triton_attention.py` launches them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from mla_router.worker.engine.attention.layout import AtLocations, AttentionBackend, StepLayout
from mla_router.worker.engine.attention.prefill_passes import Pass, plan_passes
from mla_router.worker.engine.attention.supports import full_attention_reason, gpu_reason
from mla_router.worker.engine.attention.triton_attention import (
    AttendOver,
    PrefillGraphAttention,
    TritonAttention,
    attend_over,
)
from mla_router.worker.engine.upload import Upload
from mla_router.worker.kernels.attention.decode_schedule import decode_schedule
from mla_router.worker.kernels.attention.decode_tiling import Tiling, gqa_tiling, num_parts, tiling
from mla_router.worker.kernels.attention.ragged_attention.tiling import block_queries
from mla_router.worker.kernels.attention.shared_prefixes import (
    GROUP,
    SharedPrefixes,
    shared_prefixes,
)
from mla_router.worker.kernels.attention.tree_tail import one_part_each
from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.kv_cache.fp8 import is_fp8
from mla_router.worker.model.config.attention_spec import (
    AttentionSpec,
    GroupedQueryAttentionSpec,
    LatentAttentionSpec,
)

# Elements of keys and values that exist at a time in prefill: 1 GiB of 16 bits.
MAX_EXPANDED = 1 << 29

# Decode rows for shared-prefix batching. With fewer rows it saves little time, and the search for common prefixes
# costs 2 us a layer.
MIN_SHARED_ROWS = 129
# Heads for shared-prefix batching: those of a group of rows fit into one tile
MAX_SHARED_HEADS = 16

# Largest head_dim of keys and values: larger heads leave no room for several tiles on a multiprocessor
_MAX_HEAD_WIDTH = 256


class TritonBackend(AttentionBackend):
    name = "triton"
    supports_decode_graph = True
    plans_prefill_on_host = False
    max_keys = MAX_EXPANDED

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
    ) -> None:
        del dtype
        self.max_keys = MAX_EXPANDED // spec.prefill_kv_dim
        self._spec = spec
        self._tiles = partial(_decode_tiles, spec, device, fp8=is_fp8(kv_cache_dtype))
        self._latent = isinstance(spec, LatentAttentionSpec)
        self._block_queries = (
            block_queries(spec.head_dim, spec.v_head_dim, limits(device))
            if isinstance(spec, GroupedQueryAttentionSpec)
            else 0
        )
        self._device = device
        self._upload = Upload(device)

    @classmethod
    def supports(
        cls,
        spec: AttentionSpec,
        device: torch.device,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
    ) -> str | None:
        if reason := gpu_reason(device, dtype):
            return reason
        if isinstance(spec, LatentAttentionSpec) and (reason := full_attention_reason(spec)):
            return reason
        return _widths_reason(spec, fp8=is_fp8(kv_cache_dtype))

    def plan(self, layout: StepLayout, attend: AttendOver = attend_over) -> TritonAttention:
        """Returns the attention of a step. `attend`: the prefill kernel."""
        schedule, passes = None, []
        layout = self._joined(layout)
        prefixes = self._prefixes(layout)
        if requests := len(layout.decode_slots):
            tiles, parts = self._tiles(requests, layout.queries_per_slot)
            schedule = decode_schedule(
                prefixes.own_lengths if prefixes else layout.decode_lengths,
                max_length=layout.max_decode_length,
                tiling=tiles,
                num_parts=parts,
                window=self._spec.window,
            )
        if layout.chunks:
            passes = self._passes(layout, self._upload)
        return TritonAttention(layout, self._spec, schedule, passes, prefixes, attend)

    def _passes(self, layout: StepLayout, upload: Upload) -> list[Pass]:
        spec = self._spec
        return plan_passes(
            layout.chunks,
            spec.num_heads,
            self.max_keys,
            upload,
            spec.window,
            self._block_queries,
        )

    def _joined(self, layout: StepLayout) -> StepLayout:
        """Returns the layout with one decode row for each slot, its last one, if the kernel reads the cache once for all
        queries of a slot. Grouped-query decode takes each row by itself, but the nodes of trees together."""
        queries, tree = layout.queries_per_slot, layout.tree
        assert len(layout.decode_slots) % queries == 0, (
            f"{len(layout.decode_slots)} decode rows of slots with {queries} queries each"
        )
        if tree is not None:
            schedule = one_part_each(
                len(layout.decode_slots) // queries, self._tiles(1, queries)[0], self._device
            )
            layout = replace(layout, tree=tree._replace(schedule=schedule))
        elif queries == 1 or not self._latent:
            return replace(layout, queries_per_slot=1)
        return replace(
            layout,
            decode_slots=layout.decode_slots[queries - 1 :: queries].contiguous(),
            decode_lengths=layout.decode_lengths[queries - 1 :: queries].contiguous(),
        )

    def _prefixes(self, layout: StepLayout) -> SharedPrefixes | None:
        rows = len(layout.decode_slots)
        joins = (
            self._latent
            and self._spec.num_heads <= MAX_SHARED_HEADS
            and layout.queries_per_slot == 1
        )
        if not joins or rows < MIN_SHARED_ROWS:
            return None
        tiles, parts = self._tiles(rows // GROUP, GROUP)
        return shared_prefixes(
            layout.page_table,
            layout.decode_slots,
            layout.decode_lengths,
            page_size=layout.page_size,
            max_length=layout.max_decode_length,
            tiling=tiles,
            num_parts=parts,
        )

    def plan_prefill_graph(self, layout: StepLayout) -> AtLocations:
        # A separate upload: later steps must not overwrite the tables of the graph.
        passes = self._passes(layout, Upload(self._device))
        return lambda locations: PrefillGraphAttention(layout, self._spec, passes, locations)


def _decode_tiles(
    spec: AttentionSpec, device: torch.device, requests: int, queries: int, *, fp8: bool
) -> tuple[Tiling, int]:
    """Returns the tiling and the number of parts of decode attention, for this many requests with `queries` queries
    each."""
    heads, on = spec.num_heads, limits(device)
    if isinstance(spec, LatentAttentionSpec):
        widths = spec.kv_lora_rank, spec.qk_rope_head_dim
        tiles = tiling(heads, requests, queries, widths=widths, fp8=fp8, on=on)
        return tiles, num_parts(tiles, heads, queries, device)
    assert isinstance(spec, GroupedQueryAttentionSpec), f"attention {type(spec)}"
    tiles = gqa_tiling(
        heads // spec.num_kv_heads * queries,
        spec.head_dim + spec.v_head_dim,
        # The tiles of many KV heads were measured for one query a request
        num_kv_heads=spec.num_kv_heads if queries == 1 else 1,
        head_dim=spec.head_dim,
        fp8=fp8,
        on=on,
    )
    return tiles, num_parts(tiles, heads, queries, device, num_kv_heads=spec.num_kv_heads)


def _widths_reason(spec: AttentionSpec, *, fp8: bool) -> str | None:
    least = 32 if fp8 else 16
    match spec:
        case LatentAttentionSpec():
            for name, width in (
                ("kv_lora_rank", spec.kv_lora_rank),
                ("qk_rope_head_dim", spec.qk_rope_head_dim),
            ):
                if width < least or width & (width - 1):
                    return f"needs a power of two from {least} on for {name}, not {width}"
        case GroupedQueryAttentionSpec():
            width = max(spec.head_dim, spec.v_head_dim)
            if width > _MAX_HEAD_WIDTH:
                return f"needs heads at most {_MAX_HEAD_WIDTH} wide, not {width}"
            widths = spec.head_dim, spec.v_head_dim
            if fp8 and any(width % 2 for width in widths):
                return f"needs even head_dim and v_head_dim for an FP8 KV cache, not {widths}"
    return None

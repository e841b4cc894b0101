"""Attention by our Triton kernels, for 16-bit models on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mla_router.worker.engine.attention.layout import AtLocations, AttentionBackend, StepLayout
from mla_router.worker.engine.attention.prefill_passes import Pass, plan_passes
from mla_router.worker.engine.attention.supports import full_attention_reason, gpu_reason
from mla_router.worker.engine.upload import Upload
from mla_router.worker.kernels.attention.decode_schedule import DecodeSchedule, decode_schedule
from mla_router.worker.kernels.attention.decode_tiling import Tiling, gqa_tiling, num_parts, tiling
from mla_router.worker.kernels.attention.gqa_decode import gqa_decode, gqa_decode_triton
from mla_router.worker.kernels.attention.merge_states import merge_states
from mla_router.worker.kernels.attention.mla_decode import mla_decode, mla_decode_triton
from mla_router.worker.kernels.attention.mla_prefill import mla_prefill
from mla_router.worker.kernels.attention.ragged_attention import ragged_attention
from mla_router.worker.kernels.attention.ragged_attention.tiling import block_queries
from mla_router.worker.kernels.attention.shared_prefixes import (
    GROUP,
    SharedPrefixes,
    shared_prefixes,
)
from mla_router.worker.kernels.attention.tree_tail import one_part_each
from mla_router.worker.kernels.device import limits
from mla_router.worker.kernels.kv_cache.fp8 import UNSCALED, KVScales, is_fp8
from mla_router.worker.kernels.kv_cache.gather import kv_gather, kv_take
from mla_router.worker.kernels.kv_cache.gqa_rows import columns_of_keys, keys_and_values
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

# Returns the tiling and the number of parts of decode attention, for a number of requests and of queries of each.
Tiles = Callable[[int, int], tuple[Tiling, int]]
# Prefill attention of one pass: takes q, kv, k_pe, the pass, the scale and the output tensor, if there is one; returns
# the output and the log-sum-exps as `kernels/attention/mla_prefill.py`.
AttendOver = Callable[[Tensor, Tensor, Tensor, Pass, float, Tensor | None], tuple[Tensor, Tensor]]


def attend_over(
    q: Tensor, kv: Tensor, k_pe: Tensor, over: Pass, scale: float, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Implements `AttendOver` by our own kernel."""
    return mla_prefill(q, kv, k_pe, over.work, scale=scale, out=out)


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
        self._tiles = _decode_tiles(spec, device, fp8=is_fp8(kv_cache_dtype))
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


def _decode_tiles(spec: AttentionSpec, device: torch.device, *, fp8: bool) -> Tiles:
    heads = spec.num_heads
    if isinstance(spec, GroupedQueryAttentionSpec):
        share = heads // spec.num_kv_heads
        width = spec.head_dim + spec.v_head_dim
        chosen = gqa_tiling(
            share,
            width,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            fp8=fp8,
            on=limits(device),
        )
        parts = num_parts(chosen, heads, 1, device, num_kv_heads=spec.num_kv_heads)

        def of_nodes(requests: int, queries: int) -> tuple[Tiling, int]:
            del requests
            if queries == 1:
                return chosen, parts
            tiles = gqa_tiling(
                share * queries, width, head_dim=spec.head_dim, fp8=fp8, on=limits(device)
            )
            return tiles, num_parts(tiles, heads, queries, device, num_kv_heads=spec.num_kv_heads)

        return of_nodes
    assert isinstance(spec, LatentAttentionSpec), f"attention {type(spec)}"
    widths = spec.kv_lora_rank, spec.qk_rope_head_dim

    def tiles(requests: int, queries: int) -> tuple[Tiling, int]:
        chosen = tiling(heads, requests, queries, widths=widths, fp8=fp8, on=limits(device))
        return chosen, num_parts(chosen, heads, queries, device)

    return tiles


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


class TritonAttention:
    """Implements `StepAttention`. `layout` has one decode row for each row of `schedule`."""

    def __init__(
        self,
        layout: StepLayout,
        spec: AttentionSpec,
        schedule: DecodeSchedule | None,
        passes: list[Pass],
        prefixes: SharedPrefixes | None = None,
        attend: AttendOver = attend_over,
    ) -> None:
        self.layout = layout
        self._spec = spec
        self.schedule = schedule
        self.passes = passes
        self.prefixes = prefixes
        self._attend = attend

    def mla_decode(
        self, q_latent: Tensor, q_pe: Tensor, cache: Tensor, *, scales: KVScales = UNSCALED
    ) -> Tensor:
        layout = self.layout
        assert self.schedule is not None, "a step without decode rows"
        if layout.tree is not None:
            return mla_decode_triton(
                q_latent,
                q_pe,
                cache,
                layout.page_table,
                layout.decode_slots,
                layout.decode_lengths,
                self.schedule,
                scale=self._spec.scale,
                settled=True,
                kv_scale=scales.keys,
                tail=layout.tree,
            )
        return mla_decode(
            q_latent,
            q_pe,
            cache,
            layout.page_table,
            layout.decode_slots,
            layout.decode_lengths,
            self.schedule,
            scale=self._spec.scale,
            queries=layout.queries_per_slot,
            settled=True,
            prefixes=self.prefixes,
            kv_scale=scales.keys,
        )

    def mla_prefill(
        self,
        q: Tensor,
        own: Tensor,
        cache: Tensor,
        expand: Callable[[Tensor], Tensor],
        out: Tensor,
        *,
        kv_lora_rank: int,
        scales: KVScales = UNSCALED,
    ) -> None:
        def attend(over: Pass, into: Tensor | None) -> tuple[Tensor, Tensor]:
            rows = self._latents(own, cache, over, scales)
            latent, k_pe = rows.tensor_split([kv_lora_rank], dim=-1)
            return self._attend(q, expand(latent), k_pe, over, self._spec.scale, into)

        self._in_passes(attend, out)

    def gqa_decode(
        self, q: Tensor, cache: Tensor, out: Tensor, *, scales: KVScales = UNSCALED
    ) -> None:
        layout = self.layout
        assert self.schedule is not None, "a step without decode rows"
        if layout.tree is not None:
            gqa_decode_triton(
                q,
                cache,
                layout.page_table,
                layout.decode_slots,
                layout.decode_lengths,
                self.schedule,
                out,
                scale=self._spec.scale,
                scales=scales,
                tail=layout.tree,
            )
            return
        gqa_decode(
            q,
            cache,
            layout.page_table,
            layout.decode_slots,
            layout.decode_lengths,
            self.schedule,
            out,
            scale=self._spec.scale,
            scales=scales,
            softcap=self._spec.softcap,
        )

    def gqa_prefill(
        self, q: Tensor, cache: Tensor, out: Tensor, *, scales: KVScales = UNSCALED
    ) -> None:
        value_column = columns_of_keys(cache.shape[-1], q.shape[-1], out.shape[-1])

        def attend(over: Pass, into: Tensor | None) -> tuple[Tensor, Tensor]:
            rows = self._rows(cache, over, q.dtype, scales, value_column)
            k, v = keys_and_values(rows, q.shape[-1], out.shape[-1])
            spec = self._spec
            return ragged_attention(
                q, k, v, None, over.work, scale=spec.scale, out=into, softcap=spec.softcap
            )

        self._in_passes(attend, out)

    def _in_passes(
        self, attend: Callable[[Pass, Tensor | None], tuple[Tensor, Tensor]], out: Tensor
    ) -> None:
        """Runs all passes and merges their results in `out`. `attend` returns the result of a pass, in the given tensor
        if there is one, and its log-sum-exps."""
        first, *others = self.passes
        _, lse = attend(first, out)
        for over in others:
            merge_states(out, lse, *attend(over, None))

    def _latents(self, own: Tensor, cache: Tensor, over: Pass, scales: KVScales) -> Tensor:
        """Returns the latents of the keys of a pass, in the dtype of `own`: those of the step's rows."""
        return self._rows(cache, over, own.dtype, KVScales(scales.keys, scales.keys), 0)

    def _rows(
        self, cache: Tensor, over: Pass, dtype: torch.dtype, scales: KVScales, value_column: int
    ) -> Tensor:
        """Returns the KV cache rows of the keys of a pass, in `dtype`."""
        work = over.work
        return kv_gather(
            cache,
            self.layout.page_table,
            over.slots,
            over.first_rows,
            work.key_starts,
            work.num_keys,
            dtype=dtype,
            scales=scales,
            value_column=value_column,
        )


class PrefillGraphAttention(TritonAttention):
    """Attention of one prompt without a cached prefix: its keys are its own rows, at `locations` in the KV cache."""

    def __init__(
        self, layout: StepLayout, spec: AttentionSpec, passes: list[Pass], locations: Tensor
    ) -> None:
        super().__init__(layout, spec, None, passes)
        self._locations = locations

    def _latents(self, own: Tensor, cache: Tensor, over: Pass, scales: KVScales) -> Tensor:
        del cache, scales  # `own` has the numbers that the cache has (`rope_kv_write`, in_place)
        assert over.work.num_keys == len(own), f"{over.work.num_keys} keys, {len(own)} rows"
        return own

    def _rows(
        self, cache: Tensor, over: Pass, dtype: torch.dtype, scales: KVScales, value_column: int
    ) -> Tensor:
        assert over.work.num_keys == len(self._locations), (
            f"{over.work.num_keys} keys, {len(self._locations)} locations"
        )
        return kv_take(
            cache, self._locations, dtype=dtype, scales=scales, value_column=value_column
        )

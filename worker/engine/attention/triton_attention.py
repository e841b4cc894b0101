"""The attention of one step by our Triton kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mla_router.worker.engine.attention.layout import StepLayout
from mla_router.worker.engine.attention.prefill_passes import Pass
from mla_router.worker.kernels.attention.decode_schedule import DecodeSchedule
from mla_router.worker.kernels.attention.gqa_decode import gqa_decode, gqa_decode_triton
from mla_router.worker.kernels.attention.merge_states import merge_states
from mla_router.worker.kernels.attention.mla_decode import mla_decode, mla_decode_triton
from mla_router.worker.kernels.attention.mla_prefill import mla_prefill
from mla_router.worker.kernels.attention.ragged_attention import ragged_attention
from mla_router.worker.kernels.attention.shared_prefixes import SharedPrefixes
from mla_router.worker.kernels.kv_cache.fp8 import UNSCALED, KVScales
from mla_router.worker.kernels.kv_cache.gather import kv_gather, kv_take
from mla_router.worker.kernels.kv_cache.gqa_rows import columns_of_keys, keys_and_values
from mla_router.worker.model.config.attention_spec import AttentionSpec

# Prefill attention of one pass: takes q, kv, k_pe, the pass, the scale and the output tensor, if there is one; returns
# the output and the log-sum-exps as `kernels/attention/mla_prefill.py`.
AttendOver = Callable[[Tensor, Tensor, Tensor, Pass, float, Tensor | None], tuple[Tensor, Tensor]]


def attend_over(
    q: Tensor, kv: Tensor, k_pe: Tensor, over: Pass, scale: float, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Implements `AttendOver` by our own kernel."""
    return mla_prefill(q, kv, k_pe, over.work, scale=scale, out=out)


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
                settled=True,
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
            settled=True,
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
        """Returns the latents of the keys of a pass, in the dtype of `own`: the latents of the step's rows, with the values
        of the cache (`rope_kv_write`, in_place)."""
        if over.has_own_keys:
            return own
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

    def _rows(
        self, cache: Tensor, over: Pass, dtype: torch.dtype, scales: KVScales, value_column: int
    ) -> Tensor:
        assert over.work.num_keys == len(self._locations), (
            f"{over.work.num_keys} keys, {len(self._locations)} locations"
        )
        return kv_take(
            cache, self._locations, dtype=dtype, scales=scales, value_column=value_column
        )

"""Attention in torch operations, for CPUs and as the reference of the other backends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mla_router.worker.engine.attention.layout import AttentionBackend, StepLayout
from mla_router.worker.engine.attention.supports import full_attention_reason
from mla_router.worker.kernels.attention.gqa_decode import gqa_decode_torch
from mla_router.worker.kernels.attention.gqa_tree_decode import gqa_tree_decode_torch
from mla_router.worker.kernels.attention.mla_decode import mla_decode_torch
from mla_router.worker.kernels.attention.mla_tree_decode import mla_tree_decode_torch
from mla_router.worker.kernels.attention.ragged_attention.torch import ragged_attention_torch
from mla_router.worker.kernels.kv_cache.fp8 import UNSCALED, KVScales, from_cache
from mla_router.worker.kernels.kv_cache.gqa_rows import keys_and_values
from mla_router.worker.kernels.kv_cache.read import kv_read
from mla_router.worker.model.config.attention_spec import AttentionSpec, GroupedQueryAttentionSpec


class TorchBackend(AttentionBackend):
    name = "torch"
    supports_decode_graph = False  # its work depends on the longest request
    plans_prefill_on_host = True
    max_keys = 1 << 17  # no limit: only the profile run uses this number

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
    ) -> None:
        del device, dtype, kv_cache_dtype
        self._spec = spec

    @classmethod
    def supports(
        cls,
        spec: AttentionSpec,
        device: torch.device,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
    ) -> str | None:
        del device, dtype, kv_cache_dtype
        is_grouped = isinstance(spec, GroupedQueryAttentionSpec)
        return None if is_grouped else full_attention_reason(spec)

    def plan(self, layout: StepLayout) -> TorchAttention:
        spec = self._spec
        return TorchAttention(layout, spec.scale, window=spec.window, softcap=spec.softcap)


class TorchAttention:
    """Implements `StepAttention`."""

    def __init__(
        self,
        layout: StepLayout,
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        self.layout = layout
        self._scale = scale
        self._window = window
        self._softcap = softcap

    def mla_decode(
        self, q_latent: Tensor, q_pe: Tensor, cache: Tensor, *, scales: KVScales = UNSCALED
    ) -> Tensor:
        layout = self.layout
        if layout.tree is not None:
            return mla_tree_decode_torch(
                q_latent,
                q_pe,
                cache,
                layout.page_table,
                layout.decode_slots,
                layout.decode_lengths,
                layout.tree,
                max_length=layout.max_decode_length,
                scale=self._scale,
                kv_scale=scales.keys,
            )
        return mla_decode_torch(
            q_latent,
            q_pe,
            cache,
            layout.page_table,
            layout.decode_slots,
            layout.decode_lengths,
            max_length=layout.max_decode_length,
            scale=self._scale,
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
        del own
        rows = from_cache(self._rows(cache), q.dtype, scales.keys)
        latent, k_pe = rows.tensor_split([kv_lora_rank], dim=-1)
        k_nope, v = expand(latent).tensor_split([q.shape[-1] - k_pe.shape[-1]], dim=-1)
        ragged_attention_torch(q, k_nope, v, k_pe, self._extents(), scale=self._scale, out=out)

    def gqa_decode(
        self, q: Tensor, cache: Tensor, out: Tensor, *, scales: KVScales = UNSCALED
    ) -> None:
        layout = self.layout
        if layout.tree is not None:
            gqa_tree_decode_torch(
                q,
                cache,
                layout.page_table,
                layout.decode_slots,
                layout.decode_lengths,
                layout.tree,
                out,
                max_length=layout.max_decode_length,
                scale=self._scale,
                scales=scales,
            )
            return
        gqa_decode_torch(
            q,
            cache,
            layout.page_table,
            layout.decode_slots,
            layout.decode_lengths,
            out,
            max_length=layout.max_decode_length,
            scale=self._scale,
            scales=scales,
            window=self._window,
            softcap=self._softcap,
        )

    def gqa_prefill(
        self, q: Tensor, cache: Tensor, out: Tensor, *, scales: KVScales = UNSCALED
    ) -> None:
        k, v = keys_and_values(self._rows(cache), q.shape[-1], out.shape[-1])
        k, v = from_cache(k, q.dtype, scales.keys), from_cache(v, q.dtype, scales.values)
        ragged_attention_torch(
            q,
            k,
            v,
            None,
            self._extents(),
            scale=self._scale,
            out=out,
            window=self._window,
            softcap=self._softcap,
        )

    def _rows(self, cache: Tensor) -> Tensor:
        """Returns the KV cache rows of the tokens to which the chunks attend."""
        window = self._window
        requests = [(c.slot, c.first_key(window), c.end) for c in self.layout.chunks]
        return kv_read(cache, self.layout.page_table, requests)

    def _extents(self) -> list[tuple[int, int]]:
        """Returns the numbers of query rows and of key rows of each chunk."""
        window = self._window
        return [(c.length, c.end - c.first_key(window)) for c in self.layout.chunks]

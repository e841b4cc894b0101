"""MLA prefill by FlashInfer's kernel for Hopper (`fa3`), and all other attention by our kernels.

FlashInfer's kernel needs concatenated keys, which ours does not, but it is faster for many heads. `flashinfer_mla.py` has
its decode kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mla_router.worker.engine.attention.flashinfer_package import (
    flashinfer_class,
    loading,
    package_reason,
)
from mla_router.worker.engine.attention.layout import AttentionBackend, StepLayout
from mla_router.worker.engine.attention.prefill_passes import Pass
from mla_router.worker.engine.attention.triton import TritonBackend
from mla_router.worker.engine.attention.triton_attention import TritonAttention
from mla_router.worker.model.config.attention_spec import AttentionSpec, LatentAttentionSpec

_WRAPPER = "flashinfer.BatchPrefillWithRaggedKVCacheWrapper"
# Of keys and of values: the kernel supports only these, which are DeepSeek's
HEAD_WIDTHS = (192, 128)
# FlashInfer requires it for split keys, which `fa3` does not have.
_WORKSPACE_BYTES = 16 << 20


class FlashInferBackend(AttentionBackend):
    name = "flashinfer"
    supports_decode_graph = True
    plans_prefill_on_host = True

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
    ) -> None:
        """Loads the kernel, or compiles it at its first use on this machine. `spec` must be supported."""
        # For all attention but prefill
        self.ours = TritonBackend(spec, device, dtype, kv_cache_dtype)
        self._wrappers = RaggedWrappers(spec.num_heads, dtype, device)
        with loading("prefill"):
            self._wrappers.planned(0, [(1, 1)], causal=True, scale=1.0)

    @classmethod
    def supports(
        cls,
        spec: AttentionSpec,
        device: torch.device,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
    ) -> str | None:
        if reason := TritonBackend.supports(spec, device, dtype, kv_cache_dtype):
            return reason
        if not isinstance(spec, LatentAttentionSpec):
            return "needs a KV cache of latents"
        widths = spec.head_dim, spec.v_head_dim
        if widths != HEAD_WIDTHS:
            return f"has kernels for heads {HEAD_WIDTHS} wide, not {widths}"
        return package_reason(_WRAPPER, device)

    @property
    def max_keys(self) -> int:
        return self.ours.max_keys

    def plan(self, layout: StepLayout) -> TritonAttention:
        self._wrappers.next_step()
        return self.ours.plan(layout, PlannedPasses(self._wrappers).attend_over)


class RaggedWrappers:
    """FlashInfer's wrappers for ragged prefill: one for each pass of a step, in two sets.

    A plan is written to pinned memory and copied to the device later. The two sets alternate: before the host plans
    step N, it has waited for the results of step N-2, so the plan that it overwrites has been copied.
    """

    def __init__(self, num_heads: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ImportError without the package."""
        self._make = flashinfer_class(_WRAPPER)
        self._num_heads = num_heads
        self._dtype = dtype
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._sets: tuple[list[Any], list[Any]] = ([], [])
        self._turn = 0

    def next_step(self) -> None:
        self._turn ^= 1

    def planned(
        self, index: int, extents: Sequence[tuple[int, int]], *, causal: bool, scale: float
    ) -> Any:
        """Returns the wrapper of pass `index` of this step, planned for chunks of (query rows, key rows)."""
        wrappers = self._sets[self._turn]
        if index == len(wrappers):
            wrappers.append(self._make(self._workspace, backend="fa3"))
        # On the host, because FlashInfer would wait for tensors on the device
        starts = torch.tensor([(0, 0), *extents], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        queries, keys = (starts[:, column].contiguous() for column in (0, 1))
        head_dim, v_head_dim = HEAD_WIDTHS
        wrappers[index].plan(
            queries,
            keys,
            self._num_heads,
            self._num_heads,
            head_dim,
            v_head_dim,
            causal=causal,
            sm_scale=scale,
            q_data_type=self._dtype,
        )
        return wrappers[index]


class PlannedPasses:
    """Prefill attention of one step. Its passes are planned in the first layer."""

    def __init__(self, wrappers: RaggedWrappers) -> None:
        self._wrappers = wrappers
        self._planned: dict[Pass, Any] = {}

    def attend_over(
        self, q: Tensor, kv: Tensor, k_pe: Tensor, over: Pass, scale: float, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if over not in self._planned:
            self._planned[over] = self._wrappers.planned(
                len(self._planned), over.work.extents, causal=over.work.causal, scale=scale
            )
        d = q.shape[-1] - k_pe.shape[-1]
        k = torch.cat((kv[..., :d], k_pe[:, None].expand(-1, kv.shape[1], -1)), dim=-1)
        attended, lse = self._planned[over].run(q, k, kv[..., d:], out=out, return_lse=True)
        return attended, lse  # log-sum-exp in base 2, as in our kernels

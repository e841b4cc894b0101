"""MLA decode by FlashInfer's kernel for Hopper (`fa3`), and prefill by another backend.

The kernel pads the heads of a request to 64 rows. With 64 heads and more it takes as long as ours (`docs/measured.md`).
The host plans the work of the kernel's programs from the lengths of each step, in 0.1 to 0.3 ms, during the previous
forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mla_router.worker.engine.attention.flashinfer_package import (
    flashinfer_class,
    loading,
    package_reason,
)
from mla_router.worker.engine.attention.layout import AtLocations, AttentionBackend, StepLayout
from mla_router.worker.engine.attention.supports import (
    full_attention_reason,
    gpu_reason,
    same_dtype_reason,
)
from mla_router.worker.engine.attention.torch import TorchAttention
from mla_router.worker.kernels.kv_cache.fp8 import UNSCALED, KVScales
from mla_router.worker.model.attention import StepAttention
from mla_router.worker.model.config.attention_spec import AttentionSpec, LatentAttentionSpec

FLAG = "--enable-flashinfer-mla"
_WRAPPER = "flashinfer.mla.BatchMLAPagedAttentionWrapper"
WIDTHS = (512, 64)  # of latents and rotary keys: the only ones of the kernel, and those of DeepSeek
# For partial results of split requests: two of 64 rows (512 16-bit values and a float32 each) for each of the 132
# multiprocessors of an H200 take 17 MB.
_WORKSPACE_BYTES = 32 << 20


class FlashInferMlaBackend(AttentionBackend):
    def __init__(
        self,
        prefill: AttentionBackend,
        spec: AttentionSpec,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Loads the kernel, or compiles it at its first use on this machine. `spec` must be supported."""
        self._prefill = prefill
        self._scale = spec.scale
        self._decode = PlannedDecode(spec.num_heads, spec.scale, dtype, device)
        with loading("decode"):
            self._decode.plan(torch.zeros(1, 1, dtype=torch.int32, device=device), 1, (0,), (1,))

    @classmethod
    def supports(
        cls,
        spec: AttentionSpec,
        device: torch.device,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
    ) -> str | None:
        reason = gpu_reason(device, dtype) or full_attention_reason(spec)
        if reason := reason or same_dtype_reason(dtype, kv_cache_dtype):
            return reason
        if not isinstance(spec, LatentAttentionSpec):
            return "needs a KV cache of latents"
        widths = spec.kv_lora_rank, spec.qk_rope_head_dim
        if widths != WIDTHS:
            return f"has a kernel for kv_lora_rank and qk_rope_head_dim {WIDTHS}, not {widths}"
        return package_reason(_WRAPPER, device)

    @property
    def name(self) -> str:
        return f"{self._prefill.name}+flashinfer_mla"

    @property
    def supports_decode_graph(self) -> bool:
        return self._prefill.supports_decode_graph

    @property
    def max_keys(self) -> int:
        return self._prefill.max_keys

    def prepare_decode(
        self, page_table: Tensor, page_size: int, slots: Sequence[int], lengths: Sequence[int]
    ) -> None:
        self._decode.plan(page_table, page_size, slots, lengths)

    def plan(self, layout: StepLayout) -> FlashInferMlaAttention:
        chunks_alone = replace(
            layout,
            decode_slots=layout.decode_slots[:0],
            decode_lengths=layout.decode_lengths[:0],
            max_decode_length=0,
        )
        return FlashInferMlaAttention(
            layout, self._scale, self._prefill.plan(chunks_alone), self._decode
        )

    @property
    def plans_prefill_on_host(self) -> bool:
        return self._prefill.plans_prefill_on_host

    def plan_prefill_graph(self, layout: StepLayout) -> AtLocations:
        return self._prefill.plan_prefill_graph(layout)


class PlannedDecode:
    """FlashInfer's wrapper for paged MLA decode, planned for each step.

    A plan is a list of integers at a fixed address in device memory. A launch has only this address, so a captured
    launch uses the latest plan. The plan is copied there asynchronously from pinned memory. Two pinned buffers
    alternate: before the host plans step N, it has waited for the results of step N-2, so the plan that it overwrites
    has been copied.
    """

    def __init__(
        self, num_heads: int, scale: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises ImportError without the package."""
        make = flashinfer_class(_WRAPPER)
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # Its option `use_cuda_graph` would fix the batch size, and copy data that only the host reads.
        self._wrapper = make(workspace, backend="fa3")
        pinned: Tensor = self._wrapper._pin_memory_int_workspace_buffer
        self._pinned = pinned, torch.empty_like(pinned, pin_memory=pinned.is_pinned())
        self._turn = 0
        self._num_heads, self._scale, self._dtype = num_heads, scale, dtype

    def plan(
        self, page_table: Tensor, page_size: int, slots: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Plans one query for each request in `slots`, with `lengths` tokens in the cache. Must not be captured."""
        assert page_table.is_contiguous() and len(slots) == len(lengths), (
            f"page_table {page_table.stride()}, {len(slots)} slots, {len(lengths)} lengths"
        )
        pages_per_slot = page_table.shape[1]
        assert page_table.numel() * page_size < 1 << 31, (
            f"rows of {tuple(page_table.shape)} pages of {page_size} are counted in 32 bits"
        )
        self._turn ^= 1
        self._wrapper._pin_memory_int_workspace_buffer = self._pinned[self._turn]
        # On the host, because FlashInfer would wait for tensors on the device. Its list of pages is the page table
        # itself: the pages of a request start at the request's row.
        self._wrapper.plan(
            torch.arange(len(slots) + 1, dtype=torch.int32),
            torch.tensor((*slots, 0), dtype=torch.int32) * pages_per_slot,
            page_table.view(-1),
            torch.tensor(lengths, dtype=torch.int32),
            self._num_heads,
            *WIDTHS,
            page_size,
            False,  # not causal: the query attends to its whole request
            self._scale,
            self._dtype,
            self._dtype,
        )

    def run(self, q_latent: Tensor, q_pe: Tensor, cache: Tensor) -> Tensor:
        """Computes MLA decode as `kernels/attention/mla_decode.py`, for the requests of the last plan."""
        latents, rotary_keys = cache.tensor_split([q_latent.shape[-1]], dim=-1)
        out: Tensor = self._wrapper.run(q_latent, q_pe, latents, rotary_keys)
        return out


class FlashInferMlaAttention(TorchAttention):
    """Implements `StepAttention`. Torch's operations do the attention with keys for each head."""

    def __init__(
        self, layout: StepLayout, scale: float, prefill: StepAttention, decode: PlannedDecode
    ) -> None:
        super().__init__(layout, scale)
        self._prefill = prefill
        self._decode = decode

    def mla_decode(
        self, q_latent: Tensor, q_pe: Tensor, cache: Tensor, *, scales: KVScales = UNSCALED
    ) -> Tensor:
        del scales  # the cache is not FP8
        return self._decode.run(q_latent, q_pe, cache)

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
        self._prefill.mla_prefill(
            q, own, cache, expand, out, kv_lora_rank=kv_lora_rank, scales=scales
        )

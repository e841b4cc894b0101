"""Attention by our own Triton kernels, for 16-bit models on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mla_router.worker.engine.attention.layout import AttentionBackend, StepLayout
from mla_router.worker.engine.attention.prefill_passes import Pass, plan_passes
from mla_router.worker.engine.attention.torch import TorchAttention
from mla_router.worker.engine.upload import Upload
from mla_router.worker.kernels.decode_schedule import DecodeSchedule, decode_schedule
from mla_router.worker.kernels.decode_tiling import num_parts, tiling
from mla_router.worker.kernels.kv_gather import kv_gather
from mla_router.worker.kernels.merge_states import merge_states
from mla_router.worker.kernels.mla_decode import mla_decode
from mla_router.worker.kernels.mla_prefill import mla_prefill

# Keys and values that exist at a time in prefill, in numbers: 1 GiB of 16 bits.
MAX_EXPANDED = 1 << 29


class TritonBackend(AttentionBackend):
    name = "triton"
    recordable = True

    def __init__(self, num_heads: int, head_width: int, device: torch.device) -> None:
        """`head_width`: numbers of key and value together that a token has in one head."""
        self.max_keys = MAX_EXPANDED // (num_heads * head_width)
        self._num_heads, self._device = num_heads, device
        self._upload = Upload(device)

    def plan(self, layout: StepLayout) -> TritonAttention:
        schedule, passes = None, []
        if len(layout.decode_slots):
            tiles = tiling(self._num_heads, len(layout.decode_slots))
            schedule = decode_schedule(
                layout.decode_lengths,
                max_length=layout.max_decode_length,
                tiling=tiles,
                num_parts=num_parts(tiles, self._num_heads, 1, self._device),
            )
        if layout.chunks:
            passes = plan_passes(layout.chunks, self.max_keys, self._upload)
        return TritonAttention(layout, schedule, passes)


class TritonAttention(TorchAttention):
    """Implements `StepAttention`; attention with keys of its own for each head is left to torch."""

    def __init__(
        self, layout: StepLayout, schedule: DecodeSchedule | None, passes: list[Pass]
    ) -> None:
        super().__init__(layout)
        self.schedule = schedule
        self.passes = passes

    def mla_decode(self, q_latent: Tensor, q_pe: Tensor, cache: Tensor, *, scale: float) -> Tensor:
        layout = self.layout
        assert self.schedule is not None, "a step without decode rows"
        return mla_decode(
            q_latent,
            q_pe,
            cache,
            layout.page_table,
            layout.decode_slots,
            layout.decode_lengths,
            self.schedule,
            scale=scale,
        )

    def mla_prefill(
        self,
        q: Tensor,
        cache: Tensor,
        expand: Callable[[Tensor], Tensor],
        *,
        kv_lora_rank: int,
        scale: float,
    ) -> Tensor:
        def expanded(over: Pass) -> tuple[Tensor, Tensor]:
            rows = kv_gather(
                cache,
                self.layout.page_table,
                over.slots,
                over.first_rows,
                over.work.key_starts,
                over.work.num_keys,
            )
            latent, k_pe = rows.tensor_split([kv_lora_rank], dim=-1)
            return expand(latent), k_pe

        first, *others = self.passes
        out, lse = self.attend(q, *expanded(first), first, scale)
        for over in others:
            merge_states(out, lse, *self.attend(q, *expanded(over), over, scale))
        return out

    def attend(
        self, q: Tensor, kv: Tensor, k_pe: Tensor, over: Pass, scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `kernels/mla_prefill.py`."""
        return mla_prefill(q, kv, k_pe, over.work, scale=scale, causal=over.causal)

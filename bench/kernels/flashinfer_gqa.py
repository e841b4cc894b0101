"""FlashInfer's grouped-query attention, for the benches beside ours. `window` is a number of keys, the query's own included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

WORKSPACE_BYTES = 256 << 20


def installed() -> bool:
    try:
        import flashinfer  # noqa: F401
    except ImportError:
        return False
    return True


def decode(
    q: Tensor,
    keys_and_values: Callable[[], tuple[Tensor, Tensor]],
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Callable[[], None], Callable[[], Tensor]]:
    """Returns FlashInfer's plan on the host, called once, and its run.

    Arguments: q [B, H, W]; keys and values of the next cache, each [P, page, G, W]; pages [B, N]; lengths [B].
    """
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    # Products on tensor cores: G heads of queries read the same keys.
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=True)
    batch, pages = page_table.shape
    (_, page_size, kv_heads, width), dtype = keys_and_values()[0].shape, q.dtype
    starts = torch.arange(batch + 1, dtype=torch.int32) * pages
    last_page_len = ((lengths - 1) % page_size + 1).int().cpu()

    def plan() -> None:
        wrapper.plan(
            starts,
            page_table.flatten(),
            last_page_len,
            q.shape[1],
            kv_heads,
            width,
            page_size,
            window_left=window - 1 if window else -1,
            logits_soft_cap=softcap,
            q_data_type=dtype,
            kv_data_type=dtype,
            sm_scale=scale,
        )

    plan()
    queries = q.contiguous()
    return plan, lambda: wrapper.run(queries, keys_and_values())


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extents: Sequence[tuple[int, int]],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Callable[[], Tensor]:
    """Returns FlashInfer's run. Arguments: q [Q, H, W], k [K, G, W], v [K, G, V], query and key rows of each chunk."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, backend="fa3")
    query_starts, key_starts = (
        torch.tensor([0, *accumulate(column)], dtype=torch.int32)
        for column in zip(*extents, strict=True)
    )
    wrapper.plan(
        query_starts,
        key_starts,
        q.shape[1],
        k.shape[1],
        q.shape[2],
        v.shape[2],
        causal=True,
        window_left=window - 1 if window else -1,
        logits_soft_cap=softcap,
        sm_scale=scale,
        q_data_type=q.dtype,
    )
    return lambda: wrapper.run(q, k, v)

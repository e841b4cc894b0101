"""Prefill attention in bfloat16 at the sizes of real models, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.attention.merge_states import merge_states
from mla_router.worker.kernels.attention.mla_prefill import mla_prefill
from mla_router.worker.kernels.attention.prefill_work import PrefillWork
from mla_router.worker.kernels.attention.ragged_attention import ragged_attention
from mla_router.worker.kernels.attention.ragged_attention.kernel import ragged_attention_triton
from mla_router.worker.kernels.kv_cache.gather import kv_gather, kv_gather_torch
from mla_router.worker.kernels.kv_cache.gqa_rows import keys_and_values
from support.cuda import captured, forbid_waiting

pytestmark = pytest.mark.gpu

NOPE, ROPE, VALUE = 128, 64, 128
SCALE = (NOPE + ROPE) ** -0.5
LONG = [(1024, 1024), (513, 3000), (64, 64), (1, 1), (1, 257)]
SHORT = [(64, 4160), (17, 1000), (1, 1)]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def in_float64(
    q: Tensor, k: Tensor, v: Tensor, extents: list[tuple[int, int]], scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Returns k and v with as many heads as q."""
    outs, sums = [], []
    queries, keys = (list(column) for column in zip(*extents, strict=True))
    parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    for own_q, own_k, own_v in parts:
        scores = torch.einsum("nhd,shd->hns", own_q.double(), own_k.double()) * scale
        if causal:
            n, s = scores.shape[1:]
            future = torch.ones(n, s, dtype=torch.bool, device=q.device).triu(s - n + 1)
            scores.masked_fill_(future, float("-inf"))
        outs.append(torch.einsum("hns,shv->nhv", scores.softmax(dim=-1), own_v.double()))
        sums.append(scores.logsumexp(dim=-1).T * math.log2(math.e))
    return torch.cat(outs), torch.cat(sums)


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Compares by the norm of the difference: numbers near 0 are rounding."""
    error = (got.double() - expected).norm() / expected.norm()
    assert error <= 5e-3, error


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("extents", [LONG, SHORT], ids=["long", "short"])
def test_mla(heads: int, causal: bool, extents: list[tuple[int, int]]) -> None:
    queries, keys = (sum(column) for column in zip(*extents, strict=True))
    q, kv = randn(queries, heads, NOPE + ROPE), randn(keys, heads, NOPE + VALUE)
    k_pe = randn(keys, 512 + ROPE)[:, 512:]
    work = PrefillWork.on("cuda", extents, heads=heads, causal=causal)
    with forbid_waiting():
        got, lse = mla_prefill(q, kv, k_pe, work, scale=SCALE)
    k = torch.cat((kv[..., :NOPE], k_pe[:, None].expand(-1, heads, -1)), dim=-1)
    expected, expected_lse = in_float64(q, k, kv[..., NOPE:], extents, SCALE, causal=causal)
    assert_close(got, expected)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("extents", [LONG, SHORT], ids=["long", "short"])
@pytest.mark.parametrize(
    ("heads", "groups", "width", "v_head_dim"),
    [
        (32, 8, 128, 128),
        (32, 8, 64, 64),
        (16, 8, 256, 256),
        (16, 16, NOPE + ROPE, VALUE),
        (6, 3, 96, 96),
        (6, 3, 100, 100),
    ],
)
def test_gqa(
    heads: int, groups: int, width: int, v_head_dim: int, extents: list[tuple[int, int]]
) -> None:
    """Keys and values are views of cache rows."""
    queries, keys = (sum(column) for column in zip(*extents, strict=True))
    q, rows = randn(queries, heads, width), randn(keys, groups * (width + v_head_dim))
    k, v = keys_and_values(rows, width, v_head_dim)
    work, scale = PrefillWork.on("cuda", extents, heads=heads), width**-0.5
    got, _ = ragged_attention(q, k, v, None, work, scale=scale)
    every_k, every_v = (part.repeat_interleave(heads // groups, dim=1) for part in (k, v))
    expected, _ = in_float64(q, every_k, every_v, extents, scale, causal=True)
    assert_close(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "widths",
    [
        (64, 0, 64),
        (128, 0, 128),
        (192, 0, 128),
        (128, 64, 64),
        (256, 0, 256),
        (256, 0, 128),
        (128, 128, 256),
    ],
    ids=str,
)
def test_tall_blocks(widths: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Shared KV heads, and a shared part of keys: the kernel of `hopper.py` and that of `kernel.py`."""
    own, shared, value = widths
    heads, groups = 48, 12
    queries, keys = (sum(column) for column in zip(*LONG, strict=True))
    q = randn(queries, heads, own + shared).to(dtype)
    kv = randn(keys, groups, own + value).to(dtype)
    k_pe = randn(keys, 512 + shared)[:, 512:].to(dtype) if shared else None
    work = PrefillWork.on("cuda", LONG, heads=heads)
    k = kv[..., :own]
    with forbid_waiting():
        got, lse = ragged_attention(q, k, kv[..., own:], k_pe, work, scale=SCALE)
    other, other_lse = ragged_attention_triton(q, k, kv[..., own:], k_pe, work, scale=SCALE)
    if k_pe is not None:
        k = torch.cat((k, k_pe[:, None].expand(-1, groups, -1)), dim=-1)
    every_k, every_v = (x.repeat_interleave(heads // groups, dim=1) for x in (k, kv[..., own:]))
    expected, expected_lse = in_float64(q, every_k, every_v, LONG, SCALE, causal=True)
    for out, sums in ((got, lse), (other, other_lse)):
        assert_close(out, expected)
        torch.testing.assert_close(sums.double(), expected_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("causal", [True, False])
def test_nan_of_one_chunk_does_not_reach_another(causal: bool) -> None:
    extents = [(200, 300), (130, 500), (300, 333)]
    q, kv, k_pe = randn(630, 48, NOPE + ROPE), randn(1133, 48, NOPE + VALUE), randn(1133, ROPE)
    work = PrefillWork.on("cuda", extents, heads=48, causal=causal)
    before, _ = mla_prefill(q, kv, k_pe, work, scale=SCALE)
    kv[300:800], k_pe[300:800] = float("nan"), float("inf")
    after, _ = mla_prefill(q, kv, k_pe, work, scale=SCALE)
    assert after[200:330].isnan().all()
    assert torch.equal(after[:200], before[:200]) and torch.equal(after[330:], before[330:])


def test_a_chunk_without_keys() -> None:
    """Some chunks have no rows of the prefix in a pass."""
    extents = [(150, 40), (200, 0), (170, 128)]
    q, kv, k_pe = randn(520, 48, NOPE + ROPE), randn(168, 48, NOPE + VALUE), randn(168, ROPE)
    work = PrefillWork.on("cuda", extents, heads=48, causal=False)
    got, lse = mla_prefill(q, kv, k_pe, work, scale=SCALE)
    assert (got[150:350] == 0).all() and (lse[150:350] == float("-inf")).all()
    assert got.isfinite().all() and lse[:150].isfinite().all() and lse[350:].isfinite().all()


def test_replayed() -> None:
    """A captured launch reads its tables: with other chunks in the same buffers it computes these."""
    work = PrefillWork.on("cuda", [(512, 512), (512, 512)], heads=16)
    q, kv, k_pe = randn(1024, 16, NOPE + ROPE), randn(1024, 16, NOPE + VALUE), randn(1024, ROPE)
    replay, (out, _) = captured(lambda: mla_prefill(q, kv, k_pe, work, scale=SCALE))
    replay()
    k = torch.cat((kv[..., :NOPE], k_pe[:, None].expand(-1, 16, -1)), dim=-1)
    halves, _ = in_float64(q, k, kv[..., NOPE:], [(512, 512)] * 2, SCALE, causal=True)
    assert_close(out, halves)
    other = PrefillWork.on("cuda", [(256, 256), (768, 768)], heads=16)
    assert other.query_blocks.shape == work.query_blocks.shape
    for old, new in (
        (work.key_starts, other.key_starts),
        (work.query_blocks, other.query_blocks),
    ):
        old.copy_(new)
    replay()
    expected, _ = in_float64(q, k, kv[..., NOPE:], [(256, 256), (768, 768)], SCALE, causal=True)
    assert_close(out, expected)


def test_prefix_in_pieces() -> None:
    """Attention to own tokens and to the prefix in two passes, merged, is attention to all at once."""
    n, prefix, heads = 300, 5000, 16
    q, kv = randn(n, heads, NOPE + ROPE), randn(prefix + n, heads, NOPE + VALUE)
    k_pe = randn(prefix + n, ROPE)
    whole, whole_lse = mla_prefill(
        q, kv, k_pe, PrefillWork.on("cuda", [(n, prefix + n)], heads=heads), scale=SCALE
    )
    out, lse = mla_prefill(
        q, kv[prefix:], k_pe[prefix:], PrefillWork.on("cuda", [(n, n)], heads=heads), scale=SCALE
    )
    for keys in (slice(0, 4096), slice(4096, prefix)):
        work = PrefillWork.on("cuda", [(n, keys.stop - keys.start)], heads=heads, causal=False)
        piece, piece_lse = mla_prefill(q, kv[keys], k_pe[keys], work, scale=SCALE)
        merge_states(out, lse, piece, piece_lse)
    assert_close(out, whole.double())
    torch.testing.assert_close(lse, whole_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("width", [576, 16 * (192 + 128)])
def test_kv_gather(width: int) -> None:
    cache = randn(301, 64, width)
    table = (torch.randperm(300, device="cuda").int() + 1).view(3, 100)
    slots = torch.tensor([2, 0], device="cuda")
    first = torch.tensor([0, 70], dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, 5000, 5123], dtype=torch.int32, device="cuda")
    with forbid_waiting():
        got = kv_gather(cache, table, slots, first, starts, 5123)
    assert torch.equal(got, kv_gather_torch(cache, table, slots, first, starts, 5123))

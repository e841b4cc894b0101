"""Products with quantized W_UK and W_UV in bfloat16 at the shapes of V2-Lite and V3."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.attention.absorb import (
    absorb_queries,
    absorb_queries_torch,
    absorb_queries_triton,
    expand_values,
    expand_values_torch,
    expand_values_triton,
)
from mla_router.worker.kernels.attention.absorb_quantized import StaticFP8, takes_heads
from mla_router.worker.kernels.weight import Weight
from support.cuda import captured, forbid_waiting
from support.quantized import drawn_weight, numbers, relative_error

pytestmark = pytest.mark.gpu

FP8, INT8 = torch.float8_e4m3fn, torch.int8
STATIC = [StaticFP8(torch.float8_e4m3fn, 0.5), StaticFP8(torch.float8_e5m2)]
ROUNDED = 3e-3  # by results in bfloat16


def drawn(heads: int, dtype: torch.dtype, block: tuple[int, int]) -> list[Weight]:
    weight = drawn_weight(heads * 256, 512, dtype=dtype, block=block, device="cuda")
    assert takes_heads(weight, torch.bfloat16, rows=(128, 128))
    return weight.split_heads((128, 128))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("tokens", [1, 8, 32, 33, 130, 300])
@pytest.mark.parametrize(("dtype", "block"), [(FP8, (128, 128)), (FP8, (1, 512)), (INT8, (1, 512))])
@pytest.mark.parametrize("fp8", [None, *STATIC])
def test_float64(
    tokens: int, heads: int, dtype: torch.dtype, block: tuple[int, int], fp8: StaticFP8 | None
) -> None:
    if fp8 is not None and dtype != FP8:
        pytest.skip("int8 has no static FP8 form")
    w_uk, w_uv = drawn(heads, dtype, block)
    draw = torch.Generator("cuda").manual_seed(tokens)
    q = torch.randn(tokens, heads, 192, generator=draw, device="cuda").bfloat16()[..., :128]
    latent = torch.randn(tokens, heads, 512, generator=draw, device="cuda").bfloat16()
    out = q.new_empty(tokens, heads, 128)
    with forbid_waiting():
        absorbed = absorb_queries(q, w_uk, fp8)
        expand_values(latent, w_uv, out, fp8)
    if fp8 is None:
        expected = torch.einsum("thd,hdc->thc", q.double(), numbers(w_uk))
        expected_out = torch.einsum("thc,hvc->thv", latent.double(), numbers(w_uv))
    else:
        expected = absorb_queries_torch(q.float(), w_uk, fp8)
        expected_out = latent.new_empty(tokens, heads, 128, dtype=torch.float32)
        expand_values_torch(latent.float(), w_uv, expected_out, fp8)
    assert relative_error(absorbed, expected) < ROUNDED
    assert relative_error(out, expected_out) < ROUNDED


@pytest.mark.parametrize("tokens", [1, 64])
def test_sums_of_fp8_are_promoted(tokens: int) -> None:
    """All products are positive and equal: sums of few bits stop growing."""
    values = torch.full((16, 128, 512), 1.125, device="cuda").to(FP8)
    weight = Weight(values, torch.ones(16, 1, 4, device="cuda"), (128, 128), constant=True)
    latent = torch.full((tokens, 16, 512), 1.125, dtype=torch.bfloat16, device="cuda")
    for fp8 in (None, *STATIC):
        out = torch.empty(tokens, 16, 128, dtype=torch.float32, device="cuda")
        expand_values_triton(latent, weight, out, fp8)
        rounded = 1.125 if fp8 is None or fp8.dtype == FP8 else 1.0
        assert relative_error(out, torch.full_like(out, 512 * 1.125 * rounded)) < 1e-3


def test_in_a_cuda_graph() -> None:
    """Kernels that load their weights before the wait, one after the other."""
    w_uk, w_uv = drawn(16, FP8, (128, 128))
    q = torch.randn(8, 16, 128, device="cuda").bfloat16()

    def chain() -> torch.Tensor:
        x = q
        for _ in range(6):
            out = torch.empty_like(q)
            expand_values_triton(absorb_queries_triton(x, w_uk), w_uv, out)
            x = out / out.abs().amax()
        return x

    expected = chain()
    replay, got = captured(chain)
    replay()
    assert torch.equal(got, expected)

"""rope_kv_write in bfloat16 at the shapes of V2-Lite and V3, against the torch function in float32 on
the CPU, which other tests compare with float64."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.kv_cache.rope_kv_write import rope_kv_write
from support.rope_write import Call, check_captured, check_float32, target

pytestmark = pytest.mark.gpu

NOPE, ROPE, LATENT = 128, 64, 512


def call(tokens: int, heads: int) -> Call:
    torch.manual_seed(tokens)
    width = heads * (NOPE + ROPE)
    joined = torch.randn(tokens, width + LATENT + ROPE, device="cuda").bfloat16()
    q, kv = torch.split(joined, [width, LATENT + ROPE], dim=-1)
    weight = torch.randn(LATENT, device="cuda").bfloat16()
    rest = target(tokens, ROPE, LATENT + ROPE)
    return Call(rope_kv_write, (q.view(tokens, heads, NOPE + ROPE), kv, weight, 1e-6, *rest))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("tokens", [0, 1, 33, 2048])
def test_float32(tokens: int, heads: int, interleaved: bool) -> None:
    # The normalised values are rounded twice
    check_float32(call(tokens, heads), interleaved=interleaved, cache_rtol=2**-7)


def test_in_place() -> None:
    q, kv, weight, eps, rotations, cache, out_cache_loc = call(33, 16).arguments
    rope_kv_write(
        q, kv, weight, eps, rotations, cache, out_cache_loc, interleaved=True, in_place=True
    )
    assert torch.equal(kv, cache.flatten(0, 1)[out_cache_loc])


def test_in_a_cuda_graph() -> None:
    check_captured(lambda: call(8, 16), interleaved=True)

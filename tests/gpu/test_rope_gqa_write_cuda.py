"""rope_gqa_write in bfloat16 at the shapes of Llama 3 8B and 3.2 1B, and of V2-Lite without absorption,
against the torch function in float32 on the CPU, which other tests compare with float64."""

from __future__ import annotations

import pytest
import torch

from mla_router.worker.kernels.kv_cache.rope_gqa_write import rope_gqa_write
from support.rope_write import Call, check_captured, check_float32, target

pytestmark = pytest.mark.gpu

# Heads, KV heads, plain and rotated part of keys, head_dim of values
SHAPES = [(32, 8, 0, 128, 128), (32, 8, 0, 64, 64), (16, 16, 128, 64, 128), (6, 3, 16, 8, 24)]


def call(tokens: int, shape: tuple[int, int, int, int, int]) -> Call:
    """Operands are views of one joined projection; all heads share a rotated part beside a plain one."""
    heads, kv_heads, plain, rope, v_head_dim = shape
    torch.manual_seed(tokens)
    shared = 1 if plain else kv_heads
    sizes = [heads * (plain + rope), kv_heads * plain, shared * rope, kv_heads * v_head_dim]
    joined = torch.randn(tokens, sum(sizes), device="cuda").bfloat16()
    q, k, k_pe, v = joined.split(sizes, dim=-1)
    arguments = (
        q.view(tokens, heads, -1),
        k.view(tokens, kv_heads, plain),
        k_pe.view(tokens, shared, rope).expand(-1, kv_heads, -1),
        v.view(tokens, kv_heads, v_head_dim),
        *target(tokens, rope, kv_heads * (plain + rope + v_head_dim)),
    )
    return Call(rope_gqa_write, arguments)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 33, 2048])
def test_float32(tokens: int, shape: tuple[int, int, int, int, int], interleaved: bool) -> None:
    check_float32(call(tokens, shape), interleaved=interleaved, cache_rtol=2**-8)


def test_in_a_cuda_graph() -> None:
    check_captured(lambda: call(8, SHAPES[0]), interleaved=False)

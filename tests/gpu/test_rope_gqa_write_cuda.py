"""rope_gqa_write in bfloat16 at the shapes of Llama 3 8B and 3.2 1B, and of V2-Lite with expanded keys,
against the torch function in float32 on the CPU, which its own tests compare with float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.kv_cache.rope_gqa_write import rope_gqa_write
from support.cuda import captured, forbid_waiting

pytestmark = pytest.mark.gpu

PAGE = 64
# Heads, key heads, plain and rotated part of keys, width of values
SHAPES = [(32, 8, 0, 128, 128), (32, 8, 0, 64, 64), (16, 16, 128, 64, 128), (6, 3, 16, 8, 24)]


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    k_pe: Tensor
    v: Tensor
    rotations: Tensor
    cache: Tensor
    locations: Tensor

    def run(self, *, interleaved: bool) -> None:
        rope_gqa_write(
            self.q,
            self.k,
            self.k_pe,
            self.v,
            self.rotations,
            self.cache,
            self.locations,
            interleaved=interleaved,
        )

    def in_float32(self) -> Inputs:
        wide = (x.cpu().float() for x in (self.q, self.k, self.k_pe, self.v))
        rest = (x.cpu() for x in (self.rotations, self.cache.float(), self.locations))
        return Inputs(*wide, *rest)


def inputs(tokens: int, shape: tuple[int, int, int, int, int]) -> Inputs:
    """Views of one joined projection; a rotated part beside a plain one is shared by all heads."""
    heads, groups, plain, rope, value_width = shape
    torch.manual_seed(tokens)
    shared = 1 if plain else groups
    sizes = [heads * (plain + rope), groups * plain, shared * rope, groups * value_width]
    joined = torch.randn(tokens, sum(sizes), device="cuda").bfloat16()
    q, k, k_pe, v = joined.split(sizes, dim=-1)
    angles = 6 * torch.rand(tokens, rope // 2, device="cuda")
    pages = tokens // PAGE + 2
    row = groups * (plain + rope + value_width)
    return Inputs(
        q.view(tokens, heads, -1),
        k.view(tokens, groups, plain),
        k_pe.view(tokens, shared, rope).expand(-1, groups, -1),
        v.view(tokens, groups, value_width),
        torch.polar(torch.ones_like(angles), angles),
        torch.zeros(pages, PAGE, row, device="cuda").bfloat16(),
        PAGE + torch.randperm((pages - 1) * PAGE, device="cuda")[:tokens],
    )


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 33, 2048])
def test_float32(tokens: int, shape: tuple[int, int, int, int, int], interleaved: bool) -> None:
    short = inputs(tokens, shape)
    wide = short.in_float32()
    with forbid_waiting():
        short.run(interleaved=interleaved)
    wide.run(interleaved=interleaved)
    torch.testing.assert_close(short.q.cpu().float(), wide.q, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(short.cache.cpu().float(), wide.cache, rtol=2**-8, atol=1e-5)


def test_in_a_cuda_graph() -> None:
    """Rows of padding all write to the first page."""
    own = inputs(8, SHAPES[0])
    own.locations[5:] = 0
    first = own.q.clone()
    replay, _ = captured(lambda: own.run(interleaved=False))
    own.q.copy_(first)
    own.cache.zero_()
    replay()
    expected = inputs(8, SHAPES[0])
    expected.run(interleaved=False)
    assert torch.equal(own.q, expected.q)
    rows = (x.cache.flatten(0, 1)[own.locations[:5]] for x in (own, expected))
    assert torch.equal(*rows)

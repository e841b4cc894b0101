"""rope_kv_write in bfloat16 at the shapes of V2-Lite and V3, against the torch function in float32 on
the CPU, which its own tests compare with float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.kv_cache.rope_kv_write import rope_kv_write
from support.cuda import captured, forbid_waiting

pytestmark = pytest.mark.gpu

NOPE, ROPE, LATENT, PAGE = 128, 64, 512, 64


@dataclass
class Inputs:
    q: Tensor
    kv: Tensor
    weight: Tensor
    rotations: Tensor
    cache: Tensor
    locations: Tensor

    def run(self, *, interleaved: bool) -> None:
        rope_kv_write(
            self.q,
            self.kv,
            self.weight,
            1e-6,
            self.rotations,
            self.cache,
            self.locations,
            interleaved=interleaved,
        )

    def in_float32(self) -> Inputs:
        wide = (x.cpu().float() for x in (self.q, self.kv, self.weight))
        rest = (x.cpu() for x in (self.rotations, self.cache.float(), self.locations))
        return Inputs(*wide, *rest)


def inputs(tokens: int, heads: int) -> Inputs:
    torch.manual_seed(tokens)
    width = heads * (NOPE + ROPE)
    joined = torch.randn(tokens, width + LATENT + ROPE, device="cuda").bfloat16()
    q, kv = torch.split(joined, [width, LATENT + ROPE], dim=-1)
    angles = 6 * torch.rand(tokens, ROPE // 2, device="cuda")
    pages = tokens // PAGE + 2
    return Inputs(
        q.view(tokens, heads, NOPE + ROPE),
        kv,
        torch.randn(LATENT, device="cuda").bfloat16(),
        torch.polar(torch.ones_like(angles), angles),
        torch.zeros(pages, PAGE, LATENT + ROPE, device="cuda").bfloat16(),
        PAGE + torch.randperm((pages - 1) * PAGE, device="cuda")[:tokens],
    )


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("tokens", [0, 1, 33, 2048])
def test_float32(tokens: int, heads: int, interleaved: bool) -> None:
    short = inputs(tokens, heads)
    wide = short.in_float32()
    with forbid_waiting():
        short.run(interleaved=interleaved)
    wide.run(interleaved=interleaved)
    # One rounding of rotated values, two of the normalised ones
    torch.testing.assert_close(short.q.cpu().float(), wide.q, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(short.cache.cpu().float(), wide.cache, rtol=2**-7, atol=1e-5)


def test_in_a_cuda_graph() -> None:
    """Rows of padding all write to the first page."""
    own = inputs(8, 16)
    own.locations[5:] = 0
    first = own.q.clone()
    replay, _ = captured(lambda: own.run(interleaved=True))
    own.q.copy_(first)
    own.cache.zero_()
    replay()
    expected = inputs(8, 16)
    expected.run(interleaved=True)
    assert torch.equal(own.q, expected.q)
    rows = (x.cache.view(-1, LATENT + ROPE)[own.locations[:5]] for x in (own, expected))
    assert torch.equal(*rows)

"""rope_absorb in bfloat16 at the shapes of V2-Lite and V3."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.attention.absorb import absorb_queries
from mla_router.worker.kernels.attention.rope_absorb import rope_absorb
from mla_router.worker.kernels.kv_cache.rope_kv_write import rope_kv_write
from mla_router.worker.kernels.weight import Weight
from support.cuda import captured, forbid_waiting

pytestmark = pytest.mark.gpu

NOPE, ROPE, LATENT, PAGE = 128, 64, 512, 64


@dataclass
class Inputs:
    q: Tensor
    kv: Tensor
    norm_weight: Tensor
    rotations: Tensor
    cache: Tensor
    out_cache_loc: Tensor
    w_uk: Tensor

    @property
    def written(self) -> tuple[Tensor, Tensor, Tensor, float, Tensor, Tensor, Tensor]:
        return (
            self.q,
            self.kv,
            self.norm_weight,
            1e-6,
            self.rotations,
            self.cache,
            self.out_cache_loc,
        )

    def joined(self, *, interleaved: bool = True, constant: bool = True) -> Tensor:
        w_uk = Weight(self.w_uk, constant=constant)
        return rope_absorb(*self.written, w_uk, interleaved=interleaved)

    def apart(self, *, interleaved: bool = True, constant: bool = True) -> Tensor:
        rope_kv_write(*self.written, interleaved=interleaved)
        return absorb_queries(self.q[..., :NOPE], Weight(self.w_uk, constant=constant))

    def copy(self) -> Inputs:
        """Returns a copy of the tensors that are written."""
        return replace(self, q=self.q.clone(), cache=self.cache.clone())


def inputs(tokens: int, heads: int) -> Inputs:
    torch.manual_seed(tokens)
    width = heads * (NOPE + ROPE)
    joined = torch.randn(tokens, width + LATENT + ROPE, device="cuda").bfloat16()
    angles = 6 * torch.rand(tokens, ROPE // 2, device="cuda")
    both = (torch.randn(heads, 256, LATENT, device="cuda") / 16).bfloat16()
    return Inputs(
        joined[:, :width].view(tokens, heads, NOPE + ROPE),
        joined[:, width:],
        torch.randn(LATENT, device="cuda").bfloat16(),
        torch.polar(torch.ones_like(angles), angles),
        torch.zeros(4, PAGE, LATENT + ROPE, device="cuda").bfloat16(),
        PAGE + torch.randperm(3 * PAGE, device="cuda")[:tokens],
        both[:, :NOPE],
    )


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 32, 33, 70, 128, 129])
def test_as_the_two_kernels(tokens: int, constant: bool, heads: int, interleaved: bool) -> None:
    """Equal bit for bit, and close to float64. 33 tokens with many heads, and 129 tokens, take two kernels."""
    was = inputs(tokens, heads)
    own, other = was.copy(), was.copy()
    with forbid_waiting():
        got = own.joined(interleaved=interleaved, constant=constant)
    assert torch.equal(got, other.apart(interleaved=interleaved, constant=constant))
    assert torch.equal(own.q, other.q) and torch.equal(own.cache, other.cache)
    assert not torch.equal(own.q, was.q) and not torch.equal(own.cache, was.cache)
    expected = torch.einsum("thd,hdc->thc", was.q[..., :NOPE].double(), was.w_uk.double())
    assert (got.double() - expected).norm() / expected.norm() < 3e-3


def test_in_a_cuda_graph() -> None:
    """Ten kernels in a row, each of which starts while the one before still runs and rotates the queries once more.
    Padding rows all write to the first page."""
    own = inputs(8, 16)
    own.out_cache_loc[5:] = 0
    was = own.copy()

    def chain() -> list[Tensor]:
        return [own.joined() for _ in range(10)]

    replay, results = captured(chain)
    for _ in range(3):
        own.q.copy_(torch.randn_like(own.q))
        was.q.copy_(own.q)
        own.cache.zero_()
        replay()
        expected = [was.apart() for _ in range(10)]
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
        assert torch.equal(own.q, was.q)
        rows = (x.cache.view(-1, LATENT + ROPE)[own.out_cache_loc[:5]] for x in (own, was))
        assert torch.equal(*rows)

"""rope_absorb against the two kernels that it joins, bit for bit. They have tests of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.attention.absorb import absorb_queries_triton
from mla_router.worker.kernels.attention.rope_absorb import rope_absorb, rope_absorb_triton
from mla_router.worker.kernels.kv_cache.rope_kv_write import rope_kv_write_triton
from mla_router.worker.kernels.weight import Weight
from support.corners import corners
from support.sm90 import compile_sm90
from support.triton_device import DEVICE
from support.turned import turned

EPS = 1e-6
NOPE, LATENT, PAGE = 64, 128, 4


@dataclass
class Inputs:
    q: Tensor
    kv: Tensor
    norm_weight: Tensor
    angles: Tensor
    cache: Tensor
    out_cache_loc: Tensor
    w_uk: Tensor

    @property
    def written(self) -> tuple[Tensor, Tensor, Tensor, float, Tensor, Tensor, Tensor]:
        """The arguments of `rope_kv_write`."""
        rotations = torch.polar(torch.ones_like(self.angles), self.angles).to(torch.complex64)
        return (
            self.q,
            self.kv,
            self.norm_weight,
            EPS,
            rotations,
            self.cache,
            self.out_cache_loc,
        )

    def copy(self) -> Inputs:
        """Returns a copy of the tensors that are written."""
        return replace(self, q=self.q.clone(), cache=self.cache.clone())


def inputs(tokens: int, heads: int, pairs: int, dtype: torch.dtype) -> Inputs:
    """Returns views of one joined projection, half of another matrix, and a cache full of NaN."""
    draw = torch.Generator().manual_seed(tokens * 100 + heads)
    rope = 2 * pairs
    width = heads * (NOPE + rope)
    joined = torch.randn(tokens, width + LATENT + rope, generator=draw).to(DEVICE, dtype)
    both = (torch.randn(heads, NOPE + 32, LATENT, generator=draw) / 8).to(DEVICE, dtype)
    pages = tokens // PAGE + 2
    out_cache_loc = PAGE + torch.randperm((pages - 1) * PAGE, generator=draw)[:tokens]
    return Inputs(
        joined[:, :width].view(tokens, heads, NOPE + rope),
        joined[:, width:],
        torch.randn(LATENT, generator=draw).to(DEVICE, dtype),
        (6 * torch.rand(tokens, pairs, generator=draw, dtype=torch.float64)).to(DEVICE),
        torch.full((pages, PAGE, LATENT + rope), float("nan"), device=DEVICE, dtype=dtype),
        out_cache_loc.to(DEVICE),
        both[:, :NOPE],
    )


@pytest.mark.parametrize(
    ("sizes", "dtype", "interleaved"),
    corners(
        [(1, 1, 4), (5, 3, 3), (17, 20, 8), (70, 2, 4)],
        [torch.float16, torch.float32],
        [True, False],
    ),
)
def test_as_the_two_kernels(
    sizes: tuple[int, int, int], dtype: torch.dtype, interleaved: bool
) -> None:
    """Several programs of both kinds, and blocks of heads and tokens that are not full. `sizes` are tokens, heads and
    pairs of columns that are rotated."""
    tokens, heads, pairs = sizes
    apart, joined = (inputs(tokens, heads, pairs, dtype).copy() for _ in range(2))
    rope_kv_write_triton(*apart.written, interleaved=interleaved)
    expected = absorb_queries_triton(apart.q[..., :NOPE], Weight(apart.w_uk))
    w_uk = Weight(joined.w_uk)
    got = rope_absorb_triton(*joined.written, w_uk, interleaved=interleaved, settled=True)
    assert torch.equal(got, expected)
    ahead = inputs(tokens, heads, pairs, dtype).copy()
    w_uk = Weight(ahead.w_uk, constant=True)
    got = rope_absorb_triton(*ahead.written, w_uk, interleaved=interleaved)
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)  # summed in another order
    for own in (joined, ahead):
        assert torch.equal(own.q, apart.q)
        assert torch.equal(own.cache.nan_to_num(7.0), apart.cache.nan_to_num(7.0))
    assert joined.cache.isfinite().all(dim=-1).sum() == tokens


@pytest.mark.parametrize("op", [rope_absorb, rope_absorb_triton])
def test_formula(op: Callable[..., Tensor]) -> None:
    was = inputs(5, 3, 4, torch.float32)
    own = was.copy()
    got = op(*own.written, Weight(own.w_uk), interleaved=True)
    expected = torch.einsum("thd,hdc->thc", was.q[..., :NOPE].double(), was.w_uk.double())
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)
    q_pe = turned(was.q[..., NOPE:], was.angles, interleaved=True)
    torch.testing.assert_close(own.q[..., NOPE:].double(), q_pe, rtol=1e-5, atol=1e-5)
    k_pe = turned(was.kv[:, None, LATENT:], was.angles, interleaved=True)[:, 0]
    latent = was.kv[:, :LATENT].double()
    normed = latent / (latent.square().mean(-1, keepdim=True) + EPS).sqrt()
    row = torch.cat((normed * was.norm_weight.double(), k_pe), dim=-1)
    rows = own.cache.view(-1, own.cache.shape[-1])[own.out_cache_loc]
    torch.testing.assert_close(rows.double(), row, rtol=1e-5, atol=1e-5)


def test_an_error_names_unsupported_operands() -> None:
    """Overlapping parts of the queries."""
    own = inputs(2, 3, 4, torch.float32)
    with pytest.raises(AssertionError, match=r"q \(2, 3, 72\), w_uk \(3, 128, 128\)"):
        rope_absorb_triton(*own.written, Weight(own.w_uk.repeat(1, 2, 1)), interleaved=True)


def launches() -> None:
    """Launches V2-Lite's 16 heads and V3's 128, as views of a joined projection."""
    with torch.device("meta"):
        for heads in (16, 128):
            both = torch.empty(heads, 256, 512, dtype=torch.bfloat16)
            for tokens, settled in product((1, 8, 32, 128), (False, True)):
                joined = torch.empty(tokens, heads * 192 + 576, dtype=torch.bfloat16)
                q, kv = torch.split(joined, [heads * 192, 576], dim=-1)
                rope_absorb_triton(
                    q.view(tokens, heads, 192),
                    kv,
                    torch.empty(512, dtype=torch.bfloat16),
                    EPS,
                    torch.empty(tokens, 32, dtype=torch.complex64),
                    torch.empty(9, 64, 576, dtype=torch.bfloat16),
                    torch.empty(tokens, dtype=torch.int64),
                    Weight(both[:, :128], constant=True),
                    interleaved=True,
                    settled=settled,
                )


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
        assert report.starts_early, report
        most = 32 if report.constants["rope.H"] == 16 else 16
        ahead = report.constants["absorb.BLOCK_ROWS"] <= most or report.constants["SETTLED"]
        assert report.reads_ahead == ahead, report

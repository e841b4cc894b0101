"""Calls of `rope_kv_write` and `rope_gqa_write`, and checks of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from support.cuda import captured, forbid_waiting

PAGE = 64


@dataclass(frozen=True)
class Call:
    """A call: `arguments` begin with the queries and end with cache and out_cache_loc."""

    op: Callable[..., None]
    arguments: tuple[Tensor | float, ...]

    @property
    def written(self) -> tuple[Tensor, Tensor]:
        """The queries and the cache."""
        q, cache = self.arguments[0], self.arguments[-2]
        assert isinstance(q, Tensor) and isinstance(cache, Tensor)
        return q, cache

    def run(self, *, interleaved: bool) -> None:
        self.op(*self.arguments, interleaved=interleaved)

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Call:
        changed = (change(x) if isinstance(x, Tensor) else x for x in self.arguments)
        return Call(self.op, tuple(changed))


def target(tokens: int, rope: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rotations, an empty cache in bfloat16, and distinct locations behind its first page, on a GPU."""
    angles = 6 * torch.rand(tokens, rope // 2, device="cuda")
    pages = tokens // PAGE + 2
    return (
        torch.polar(torch.ones_like(angles), angles),
        torch.zeros(pages, PAGE, row, device="cuda").bfloat16(),
        PAGE + torch.randperm((pages - 1) * PAGE, device="cuda")[:tokens],
    )


def check_float32(short: Call, *, interleaved: bool, cache_rtol: float) -> None:
    """Checks that a call in bfloat16 on a GPU writes the same as in float32 on the CPU, up to one rounding of the
    queries."""
    wide = short.with_tensors(lambda x: x.cpu().float() if x.is_floating_point() else x.cpu())
    with forbid_waiting():
        short.run(interleaved=interleaved)
    wide.run(interleaved=interleaved)
    (q, cache), (wide_q, wide_cache) = short.written, wide.written
    torch.testing.assert_close(q.cpu().float(), wide_q, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(cache.cpu().float(), wide_cache, rtol=cache_rtol, atol=1e-5)


def check_captured(make: Callable[[], Call], *, interleaved: bool) -> None:
    """Checks a CUDA graph of 8 tokens, where the last three are padding and write to the first page. `make` returns
    the same call each time."""
    own, expected = make(), make()
    (q, cache), out_cache_loc = own.written, own.arguments[-1]
    assert isinstance(out_cache_loc, Tensor) and len(out_cache_loc) == 8
    out_cache_loc[5:] = 0
    first = q.clone()
    replay, _ = captured(partial(own.run, interleaved=interleaved))
    q.copy_(first)
    cache.zero_()
    replay()
    expected.run(interleaved=interleaved)
    assert torch.equal(q, expected.written[0])
    rows = (x.flatten(0, 1)[out_cache_loc[:5]] for x in (cache, expected.written[1]))
    assert torch.equal(*rows)

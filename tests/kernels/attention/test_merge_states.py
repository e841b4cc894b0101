"""merge_states: attention over two halves of the keys, merged, is attention over all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.attention.merge_states import (
    merge_states,
    merge_states_torch,
    merge_states_triton,
)
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

WAYS = [(merge_states_torch, "cpu"), (merge_states_triton, DEVICE)]
LN2 = torch.tensor(2.0).log().item()


def attended(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the result [N, H, V] and log-sum-exps [N, H] of scores [N, H, S] in base 2 and values [S, V]."""
    natural = scores.double() * LN2
    return natural.softmax(dim=-1) @ values.double(), natural.logsumexp(dim=-1) / LN2


@pytest.mark.parametrize(("merge", "device"), WAYS)
@pytest.mark.parametrize("cut", [1, 7, 19])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_formula(merge: Callable[..., None], device: str, cut: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(cut)
    scores = torch.randn(5, 7, 20, generator=draw) * 30  # the halves weigh very differently
    values = torch.randn(20, 24, generator=draw)
    expected, expected_lse = attended(scores, values)
    first, second = (
        [part.to(device) for part in attended(scores[..., keys], values[keys])]
        for keys in (slice(cut), slice(cut, None))
    )
    out, lse = first[0].to(dtype).contiguous(), first[1].float().contiguous()
    merge(out, lse, second[0].to(dtype), second[1].float())
    tolerance = 2e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("merge", "device"), WAYS)
def test_a_side_without_keys_adds_nothing_even_if_it_is_nan(
    merge: Callable[..., None], device: str
) -> None:
    nothing, nan = float("-inf"), float("nan")
    out = torch.tensor([[[nan, nan]], [[1.0, 2.0]], [[nan, nan]]], device=device)
    lse = torch.tensor([[nothing], [3.0], [nothing]], device=device)
    other = torch.tensor([[[5.0, 6.0]], [[nan, nan]], [[nan, nan]]], device=device)
    other_lse = torch.tensor([[4.0], [nothing], [nothing]], device=device)
    merge(out, lse, other, other_lse)
    assert out.flatten(1).tolist() == [[5.0, 6.0], [1.0, 2.0], [0.0, 0.0]]
    assert lse.flatten().tolist() == [4.0, 3.0, nothing]


def test_wrong_shapes_are_named() -> None:
    out, lse = torch.ones(2, 3, 4), torch.ones(2, 3)
    with pytest.raises(AssertionError, match=r"out \(2, 3, 4\).*other lse \(3, 2\)"):
        merge_states(out, lse, out, lse.T)


def launches() -> None:
    out = torch.empty(4096, 16, 128, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(4096, 16, device="meta")
    merge_states_triton(out, lse, out, lse)


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()

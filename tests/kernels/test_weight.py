"""Products of plain and of quantized operands, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_router.worker.kernels.attention.absorb import absorb_queries, expand_values
from mla_router.worker.kernels.linear import linear
from mla_router.worker.kernels.moe.experts import moe_experts
from mla_router.worker.kernels.moe.shared import SharedWeights
from mla_router.worker.kernels.norm_linear import norm_linear
from mla_router.worker.kernels.quantize import as_quantized, in_form, quantize_rows
from mla_router.worker.kernels.weight import PLAIN_ROWS, Quantized, RowForm, Weight

BLOCK = (4, 8)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized(*shape: int, seed: int = 0) -> tuple[Weight, Tensor]:
    """A weight of FP8 values with random scales, and its numbers in float64."""
    rows, columns = shape[-2:]
    values = drawn(*shape, seed=seed).to(torch.float8_e4m3fn)
    scales = 0.5 + torch.rand(*shape[:-2], -(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    exact = values.double()
    for row in range(rows):
        for column in range(columns):
            exact[..., row, column] *= scales[..., row // BLOCK[0], column // BLOCK[1]]
    return Weight(values, scales, BLOCK, constant=True), exact


def test_linear() -> None:
    x, bias = drawn(3, 20, seed=1), drawn(11, seed=2)
    weight, exact = quantized(11, 20)
    expected = x.double() @ exact.T + bias
    torch.testing.assert_close(linear(x, weight, bias).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        linear(x, Weight(exact.float()), bias).double(), expected, rtol=1e-5, atol=1e-5
    )


def test_norm_linear() -> None:
    x, scale = drawn(3, 20, seed=1), drawn(20, seed=2)
    weight, exact = quantized(11, 20)
    normed = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    got = norm_linear(x, None, scale, 1e-6, weight).product
    torch.testing.assert_close(
        got.double(), (normed * scale.double()) @ exact.T, rtol=1e-5, atol=1e-5
    )


def test_heads_of_joined_up_projections() -> None:
    """A head has 5 + 3 rows."""
    weight, exact = quantized(24, 16)
    by_head = exact.view(3, 8, 16)
    w_uk, w_uv = weight.dense(torch.float32).split_heads((5, 3))
    assert not w_uk.constant, "a kernel writes it"
    q, latent, out = drawn(2, 3, 5), drawn(2, 3, 16), torch.empty(2, 3, 3)
    expand_values(latent, w_uv, out)
    for got, equation, x, half in (
        (absorb_queries(q, w_uk), "thd,hdc->thc", q, by_head[:, :5]),
        (out, "thc,hvc->thv", latent, by_head[:, 5:]),
    ):
        expected = torch.einsum(equation, x.double(), half)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_heads_of_a_plain_weight_are_views() -> None:
    weight = Weight(drawn(24, 16), constant=True)
    w_uk, w_uv = weight.split_heads((5, 3))
    assert w_uk.constant and w_uv.constant
    assert w_uk.values.data_ptr() == weight.values.data_ptr()
    assert torch.equal(w_uv.values, weight.values.view(3, 8, 16)[:, 5:])


@pytest.mark.parametrize("is_quantized", [(True, True), (True, False), (False, True)])
def test_experts(is_quantized: tuple[bool, bool]) -> None:
    """Experts of 6 inputs and 5 intermediate numbers; one token has only one expert."""
    x = drawn(3, 6, seed=5)
    gate_up, exact_ups = quantized(4, 10, 6, seed=6)
    down, exact_downs = quantized(4, 6, 5, seed=7)
    if not is_quantized[0]:
        gate_up = Weight(exact_ups.float())
    if not is_quantized[1]:
        down = Weight(exact_downs.float())
    ids = torch.tensor([[0, 2], [2, 3], [1, -1]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.25], [1.0, 2.0], [0.75, 0.0]])
    shared, exact_shared = quantized(10, 6, seed=8)
    shared_down, exact_shared_down = quantized(6, 5, seed=9)

    def through(rows: Tensor, ups: Tensor, downs: Tensor) -> Tensor:
        gate, up = (rows @ ups.T).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up) @ downs.T

    expected = through(x.double(), exact_shared, exact_shared_down)
    for token in range(3):
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            if expert >= 0:
                row = x[token : token + 1].double()
                expected[token] += weight * through(row, exact_ups[expert], exact_downs[expert])[0]
    got = moe_experts(x, gate_up, down, weights, ids, SharedWeights(shared, shared_down))
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def test_quantized_activations() -> None:
    """Groups of 8 columns, the last of them cut off; with a plain and with a quantized weight."""
    values = drawn(3, 20, seed=1).to(torch.float8_e4m3fn)
    scales = 0.5 + torch.rand(3, 3)
    x = Quantized(values, scales, 8, torch.float32)
    exact = values.double() * scales.double().repeat_interleave(8, 1)[:, :20]
    weight, exact_weight = quantized(11, 20)
    for operand in (weight, Weight(exact_weight.float())):
        got = linear(x, operand)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact @ exact_weight.T, rtol=1e-5, atol=1e-5)


def test_form_for_several_products() -> None:
    """Both forms where products differ; of two quantized dtypes the second product quantizes plain rows."""
    fp8, int8 = (RowForm(False, dtype) for dtype in (torch.float8_e4m3fn, torch.int8))
    assert fp8 | fp8 == fp8 and PLAIN_ROWS | PLAIN_ROWS == PLAIN_ROWS
    assert fp8 | PLAIN_ROWS == PLAIN_ROWS | fp8 == RowForm(True, torch.float8_e4m3fn)
    assert fp8 | int8 == RowForm(True, torch.float8_e4m3fn)


def test_plain_rows_beside_quantized_ones() -> None:
    """A product without a kernel for quantized rows takes the plain ones."""
    plain = drawn(3, 256, seed=1)
    x = in_form(plain, RowForm(True, torch.float8_e4m3fn))
    assert isinstance(x, Quantized) and (x.shape, x.device) == (plain.shape, plain.device)
    weight = drawn(5, 256, seed=2)
    assert torch.equal(linear(x, Weight(weight)), linear(plain, Weight(weight)))
    assert as_quantized(x, torch.float8_e4m3fn) is x
    other, expected = as_quantized(x, torch.int8), quantize_rows(plain, torch.int8)
    assert torch.equal(other.values, expected.values) and torch.equal(other.scales, expected.scales)

"""ragged_attention against attention of each query alone, in float64; the Triton kernel is also compiled
at the shapes of real models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mla_router.worker.kernels.attention.mla_prefill import mla_prefill
from mla_router.worker.kernels.attention.prefill_work import PrefillWork, prefill_tables
from mla_router.worker.kernels.attention.ragged_attention import ragged_attention
from mla_router.worker.kernels.attention.ragged_attention.hopper import ragged_attention_hopper
from mla_router.worker.kernels.attention.ragged_attention.kernel import ragged_attention_triton
from mla_router.worker.kernels.attention.ragged_attention.tiling import Tiling, tiling
from mla_router.worker.kernels.attention.ragged_attention.torch import QUERY_BLOCK
from support.sm90 import compile_sm90
from support.triton_device import DEVICE

SCALE = 0.3
Extents = list[tuple[int, int]]


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    shared: Tensor | None


def drawn(
    extents: Extents,
    *,
    heads: int = 2,
    groups: int = 2,
    widths: tuple[int, int, int] = (6, 4, 5),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Inputs:
    """Strided as in the model: q in the middle of wider rows, keys and values halves of one tensor."""
    draw = torch.Generator().manual_seed(sum(n * 31 + s for n, s in extents))
    own, shared, value = widths
    queries, keys = (sum(column) for column in zip(*extents, strict=True))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype).to(device)

    q = randn(queries, heads * (own + shared) + 8)[:, : heads * (own + shared)]
    kv = randn(keys, groups, own + value)
    return Inputs(
        q.unflatten(1, (heads, own + shared)),
        kv[..., :own],
        kv[..., own:],
        randn(keys, shared + 3)[:, 3:] if shared else None,
    )


def one_by_one(
    inputs: Inputs,
    extents: Extents,
    *,
    causal: bool,
    window: int | None = None,
    gaps: Sequence[int] = (),
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    q, k, v = (tensor.double().cpu() for tensor in (inputs.q, inputs.k, inputs.v))
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64)
    first_query = first_key = 0
    for chunk, (queries, keys) in enumerate(extents):
        for i in range(queries):
            position = keys - queries + i if causal else keys + i
            if gaps:
                position += gaps[chunk]
            begin = max(position + 1 - window, 0) if window else 0
            end = min(position + 1, keys)
            seen = slice(first_key + begin, first_key + end)
            for head in range(q.shape[1] if begin < end else 0):
                group = head * k.shape[1] // q.shape[1]
                key = k[seen, group]
                if inputs.shared is not None:
                    key = torch.cat((key, inputs.shared.double().cpu()[seen]), dim=-1)
                scores = key @ q[first_query + i, head] * SCALE
                if softcap:
                    scores = softcap * (scores / softcap).tanh()
                out[first_query + i, head] = scores.softmax(dim=-1) @ v[seen, group]
                lse[first_query + i, head] = scores.exp().sum().log2()
        first_query += queries
        first_key += keys
    return out, lse


# Enough queries for tall blocks
MANY_HEADS = 200


def check(
    attend: Callable[..., tuple[Tensor, Tensor]],
    inputs: Inputs,
    extents: Extents,
    *,
    causal: bool = True,
    window: int | None = None,
    gaps: Sequence[int] = (),
    softcap: float | None = None,
    rtol: float = 1e-4,
) -> None:
    options: Any = {"causal": causal, "window": window, "gaps": gaps}
    work = PrefillWork.on(inputs.q.device, extents, heads=MANY_HEADS, **options)
    got, got_lse = attend(
        inputs.q, inputs.k, inputs.v, inputs.shared, work, scale=SCALE, softcap=softcap
    )
    expected, expected_lse = one_by_one(inputs, extents, softcap=softcap, **options)
    assert got.dtype == inputs.q.dtype
    torch.testing.assert_close(got.double().cpu(), expected, rtol=rtol, atol=rtol)
    torch.testing.assert_close(got_lse.double().cpu(), expected_lse, rtol=rtol, atol=rtol)


@given(
    chunks=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=3),
    groups=st.integers(1, 3),
    share=st.integers(1, 3),
    shared_width=st.sampled_from([0, 4]),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 30),
    gap=st.integers(0, 5),
    softcap=st.sampled_from([None, 0.5, 30.0]),
)
def test_formula(
    chunks: list[tuple[int, int]],
    groups: int,
    share: int,
    shared_width: int,
    causal: bool,
    window: int | None,
    gap: int,
    softcap: float | None,
) -> None:
    extents = [(n, prefix + n if causal else prefix) for n, prefix in chunks]
    widths = 6, shared_width, 5
    inputs = drawn(extents, heads=share * groups, groups=groups, widths=widths)
    gaps = [gap + i for i in range(len(chunks))] if window and not causal else []
    options: Any = {"causal": causal, "window": window, "gaps": gaps, "softcap": softcap}
    check(ragged_attention, inputs, extents, **options)


@pytest.mark.parametrize("window", [None, 100, 400])
def test_chunk_longer_than_a_query_block(window: int | None) -> None:
    extents = [(2 * QUERY_BLOCK + 17, 2 * QUERY_BLOCK + 40), (3, 3)]
    inputs = drawn(extents)
    check(ragged_attention, inputs, extents, window=window)


KERNEL_CASES = {
    # Tall blocks, a chunk of several blocks, a prefix that ends within a block of keys, a prefix of one token
    "causal": ([(5, 9), (150, 203), (64, 64), (1, 1), (1, 70)], True),
    "short": ([(5, 9), (33, 97), (64, 64)], True),
    "whole": ([(70, 33), (130, 64), (3, 0), (1, 1)], False),
}


def check_kernel(name: str, dtype: torch.dtype, widths: tuple[int, int, int]) -> None:
    extents, causal = KERNEL_CASES[name]
    inputs = drawn(extents, heads=4, widths=widths, dtype=dtype, device=DEVICE)
    rtol = 4e-3 if dtype == torch.float16 else 1e-4
    check(ragged_attention_triton, inputs, extents, causal=causal, rtol=rtol)


@pytest.mark.parametrize("name", KERNEL_CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_kernel(name: str, dtype: torch.dtype) -> None:
    check_kernel(name, dtype, (32, 16, 32))


# Blocks of 32 keys and 64 or 128 queries: windows of one key, shorter than a block, as long as several, and as a chunk
@pytest.mark.parametrize("window", [1, 31, 32, 33, 64, 129, 203])
def test_kernel_with_a_window(window: int) -> None:
    for name, gaps in (("causal", ()), ("short", ()), ("whole", (0, 40, 0, 3))):
        extents, causal = KERNEL_CASES[name]
        inputs = drawn(extents, heads=2, widths=(16, 0, 16), device=DEVICE)
        options: Any = {"causal": causal, "window": window, "gaps": gaps}
        check(ragged_attention_triton, inputs, extents, **options)


def test_kernel_with_a_soft_cap_and_wide_heads() -> None:
    """Gemma 2's."""
    extents = [(5, 9), (70, 100)]
    inputs = drawn(extents, heads=2, groups=1, widths=(256, 0, 256), device=DEVICE)
    check(ragged_attention_triton, inputs, extents, window=40, softcap=2.0)
    inputs = drawn(extents, widths=(16, 0, 16), dtype=torch.float16, device=DEVICE)
    check(ragged_attention_triton, inputs, extents, softcap=2.0, rtol=4e-3)


@pytest.mark.parametrize("widths", [(20, 6, 24), (16, 0, 16), (24, 0, 8), (48, 0, 32)], ids=str)
def test_kernel_of_other_widths(widths: tuple[int, int, int]) -> None:
    """Sizes that are no powers of two, with and without a part that all heads share."""
    check_kernel("causal", torch.float32, widths)


@pytest.mark.parametrize("attend", [ragged_attention, ragged_attention_triton])
def test_later_keys_do_not_matter_even_if_they_are_nan(
    attend: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    """Later keys of the same chunk are masked, and the next chunk is not read."""
    extents = [(5, 9), (3, 3)]
    device = DEVICE if attend is ragged_attention_triton else "cpu"
    inputs = drawn(extents, widths=(16, 16, 16), device=device)
    work = PrefillWork.on(device, extents, heads=2)

    def attended() -> Tensor:
        q, k, v, shared = inputs.q, inputs.k, inputs.v, inputs.shared
        return attend(q, k, v, shared, work, scale=SCALE)[0]

    before = attended().clone()
    inputs.k[8] = float("nan")
    inputs.k[9:], inputs.v[9:] = float("nan"), float("nan")
    after = attended()
    assert torch.equal(after[:4], before[:4])
    assert after[4:].isnan().all()


@pytest.mark.parametrize("attend", [ragged_attention, ragged_attention_triton])
def test_rows_of_a_tensor_that_is_given(attend: Callable[..., tuple[Tensor, Tensor]]) -> None:
    extents = [(5, 9), (70, 70)]
    device = DEVICE if attend is ragged_attention_triton else "cpu"
    inputs = drawn(extents, heads=4, widths=(16, 16, 16), device=device)
    work = PrefillWork.on(device, extents, heads=MANY_HEADS)
    rows = torch.full((80, 4, 16), -7.0, device=device)
    arguments = inputs.q, inputs.k, inputs.v, inputs.shared, work
    got, _ = attend(*arguments, scale=SCALE, out=rows[3:78])
    assert got.data_ptr() == rows[3:].data_ptr()
    expected, _ = one_by_one(inputs, extents, causal=True)
    torch.testing.assert_close(rows[3:78].double().cpu(), expected, rtol=1e-4, atol=1e-4)
    assert (rows[:3] == -7).all() and (rows[78:] == -7).all()


def test_a_table_may_be_longer_than_its_work() -> None:
    """One captured graph serves many steps."""
    extents = [(70, 80)]
    inputs = drawn(extents, widths=(16, 16, 16), device=DEVICE)
    work = PrefillWork.on(DEVICE, extents, heads=MANY_HEADS)
    longer = PrefillWork(
        work.extents,
        work.causal,
        work.block_queries,
        work.key_starts,
        torch.cat((work.query_blocks, work.query_blocks.new_zeros(2, 5))),
    )
    arguments = inputs.q, inputs.k, inputs.v, inputs.shared
    expected = ragged_attention_triton(*arguments, work, scale=SCALE)
    got = ragged_attention_triton(*arguments, longer, scale=SCALE)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_mla_prefill_takes_keys_and_values_apart() -> None:
    extents = [(5, 9), (2, 3)]
    inputs = drawn(extents)
    assert inputs.shared is not None
    kv = torch.cat((inputs.k, inputs.v), dim=-1)
    work = PrefillWork.on("cpu", extents, heads=2)
    got, _ = mla_prefill(inputs.q, kv, inputs.shared, work, scale=SCALE)
    expected, _ = one_by_one(inputs, extents, causal=True)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("heads", "rows"), [(16, 64), (17, 128)])
def test_every_query_has_one_program_and_the_longest_come_first(heads: int, rows: int) -> None:
    """Blocks are tall if there are enough of them for an H200's multiprocessors."""
    extents = [(300, 700), (5, 2000), (129, 129)]
    tables = prefill_tables(extents, heads=heads)
    assert tables.block_queries == rows
    starts, key_starts = [0, 300, 305], [0, 700, 2700]
    expected = [
        (starts[c] + first, n - first, key_starts[c], keys - n + first + 1, keys)
        for c, (n, keys) in enumerate(extents)
        for first in range(0, n, rows)
    ]
    blocks = [tuple(block) for block in tables.query_blocks.tolist()]
    assert sorted(blocks) == expected
    seen = [min(first_sees + rows - 1, keys) for *_, first_sees, keys in blocks]
    assert seen == sorted(seen, reverse=True)
    assert tables.key_starts.tolist() == [0, 700, 2700, 2829]


def test_wrong_shapes_are_named() -> None:
    inputs = drawn([(5, 9)])
    with pytest.raises(AssertionError, match=r"q \(5, 2, 10\), k \(9, 2, 6\), extents \(\(4, 9\),"):
        work = PrefillWork.on("cpu", [(4, 9)], heads=2)
        ragged_attention(inputs.q, inputs.k, inputs.v, inputs.shared, work, scale=1.0)
    with pytest.raises(AssertionError, match=r"k \(9, 2, 6\), shared keys \(0, 0\)"):
        work = PrefillWork.on("cpu", [(5, 9)], heads=2)
        ragged_attention(inputs.q, inputs.k, inputs.v, None, work, scale=1.0)
    with pytest.raises(AssertionError, match=r"extents \(queries, keys\) \[\(9, 5\)\]"):
        prefill_tables([(9, 5)], heads=2)


def launches() -> None:
    """Launches DeepSeek's heads, causal and over whole prefixes, with long and short chunks; then Llama's."""
    launch_attention(4096, 16, 16, 64, True, tiling(128, 2, 512))
    launch_attention(4096, 16, 16, 64, False)
    launch_attention(64, 16, 16, 64, True, *(tiling(64, 2, programs) for programs in (264, 265)))
    launch_attention(64, 16, 16, 64, False)
    launch_attention(4096, 32, 8, 0, True)
    launch_attention(64, 32, 8, 0, True)
    # Heads with their own rotary keys
    k, v = torch.empty(4096, 16, 320, dtype=torch.bfloat16, device="meta").split([192, 128], dim=-1)
    for n, causal in ((4096, True), (4096, False), (64, True)):
        work = PrefillWork.on("meta", [(n, 4096)], heads=16, causal=causal)
        q = torch.empty(n, 16, 192, dtype=torch.bfloat16, device="meta")
        ragged_attention_triton(q, k, v, None, work, scale=0.1)
    launch_gemma(4096, 16, 8, 256)
    launch_gemma(64, 16, 8, 256)
    launch_gemma(4096, 32, 16, 128)


def launch_gemma(n: int, heads: int, groups: int, width: int) -> None:
    """Launches Gemma 2's heads with a window, and the wide ones without."""
    k, v = torch.empty(2, 8192, groups, width, dtype=torch.bfloat16, device="meta")
    q = torch.empty(n, heads, width, dtype=torch.bfloat16, device="meta")
    for window in (4096, None) if (n, width) == (4096, 256) else (4096,):
        work = PrefillWork.on("meta", [(n, 8192)], heads=heads, window=window)
        ragged_attention_triton(q, k, v, None, work, scale=0.1, softcap=50.0)


def launches_of_the_sweep() -> None:
    """Launches the tilings of the benchmark's sweep."""
    launch_attention(4096, 16, 16, 64, True, Tiling(32, 8, 3), Tiling(64, 8, 2), Tiling(128, 8, 2))


def launch_attention(
    n: int, heads: int, groups: int, shared: int, causal: bool, *tiles: Tiling
) -> None:
    work = PrefillWork.on("meta", [(n, 4096)], heads=heads, causal=causal)
    q = torch.empty(n, heads, 128 + shared, dtype=torch.bfloat16, device="meta")
    kv = torch.empty(4096, groups, 256, dtype=torch.bfloat16, device="meta")
    k_pe = torch.empty(4096, 576, dtype=torch.bfloat16, device="meta")[:, 512:]
    for chosen in tiles or (None,):
        ragged_attention_triton(
            q,
            kv[..., :128],
            kv[..., 128:],
            k_pe if shared else None,
            work,
            scale=0.1,
            tiles=chosen,
        )


def test_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches):
        report.check()
        assert report.has_wgmma, report


@pytest.mark.slow
def test_the_sweep_compiled_for_sm_90() -> None:
    for report in compile_sm90(launches_of_the_sweep):
        report.check()
        assert report.has_wgmma, report


def hopper_launches() -> None:
    """Launches DeepSeek's heads, Llama's, narrow ones and Gemma 2's."""
    attend(16, 16, 128, 128, shared=64)
    attend(32, 8, 128, 128)
    attend(32, 8, 64, 64)
    attend(32, 16, 128, 128, window=4096, softcap=50.0)
    attend(16, 8, 256, 256, window=4096, softcap=50.0)


def other_hopper_launches() -> None:
    """Launches V3's heads, and those of V2-Lite without absorption; then Gemma 2's without a window, and without both."""
    attend(128, 128, 128, 128, shared=64)
    attend(16, 16, 192, 128)
    attend(32, 16, 128, 128, softcap=50.0)
    attend(16, 8, 256, 256)
    attend(8, 4, 256, 256, softcap=50.0)


def attend(
    heads: int,
    groups: int,
    own: int,
    value: int,
    shared: int = 0,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    work = PrefillWork.on("meta", [(4096, 4096)], heads=heads, window=window)
    q = torch.empty(4096, heads, own + shared, dtype=torch.bfloat16, device="meta")
    kv = torch.empty(4096, groups, own + value, dtype=torch.bfloat16, device="meta")
    k_pe = torch.empty(4096, 576, dtype=torch.bfloat16, device="meta")[:, 512:]
    ragged_attention_hopper(
        q,
        kv[..., :own],
        kv[..., own:],
        k_pe if shared else None,
        work,
        scale=0.1,
        softcap=softcap,
    )


def test_hoppers_kernel_compiled_for_sm_90() -> None:
    """Gluon has no interpreter: results are tested on a GPU (`tests/gpu/test_mla_prefill_cuda.py`)."""
    check_hopper(hopper_launches)


@pytest.mark.slow
def test_hoppers_kernel_of_other_heads_compiled_for_sm_90() -> None:
    check_hopper(other_hopper_launches)


def check_hopper(launched: Callable[[], None]) -> None:
    for report in compile_sm90(launched):
        report.check()
        assert report.has_wgmma, report

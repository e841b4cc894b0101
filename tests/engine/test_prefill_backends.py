"""Prefill in passes gives the results of one pass over all keys, and so does the prefill graph, which knows only the
out_cache_loc of a prompt's rows.

On a CPU each op uses its torch form, so this tests the arguments of the ops.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mla_router.worker.engine.attention.layout import ChunkExtent, StepLayout
from mla_router.worker.engine.attention.torch import TorchBackend
from mla_router.worker.engine.attention.triton import TritonBackend
from mla_router.worker.model.attention import StepAttention
from mla_router.worker.model.config.attention_spec import (
    AttentionSpec,
    GroupedQueryAttentionSpec,
    LatentAttentionSpec,
)

HEADS, RANK, NOPE, ROPE, VALUE = 2, 6, 4, 2, 3
KEY_HEADS, SHARE = 2, 3
CPU = torch.device("cpu")
LATENTS = LatentAttentionSpec(
    num_heads=HEADS,
    scale=0.5,
    kv_lora_rank=RANK,
    qk_nope_head_dim=NOPE,
    qk_rope_head_dim=ROPE,
    v_head_dim=VALUE,
)
GROUPED = GroupedQueryAttentionSpec(
    num_heads=KEY_HEADS * SHARE,
    scale=0.5,
    num_kv_heads=KEY_HEADS,
    head_dim=NOPE + ROPE,
    v_head_dim=VALUE,
)
WINDOWED = replace(GROUPED, window=6, softcap=2.0)
CHUNKS = (ChunkExtent(2, 0, 9), ChunkExtent(0, 20, 1), ChunkExtent(3, 11, 5))


def plain(spec: AttentionSpec) -> TorchBackend:
    return TorchBackend(spec, CPU, torch.float32, torch.float32)


def triton(spec: AttentionSpec) -> TritonBackend:
    return TritonBackend(spec, CPU, torch.float32, torch.float32)


@pytest.fixture
def layout() -> StepLayout:
    torch.manual_seed(0)
    page_table = (torch.randperm(32).int() + 1).view(4, 8)
    empty = torch.empty(0, dtype=torch.int64)
    return StepLayout(page_table, 4, empty, empty.int(), 0, CHUNKS)


def own_rows(layout: StepLayout, cache: Tensor) -> Tensor:
    """Returns the rows of the chunks' tokens in `cache`."""
    rows = [
        cache[layout.page_table[chunk.slot].long()].flatten(0, 1)[chunk.start : chunk.end]
        for chunk in layout.chunks
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("chunks", [CHUNKS, (ChunkExtent(2, 0, 9), ChunkExtent(0, 0, 6))])
@pytest.mark.parametrize("most_keys", [1000, 40, 7, 1])
def test_latents(layout: StepLayout, most_keys: int, chunks: tuple[ChunkExtent, ...]) -> None:
    layout = replace(layout, chunks=chunks)
    cache = torch.randn(33, 4, RANK + ROPE)
    weight = torch.randn(HEADS * (NOPE + VALUE), RANK)
    q = torch.randn(15, HEADS, NOPE + ROPE)
    own = own_rows(layout, cache)
    expanded: list[int] = []

    def expand(latent: Tensor) -> Tensor:
        expanded.append(len(latent))
        return (latent @ weight.T).view(len(latent), HEADS, -1)

    ours = triton(LATENTS)
    ours.max_keys = most_keys
    results = []
    for backend in (plain(LATENTS), ours):
        results.append(torch.full((15, HEADS, VALUE), float("nan")))
        step = backend.plan(layout)
        step.mla_prefill(q, own, cache, expand, results[-1], kv_lora_rank=RANK)
    torch.testing.assert_close(*reversed(results), rtol=1e-4, atol=1e-5)
    whole, *passes = expanded
    assert sum(passes) == whole == sum(chunk.end for chunk in chunks)
    assert max(passes) <= max(most_keys, len(q))


@pytest.mark.parametrize("most_keys", [1000, 40, 7, 1])
@pytest.mark.parametrize("spec", [GROUPED, WINDOWED], ids=["all", "window"])
def test_keys_and_values(layout: StepLayout, spec: AttentionSpec, most_keys: int) -> None:
    width = NOPE + ROPE
    cache = torch.randn(33, 4, KEY_HEADS * (width + VALUE))
    q = torch.randn(15, KEY_HEADS * SHARE, width)
    ours = triton(spec)
    ours.max_keys = most_keys
    results = []
    for backend in (plain(spec), ours):
        results.append(torch.full((15, KEY_HEADS * SHARE, VALUE), float("nan")))
        backend.plan(layout).gqa_prefill(q, cache, results[-1])
    torch.testing.assert_close(*reversed(results), rtol=1e-4, atol=1e-5)


NEW, ROWS = 9, 16  # tokens of a prompt, rows of its plan


def prompt_alone(layout: StepLayout) -> tuple[StepLayout, Tensor]:
    """Returns the layout of a prompt in slot 2, and the locations of its rows and of padding."""
    pages = layout.page_table[2].long()
    own = (pages[:, None] * 4 + torch.arange(4)).flatten()[:NEW]
    locations = torch.cat((own, torch.zeros(ROWS - NEW, dtype=torch.int64)))
    return replace(layout, chunks=(ChunkExtent(2, 0, NEW),)), locations


# One pass has all new tokens, however small the limit of keys is
@pytest.mark.parametrize("most_keys", [1000, 4])
def test_latents_of_a_prefill_graph(layout: StepLayout, most_keys: int) -> None:
    cache = torch.randn(33, 4, RANK + ROPE)
    weight = torch.randn(HEADS * (NOPE + VALUE), RANK)
    q = torch.randn(ROWS, HEADS, NOPE + ROPE)
    layout, locations = prompt_alone(layout)
    planned = replace(layout, chunks=(ChunkExtent(3, 0, ROWS),))
    ours = triton(LATENTS)
    ours.max_keys = most_keys

    def attend(step: StepAttention, queries: Tensor, own: Tensor) -> Tensor:
        out = torch.full((len(queries), HEADS, VALUE), float("nan"))
        step.mla_prefill(
            queries,
            own,
            cache,
            lambda latent: (latent @ weight.T).view(len(latent), HEADS, -1),
            out,
            kv_lora_rank=RANK,
        )
        return out

    own = cache.flatten(0, 1)[locations]
    unread = torch.full_like(own[:NEW], torch.nan)  # the reference reads the cache
    expected = attend(plain(LATENTS).plan(layout), q[:NEW], unread)
    # Padding rows may have any values: the rows of the prompt do not attend to them
    own[NEW:].uniform_(-99, 99)
    got = attend(ours.plan_prefill_graph(planned)(locations), q, own)
    torch.testing.assert_close(got[:NEW], expected, rtol=1e-4, atol=1e-5)
    assert got.isfinite().all()


@pytest.mark.parametrize("spec", [GROUPED, WINDOWED], ids=["all", "window"])
def test_decode(layout: StepLayout, spec: AttentionSpec) -> None:
    """Both backends plan the window of decode rows."""
    width = NOPE + ROPE
    cache = torch.randn(33, 4, KEY_HEADS * (width + VALUE))
    q = torch.randn(4, KEY_HEADS * SHARE, width)
    lengths = torch.tensor([1, 6, 7, 30], dtype=torch.int32)
    layout = replace(
        layout,
        decode_slots=torch.tensor([2, 0, 3, 1]),
        decode_lengths=lengths,
        max_decode_length=31,
        chunks=(),
    )
    results = []
    for backend in (plain(spec), triton(spec)):
        results.append(torch.full((4, KEY_HEADS * SHARE, VALUE), float("nan")))
        backend.plan(layout).gqa_decode(q, cache, results[-1])
    torch.testing.assert_close(*reversed(results), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", [GROUPED, WINDOWED], ids=["all", "window"])
def test_keys_and_values_of_a_prefill_graph(layout: StepLayout, spec: AttentionSpec) -> None:
    width = NOPE + ROPE
    cache = torch.randn(33, 4, KEY_HEADS * (width + VALUE))
    q = torch.randn(ROWS, KEY_HEADS * SHARE, width)
    layout, locations = prompt_alone(layout)
    planned = replace(layout, chunks=(ChunkExtent(3, 0, ROWS),))
    ours = triton(spec)
    expected, got = (torch.full((n, KEY_HEADS * SHARE, VALUE), float("nan")) for n in (NEW, ROWS))
    plain(spec).plan(layout).gqa_prefill(q[:NEW], cache, expected)
    ours.plan_prefill_graph(planned)(locations).gqa_prefill(q, cache, got)
    torch.testing.assert_close(got[:NEW], expected, rtol=1e-4, atol=1e-5)


def test_a_backend_that_plans_on_the_host_has_no_prefill_graph(layout: StepLayout) -> None:
    assert plain(LATENTS).plans_prefill_on_host
    with pytest.raises(AssertionError, match="torch plans prefill on the host"):
        plain(LATENTS).plan_prefill_graph(prompt_alone(layout)[0])

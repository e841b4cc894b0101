"""FlashInfer's MLA decode: against float64, in CUDA graphs, and in whole steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mla_router.worker.engine.attention.choose import choose_attention
from mla_router.worker.engine.attention.flashinfer_mla import PlannedDecode
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.generation import SamplingParams
from mla_router.worker.model.loader import load_model
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import Admitted, PrefillChunk, StepPlan
from support.cuda import assert_rows_close, captured, forbid_waiting
from support.paged_cache import PagedCache, expected_attention, random_cache
from support.tiny_model import CONFIGS, write_tiny_model

pytestmark = pytest.mark.gpu

pytest.importorskip("flashinfer")

LATENT, ROPE, SCALE = 512, 64, 0.1147
LENGTHS = [1, 4000, 17, 64, 65, 1, 128, 700, 2048, 33]
CUDA = torch.device("cuda")


def inputs(lengths: list[int], heads: int, page_size: int) -> tuple[Tensor, PagedCache]:
    """Queries [B, H, 576] and a cache. Rows that no request owns are NaN."""
    draw = torch.Generator("cuda").manual_seed(len(lengths) + heads)
    paged = random_cache(
        lengths,
        page_size,
        LATENT + ROPE,
        dtype=torch.bfloat16,
        generator=draw,
        device="cuda",
    )
    q = torch.randn(len(lengths), heads, LATENT + ROPE, generator=draw, device="cuda")
    return q.bfloat16(), paged


def run(decode: PlannedDecode, q: Tensor, paged: PagedCache) -> Tensor:
    return decode.run(*q.split([LATENT, ROPE], dim=-1), paged.cache)


@pytest.fixture(params=[16, 128], scope="module")
def heads(request: pytest.FixtureRequest) -> int:
    value: int = request.param
    return value


@pytest.fixture(scope="module")
def decode(heads: int) -> PlannedDecode:
    return PlannedDecode(heads, SCALE, torch.bfloat16, CUDA)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_float64(decode: PlannedDecode, heads: int, page_size: int) -> None:
    q, paged = inputs(LENGTHS, heads, page_size)
    slots = paged.slots.tolist()
    with forbid_waiting():
        decode.plan(paged.page_table, page_size, slots, LENGTHS)
        got = run(decode, q, paged)
    assert_rows_close(got, expected_attention(q, paged, LATENT, SCALE, 1))


def test_queries_as_a_layer_has_them(decode: PlannedDecode, heads: int) -> None:
    """The latent queries are contiguous by head, the rotary ones are a view of the projection's output."""
    q, paged = inputs(LENGTHS, heads, 16)
    latents = q[..., :LATENT].transpose(0, 1).contiguous().transpose(0, 1)
    decode.plan(paged.page_table, 16, paged.slots.tolist(), LENGTHS)
    got = decode.run(latents, q[..., LATENT:], paged.cache)
    assert_rows_close(got, expected_attention(q, paged, LATENT, SCALE, 1))


def test_the_next_step_is_planned_before_this_one_has_begun(
    decode: PlannedDecode, heads: int
) -> None:
    steps = [LENGTHS, [300, 5]]
    drawn = [inputs(lengths, heads, 16) for lengths in steps]
    slots = [paged.slots.tolist() for _, paged in drawn]
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # some 50 ms
    got = []
    with forbid_waiting():
        for lengths, own, (q, paged) in zip(steps, slots, drawn, strict=True):
            decode.plan(paged.page_table, 16, own, lengths)
            got.append(run(decode, q, paged))
    for out, (q, paged) in zip(got, drawn, strict=True):
        assert_rows_close(out, expected_attention(q, paged, LATENT, SCALE, 1))


def test_graph_follows_the_plan(decode: PlannedDecode, heads: int) -> None:
    """The graph is captured with padding rows only (length 1 on page 0), and replayed with fewer requests as well."""
    q, paged = inputs(LENGTHS, heads, 64)
    slots = paged.slots.tolist()
    idle = paged.idle_slot()
    decode.plan(paged.page_table, 64, [idle] * len(slots), [1] * len(slots))
    replay, out = captured(lambda: run(decode, q, paged))
    for used in (len(LENGTHS), 3, 7):
        spare = len(LENGTHS) - used
        with forbid_waiting():
            decode.plan(
                paged.page_table,
                64,
                slots[:used] + [idle] * spare,
                LENGTHS[:used] + [1] * spare,
            )
            replay()
        expected = expected_attention(q[:used], paged.first(used), LATENT, SCALE, 1)
        assert_rows_close(out[:used], expected)


CAPACITY = Capacity(num_pages=200, page_size=16, num_slots=9, context_length=160)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    # A dense model: rounding cannot change the choice of experts
    changes = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "first_k_dense_replace": 3}
    write_tiny_model(folder, **CONFIGS["v3"] | changes)
    return folder


def engine_of(folder: Path, prefill: str, flashinfer_mla: bool) -> Engine:
    model = load_model(folder, device=CUDA, dtype=torch.bfloat16)
    attention = choose_attention(
        prefill, model.config, CUDA, torch.bfloat16, flashinfer_mla=flashinfer_mla
    )
    assert attention.name == prefill + "+flashinfer_mla" * flashinfer_mla
    return Engine(model, CAPACITY, device=CUDA, dtype=torch.bfloat16, attention=attention)


def steps(lengths: list[int]) -> list[StepPlan]:
    """Prompts of these lengths, two steps that decode them, one with a further prompt beside them, and
    one that decodes two of them."""
    slots = tuple(range(len(lengths)))
    chunks = tuple(
        PrefillChunk(slot, 0, tuple(range(slot, slot + length)), is_last=True)
        for slot, length in (*zip(slots, lengths, strict=True), (8, 20))
    )
    prompts, other = chunks[:-1], chunks[-1:]

    def admitted(these: tuple[PrefillChunk, ...]) -> tuple[Admitted, ...]:
        return tuple(Admitted(c.slot, SamplingParams(50), c.tokens) for c in these)

    pages = tuple((slot, page, 1 + 10 * slot + page) for slot in range(9) for page in range(10))

    def after(n: int) -> tuple[int, ...]:
        return tuple(length + n for length in lengths)

    return [
        StepPlan((), (), prompts, pages, admitted(prompts)),
        StepPlan(slots, after(1), (), (), ()),
        StepPlan(slots, after(2), (), (), ()),
        StepPlan(slots, after(3), other, (), admitted(other)),
        StepPlan((3, 1), (after(4)[3], after(4)[1]), (), (), ()),
    ]


@torch.inference_mode()
def logits(engine: Engine, want: list[Tensor] | None = None) -> list[Tensor]:
    """Returns the logits of each step. The tokens of each step are those of `want`, so that near ties do not diverge."""
    got = []
    for i, plan in enumerate(steps([5, 16, 33, 100, 47])):
        launched = engine.forward(plan)
        got.append(launched.logits.clone())
        if want is not None:
            launched.logits.copy_(want[i])
        engine.sample(launched).wait()
    return got


@pytest.mark.parametrize("prefill", ["triton", "torch"])
def test_steps_as_with_our_kernel(folder: Path, prefill: str) -> None:
    """Steps run kernel by kernel, as padded graphs, and as piecewise graphs."""
    want = logits(engine_of(folder, "triton", False))
    engine = engine_of(folder, prefill, True)
    for with_graphs in (False, True)[: 1 + engine.attention.supports_decode_graph]:
        prefill_sizes = () if engine.attention.plans_prefill_on_host else (16, 32)
        graphs = GraphSizes([2, 4, 8], [16, 32], prefill_sizes)
        engine.capture_graphs(graphs if with_graphs else GraphSizes())
        for out, expected in zip(logits(engine, want), want, strict=True):
            # Each layer rounds its update of the residual to 8 bits
            assert_rows_close(out, expected.double(), most=6e-2)

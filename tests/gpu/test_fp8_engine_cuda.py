"""An engine with an FP8 KV cache on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_router.worker.engine.attention.choose import choose_attention
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.generation import SamplingParams
from mla_router.worker.kernels.kv_cache.fp8 import FORMATS, KVScales
from mla_router.worker.model.decoder import AttentionLayer
from mla_router.worker.model.loader import load_model
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import Admitted, PrefillChunk, StepPlan
from support.tiny_model import CONFIGS, write_tiny_model

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
CAPACITY = Capacity(num_pages=200, page_size=16, num_slots=9, context_length=160)
LENGTHS = [5, 16, 33]
WIDTHS = {"v3": {"qk_rope_head_dim": 32}, "llama_gqa": {"head_dim": 64}}


@pytest.mark.parametrize("dtype", FORMATS.values())
@pytest.mark.parametrize("name", WIDTHS)
def test_graphs_give_the_same_tokens(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Without graphs prompts attend to gathered rows, in a graph to their own rows. Sizes have no padding, because
    matrix products of another size may round differently."""
    write_tiny_model(tmp_path, **CONFIGS[name] | WIDTHS[name])
    model = load_model(tmp_path, device=CUDA, dtype=torch.bfloat16)
    for module in model.modules():
        if isinstance(module, AttentionLayer):
            module.kv_scales = KVScales(0.3, 0.2)
    attention = choose_attention("auto", model.config, CUDA, torch.bfloat16, kv_cache_dtype=dtype)
    engine = Engine(
        model,
        CAPACITY,
        device=CUDA,
        dtype=torch.bfloat16,
        attention=attention,
        kv_cache_dtype=dtype,
    )
    told = []
    for sizes in (GraphSizes(), GraphSizes([3], [54], LENGTHS)):
        engine.capture_graphs(sizes)
        told.append([*prompts(engine), *steps(engine)])
    assert told[0] == told[1]


def prompts(engine: Engine) -> list[list[list[int]]]:
    """Returns the tokens of each prompt's step."""
    first = []
    for slot, length in enumerate(LENGTHS):
        chunk = PrefillChunk(slot, 0, tuple(range(slot, slot + length)), is_last=True)
        pages = tuple((slot, page, 1 + 10 * slot + page) for page in range(10))
        admitted = (Admitted(slot, SamplingParams(50), chunk.tokens),)
        plan = StepPlan((), (), (chunk,), pages, admitted)
        first.append(engine.sample(engine.forward(plan)).wait().tokens)
    return first


def steps(engine: Engine) -> list[list[list[int]]]:
    """Returns the tokens of decode steps."""
    plans = [
        StepPlan((0, 1, 2), tuple(length + 1 + step for length in LENGTHS), (), (), ())
        for step in range(40)
    ]
    return [engine.sample(engine.forward(plan)).wait().tokens for plan in plans]

"""Decode graphs captured from compiled modules give the same results as uncompiled ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_router.worker.engine.attention.choose import choose_attention
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.generation import SamplingParams
from mla_router.worker.model.loader import load_model
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import Admitted, PrefillChunk, StepPlan
from support.cuda import forbid_waiting
from support.tiny_model import CONFIGS, write_tiny_model

pytestmark = pytest.mark.gpu

CAPACITY = Capacity(num_pages=40, page_size=16, num_slots=4, context_length=160)
CUDA = torch.device("cuda")
LENGTHS = [5, 16, 33]


# All tokens go to all experts: rounding cannot change the choice.
MIXTURE = {"qk_rope_head_dim": 16, "num_experts_per_tok": 8}


@pytest.mark.parametrize(
    ("name", "changes"), [("v2_lite", MIXTURE), ("v3_flat", MIXTURE), ("llama_gqa", {})]
)
def test_the_same_logits(name: str, changes: dict[str, int], tmp_path: Path) -> None:
    """Batches of one and of two are compiled, one of three is not."""
    write_tiny_model(tmp_path, **CONFIGS[name] | changes)
    model = load_model(tmp_path, device=CUDA, dtype=torch.bfloat16)
    attention = choose_attention("auto", model.config, CUDA, torch.bfloat16)
    engine = Engine(model, CAPACITY, device=CUDA, dtype=torch.bfloat16, attention=attention)
    chunks = tuple(
        PrefillChunk(slot, 0, tuple(range(slot, slot + length)), is_last=True)
        for slot, length in enumerate(LENGTHS)
    )
    prompts = StepPlan(
        (),
        (),
        chunks,
        tuple((slot, page, 1 + 10 * slot + page) for slot in range(3) for page in range(10)),
        tuple(Admitted(c.slot, SamplingParams(50), c.tokens) for c in chunks),
    )
    engine.sample(engine.forward(prompts)).wait()
    plans = [
        StepPlan(slots, tuple(LENGTHS[slot] + 1 for slot in slots), (), (), ())
        for slots in ((2,), (0, 2), (0, 1, 2))
    ]
    # The same tokens again, because nothing was sampled
    want = [engine.forward(plan).logits.clone() for plan in plans]
    engine.capture_graphs(GraphSizes([1, 2, 3], compiled=2))
    for plan, expected in zip(plans, want, strict=True):
        with forbid_waiting():
            got = engine.forward(plan).logits
        error = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max().item() < 2e-2, (len(plan.decode_slots), error)

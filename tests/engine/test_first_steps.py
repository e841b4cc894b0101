"""The first steps of an engine, before it is ready."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.first_steps import first_steps
from mla_router.worker.model.loader import load_model
from mla_router.worker.step.engine import Capacity
from support.attention import torch_attention
from support.scripted_scheduler import generate, run
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "capacity",
    [
        Capacity(num_pages=400, page_size=4, num_slots=4, context_length=160),
        Capacity(num_pages=3, page_size=16, num_slots=1, context_length=2048),  # most has no pages
        Capacity(num_pages=4, page_size=1, num_slots=1, context_length=2),
    ],
)
def test_first_steps_fit_into_any_engine_and_change_no_tokens(
    capacity: Capacity, tmp_path: Path
) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)

    def engine() -> Engine:
        return Engine(
            model,
            capacity,
            device=CPU,
            dtype=torch.float32,
            attention=torch_attention(model.config),
        )

    script = {0: [generate("a", [5], 1), generate("b", [7], 1)]}
    fresh = run(dict(script), engine=engine(), capacity=capacity, vocab_size=VOCAB_SIZE)
    used = engine()
    measured = first_steps(used, vocab_size=VOCAB_SIZE, largest=64)
    again = run(script, engine=used, capacity=capacity, vocab_size=VOCAB_SIZE)
    for rid in ("a", "b"):
        assert again.channel.tokens(rid) == fresh.channel.tokens(rid)
    assert measured.single > 0
    assert measured.chunk > 0
    assert 1 <= measured.tokens <= 64


def test_on_a_cpu_each_half_of_a_layer_reports_progress(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, **CONFIGS["v3"])
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)
    capacity = Capacity(num_pages=40, page_size=4, num_slots=4, context_length=160)
    engine = Engine(
        model, capacity, device=CPU, dtype=torch.float32, attention=torch_attention(model.config)
    )
    reports: list[int] = []
    engine.report_progress_within_steps(lambda: reports.append(1))
    run({0: [generate("a", [5], 3)]}, engine=engine, capacity=capacity, vocab_size=VOCAB_SIZE)
    assert len(reports) == 3 * 2 * len(model.model.layers)

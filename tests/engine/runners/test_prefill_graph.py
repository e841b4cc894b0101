"""Prefill graphs give the results of transformers.

Without a GPU, a fake graph calls the function that a real one would have captured.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mla_router.worker.core import Admitted, Capacity, PrefillChunk, SamplingParams, StepPlan
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.runners import prefill_graph
from mla_router.worker.engine.runners.prefill_graph import (
    Prefill,
    PrefillGraph,
    PrefillGraphRunner,
)
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.model.loader import load_model
from support.attention import triton_attention
from support.fake_graphs import fake_capture_sizes
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model

CPU = torch.device("cpu")
CAPACITY = Capacity(num_pages=20, page_size=4, num_slots=3, context_length=40)
SIZES = (8, 16)


class FakeGraph:
    """Calls `prefill` again at each replay."""

    def __init__(self, prefill: Prefill, inputs: Tensor) -> None:
        self._prefill, self._inputs = prefill, inputs
        self.output = prefill(inputs)
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        new = self._prefill(self._inputs)
        self.output.hidden_states.copy_(new.hidden_states)
        self.output.residual.copy_(new.residual)


@pytest.fixture(scope="module", params=["v3", "llama_gqa"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    write_tiny_model(folder, **CONFIGS[request.param])
    return folder


def test_as_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs prompts one after another in the same pages, as long as a graph and shorter: the tokens that a longer
    prompt has left in the graph's inputs do not matter."""
    model = load_model(folder, device=CPU, dtype=torch.float32)
    attention = triton_attention(model.config)
    engine = Engine(model, CAPACITY, device=CPU, dtype=torch.float32, attention=attention)
    graphs: list[FakeGraph] = []

    def capture(self: PrefillGraphRunner, size: int, _: object) -> PrefillGraph:
        inputs, prefill = self.idle_prompt(size), self.plan_prefill(size)
        graphs.append(FakeGraph(prefill, inputs))
        return PrefillGraph(inputs, prefill, graphs[-1], graphs[-1].output)  # type: ignore[arg-type]

    monkeypatch.setattr(prefill_graph, "capture_sizes", fake_capture_sizes)
    monkeypatch.setattr(PrefillGraphRunner, "capture_size", capture)
    engine.capture_graphs(GraphSizes(prefill=SIZES))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    pages = tuple((1, index, 20 - index) for index in range(10))
    draw = torch.Generator().manual_seed(0)
    for replays, length in enumerate((16, 11, 9, 16, 8, 5, 1), start=1):
        ids = torch.randint(VOCAB_SIZE, (length,), generator=draw)
        prompt = PrefillChunk(1, 0, tuple(ids.tolist()), is_last=True)
        admitted = Admitted(1, SamplingParams(5), prompt.tokens)
        output = engine.forward(StepPlan((), (), (prompt,), pages, (admitted,)))
        with torch.no_grad():
            expected = reference(ids[None]).logits[0, -1:]
        torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-5)
        assert sum(graph.replays for graph in graphs) == replays

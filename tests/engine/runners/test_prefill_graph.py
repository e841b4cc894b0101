"""Prefill graphs give the results of transformers.

Without a GPU, a fake graph calls the function that a real one would have captured.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.runners import prefill_graph
from mla_router.worker.engine.runners.prefill_graph import (
    Prefill,
    PrefillGraph,
    PrefillGraphRunner,
)
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.engine.speculation.chain import NewChain
from mla_router.worker.generation import SamplingParams
from mla_router.worker.model.loader import load_model, load_mtp
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import Admitted, PrefillChunk, StepPlan
from support.attention import triton_attention
from support.fake_graphs import fake_capture_sizes
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model
from support.tiny_mtp import write_tiny_mtp

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


def with_graphs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    """Gives `engine` fake graphs of `SIZES`, and returns them."""
    graphs: list[FakeGraph] = []

    def capture(self: PrefillGraphRunner, size: int, _: object) -> PrefillGraph:
        inputs, prefill = self.idle_prompt(size), self.plan_prefill(size)
        graphs.append(FakeGraph(prefill, inputs))
        return PrefillGraph(inputs, prefill, graphs[-1], graphs[-1].output)  # type: ignore[arg-type]

    monkeypatch.setattr(prefill_graph, "capture_sizes", fake_capture_sizes)
    monkeypatch.setattr(PrefillGraphRunner, "capture_size", capture)
    engine.capture_graphs(GraphSizes(prefill=SIZES))
    return graphs


def test_as_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs prompts one after another in the same pages, as long as a graph and shorter: the tokens that a longer
    prompt has left in the graph's inputs do not matter."""
    model = load_model(folder, device=CPU, dtype=torch.float32)
    attention = triton_attention(model.config)
    engine = Engine(model, CAPACITY, device=CPU, dtype=torch.float32, attention=attention)
    graphs = with_graphs(engine, monkeypatch)
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


def test_drafts_behind_a_prompt_are_those_of_separate_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_mtp(tmp_path / "model", 1, **CONFIGS["v3"])
    model = load_model(tmp_path / "model", device=CPU, dtype=torch.float32)
    capacity = replace(CAPACITY, tokens_per_row=3)

    def engine() -> Engine:
        return Engine(
            model,
            capacity,
            device=CPU,
            dtype=torch.float32,
            attention=triton_attention(model.config),
            new_drafter=NewChain(load_mtp(model, tmp_path / "model"), 2),
        )

    captured, eager = engine(), engine()
    graphs = with_graphs(captured, monkeypatch)
    pages = tuple((1, index, 20 - index) for index in range(10))
    for replays, length in enumerate((11, 8, 6), start=1):
        prompt = PrefillChunk(1, 0, tuple(range(length, 2 * length)), is_last=True)
        admitted = (Admitted(1, SamplingParams(5), prompt.tokens),)
        plan = StepPlan(
            (), (), (prompt,), pages, admitted, feeds_drafter=True, draft_bounds=(length + 2,)
        )
        tokens = [some.sample(some.forward(plan)).wait().tokens for some in (captured, eager)]
        assert tokens[0] == tokens[1]
        assert captured.slots.drafts[1].tolist() == eager.slots.drafts[1].tolist()
        written, expected = (some.kv_cache.layers[-1][11:] for some in (captured, eager))
        torch.testing.assert_close(written, expected)
        assert sum(graph.replays for graph in graphs) == replays

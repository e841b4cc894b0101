"""Which steps are one recording of a prompt, and that such a recording gives what transformers does.

Without a GPU there is no graph: in its place stands what would be recorded in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mla_router.worker.core import Admitted, Capacity, PrefillChunk, SamplingParams, StepPlan
from mla_router.worker.engine import engine as engine_module
from mla_router.worker.engine.attention.triton import TritonBackend
from mla_router.worker.engine.engine import Engine, GraphSizes
from mla_router.worker.engine.fresh_prompts import (
    FreshPrompt,
    FreshPrompts,
    RunPrompt,
    no_prompt,
)
from mla_router.worker.engine.recordings import Recordings
from mla_router.worker.model.config.cache_rows import HeadRows
from mla_router.worker.model.loader import load_model
from support.tiny_model import CONFIGS, VOCAB_SIZE, write_tiny_model

CPU = torch.device("cpu")
CAPACITY = Capacity(num_pages=20, page_size=4, num_slots=3, context_length=40)
SIZES = (8, 16)


class Unrecorded:
    """Runs again where a graph would be replayed."""

    def __init__(self, run: RunPrompt, inputs: Tensor) -> None:
        self._run, self._inputs = run, inputs
        self.update, self.stream = run(inputs)
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for kept, new in zip((self.update, self.stream), self._run(self._inputs), strict=True):
            kept.copy_(new)


def recording(size: int, run: RunPrompt, idle_slot: int = 0) -> FreshPrompt:
    inputs = no_prompt(size, idle_slot, CPU)
    graph = Unrecorded(run, inputs)
    return FreshPrompt(inputs, run, graph, graph.update, graph.stream)  # type: ignore[arg-type]


def chunk(slot: int, start: int, length: int) -> PrefillChunk:
    return PrefillChunk(slot, start, tuple(range(length)), is_last=True)


def test_prompts_alone_are_taken() -> None:
    def run(inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, inputs.clone()

    prompts = FreshPrompts([recording(16, run), recording(8, run)])

    def taken(plan: StepPlan) -> int | None:
        fitting = prompts.fitting(plan)
        return fitting.size if fitting else None

    def step(*chunks: PrefillChunk, decodes: tuple[int, ...] = ()) -> StepPlan:
        return StepPlan(decodes, decodes, chunks, (), ())

    sizes = {n: taken(step(chunk(2, 0, n))) for n in (1, 8, 9, 16, 17)}
    assert sizes == {1: 8, 8: 8, 9: 16, 16: 16, 17: None}
    # The first chunk of a longer prompt, too
    assert taken(step(PrefillChunk(2, 0, (1, 2, 3), is_last=False))) == 8
    assert taken(step(chunk(2, 4, 3))) is None
    assert taken(step(chunk(2, 0, 3), chunk(1, 0, 3))) is None
    assert taken(step(chunk(2, 0, 3), decodes=(1,))) is None
    assert taken(step(decodes=(1,))) is None
    assert taken(step()) is None
    assert FreshPrompts().fitting(step(chunk(2, 0, 3))) is None


@pytest.fixture(scope="module", params=["v3", "llama_gqa"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    write_tiny_model(folder, **CONFIGS[request.param])
    return folder


def test_as_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts one after another in the same pages, of the length of a recording and shorter: what longer
    ones left behind does not matter."""
    model = load_model(folder, device=CPU, dtype=torch.float32)
    config: Any = model.config
    rows = config.cache_rows
    if isinstance(rows, HeadRows):
        attention = TritonBackend.for_key_heads(config.num_heads, rows, CPU)
    else:
        width = config.qk_nope_head_dim + config.v_head_dim
        attention = TritonBackend.for_latents(config.num_heads, width, CPU)
    engine = Engine(model, CAPACITY, device=CPU, dtype=torch.float32, attention=attention)
    recordings: list[FreshPrompt] = []

    def record(runs: Mapping[int, RunPrompt], *, idle_slot: int, **_: object) -> FreshPrompts:
        recordings.extend(recording(size, run, idle_slot) for size, run in runs.items())
        return FreshPrompts(recordings)

    monkeypatch.setattr(engine_module, "record_fresh_prompts", record)
    monkeypatch.setattr(engine_module, "record_pieces", lambda *_, **__: Recordings())
    engine.record_graphs(GraphSizes([], SIZES))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    pages = tuple((1, index, 20 - index) for index in range(10))
    draw = torch.Generator().manual_seed(0)
    for replays, length in enumerate((16, 11, 9, 16, 8, 5, 1), start=1):
        ids = torch.randint(VOCAB_SIZE, (length,), generator=draw)
        prompt = PrefillChunk(1, 0, tuple(ids.tolist()), is_last=True)
        admitted = Admitted(1, SamplingParams(5), prompt.tokens)
        launched = engine.forward(StepPlan((), (), (prompt,), pages, (admitted,)))
        with torch.no_grad():
            expected = reference(ids[None]).logits[0, -1:]
        torch.testing.assert_close(launched.logits, expected, rtol=1e-4, atol=1e-5)
        assert sum(one.graph.replays for one in recordings) == replays

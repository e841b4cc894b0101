"""Images on a GPU: the CPU's tokens, with layers of the tower between the steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mla_router.worker.engine import engine as engine_module
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.runners.choose import RunnerChoice, RunnerKind, choose_runner
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.model.loader import load_model
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import StepPlan
from support.attention import torch_attention
from support.image_requests import image_script
from support.scripted_scheduler import Run, run
from support.tiny_llava import write_tiny_llava
from support.tiny_model import VOCAB_SIZE

pytestmark = pytest.mark.gpu

CAPACITY = Capacity(400, 4, 12, 320, image_tokens=80, image_tiles=3)
COUNT = 24


def serve(folder: Path, device: str, graphs: GraphSizes | None = None) -> Run:
    at = torch.device(device)
    model = load_model(folder, device=at, dtype=torch.float32)
    attention = torch_attention(model.config)
    engine = Engine(model, CAPACITY, device=at, dtype=torch.float32, attention=attention)
    if graphs is not None:
        engine.capture_graphs(graphs)
    return run(
        image_script(2, COUNT, aborts=False),
        capacity=CAPACITY,
        engine=engine,
        vocab_size=VOCAB_SIZE + 2,
        chunk_size=32,
    )


def test_the_gpu_gives_the_cpu_s_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short steps with images are piecewise graphs, long ones have none; so are batches of one and three tiles."""
    kinds = set()

    def choose(plan: StepPlan, sizes: GraphSizes) -> RunnerChoice:
        choice = choose_runner(plan, sizes)
        if plan.has_images and sizes.piecewise:
            kinds.add(choice.kind)
        return choice

    monkeypatch.setattr(engine_module, "choose_runner", choose)
    write_tiny_llava(tmp_path, processor=False)
    want = serve(tmp_path, "cpu")
    got = serve(tmp_path, "cuda", GraphSizes(piecewise=(16, 24), tiles=(1, 3)))
    for n in range(COUNT):
        assert got.channel.tokens(f"r{n}") == want.channel.tokens(f"r{n}")
    assert kinds == {RunnerKind.PIECEWISE, RunnerKind.EAGER}

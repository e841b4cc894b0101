"""Images on a GPU: the CPU's tokens, with layers of the tower between the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mla_router.worker.core import Capacity
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.runners.outputs import LayerOutput
from mla_router.worker.engine.runners.piecewise import PiecewiseGraph
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.model.loader import load_model
from support.attention import torch_attention
from support.image_requests import image_script
from support.scripted_scheduler import Run, run
from support.tiny_llava import write_tiny_llava
from support.tiny_model import VOCAB_SIZE

pytestmark = pytest.mark.gpu

CAPACITY = Capacity(400, 4, 12, 320, image_tokens=80, image_tiles=3)
COUNT = 40


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


@pytest.mark.parametrize("graphs", [None, GraphSizes(piecewise=(16, 64))])
def test_the_gpu_gives_the_cpu_s_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: GraphSizes | None
) -> None:
    """With piecewise graphs all steps with images are such graphs."""
    with_images = []
    replay = PiecewiseGraph.replay

    def counted(self: PiecewiseGraph, **step: Any) -> LayerOutput:
        with_images.append(bool(step["embedded"]))
        return replay(self, **step)

    monkeypatch.setattr(PiecewiseGraph, "replay", counted)
    write_tiny_llava(tmp_path, processor=False)
    want, got = serve(tmp_path, "cpu"), serve(tmp_path, "cuda", graphs)
    for n in range(COUNT):
        assert got.channel.tokens(f"r{n}") == want.channel.tokens(f"r{n}")
    assert any(with_images) == (graphs is not None)

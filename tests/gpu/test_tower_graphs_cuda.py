"""Graphs of the vision tower give the features of the same layers, kernel by kernel."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mla_router.worker.engine.runners.tower_graphs import TowerGraphs
from mla_router.worker.model.loader import load_model
from mla_router.worker.model.vision import VisionEncoder
from support.tiny_llava import write_tiny_llava

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


def drain(work: Generator[None, None, Tensor], pieces: int) -> Tensor:
    for _ in range(pieces - 1):
        next(work)
    with pytest.raises(StopIteration) as end:
        next(work)
    features: Tensor = end.value.value
    return features


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features(tmp_path: Path, dtype: torch.dtype) -> None:
    """Of other pixels in turns, in two sizes that share their memory. Results outlive the next replay."""
    write_tiny_llava(tmp_path, processor=False)
    encoder = load_model(tmp_path, device=DEVICE, dtype=dtype).vision
    assert encoder is not None
    with torch.inference_mode():
        check(encoder)


def check(encoder: VisionEncoder) -> None:
    graphs = TowerGraphs(encoder, DEVICE)
    graphs.capture([1, 3])
    torch.manual_seed(0)
    inputs = [torch.randn_like(encoder.empty(tiles, DEVICE)) for tiles in (1, 3, 2, 3, 1)]
    pieces = encoder.num_layers - 1
    found = [drain(graphs.layers(hidden), pieces) for hidden in inputs]
    wanted = [drain(encoder.layers(hidden), pieces) for hidden in inputs]
    for features, same in zip(found, wanted, strict=True):
        assert torch.equal(features, same)
    graphs.capture([])
    assert torch.equal(drain(graphs.layers(inputs[0]), pieces), wanted[0])

"""Schedulers and engines with images: the tokens of a request depend on its own images alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_router.worker.engine import images
from mla_router.worker.engine.images import HOST_SHARE, EncodedImages, LayerSeconds
from mla_router.worker.engine.runners.tower_graphs import TowerGraph, TowerGraphs
from mla_router.worker.messages import ToScheduler
from mla_router.worker.model.loader import load_model
from mla_router.worker.model.vision import VisionEncoder
from mla_router.worker.step.engine import Capacity
from support.attention import torch_attention
from support.checked_engine import CheckedEngine
from support.corners import corners
from support.fake_piecewise import fake_piecewise_graphs
from support.image_requests import image_script
from support.scripted_scheduler import Run, assert_nothing_is_allocated, run
from support.tiny_llava import write_tiny_llava
from support.tiny_model import COMMON, VOCAB_SIZE

ROOMY = Capacity(4000, 4, 12, 320, image_tokens=1000, image_tiles=16)
COUNT = 16
HIDDEN = COMMON["hidden_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    write_tiny_llava(folder, processor=False)
    return folder


def serve(
    folder: Path,
    script: dict[int, list[ToScheduler]],
    capacity: Capacity,
    graphs: Sequence[int] = (),
    **how: object,
) -> Run:
    """`graphs`: sizes of fake piecewise graphs."""
    device = torch.device("cpu")
    model = load_model(folder, device=device, dtype=torch.float32)
    engine = CheckedEngine(
        model,
        capacity,
        device=device,
        dtype=torch.float32,
        attention=torch_attention(model.config),
    )
    fakes = fake_piecewise_graphs(engine, graphs)
    settings: dict[str, object] = {"chunk_size": 32} | how
    outcome = run(
        script,
        capacity=capacity,
        engine=engine,
        vocab_size=VOCAB_SIZE + 2,
        **settings,  # type: ignore[arg-type]
    )
    assert all(fake.with_images for fake in fakes)
    return outcome


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, list[int]]:
    """The tokens of each request, alone and without a prefix cache."""
    outcome = serve(
        folder,
        {1000 * at: [message] for at, message in enumerate(requests())},
        ROOMY,
        overlap=False,
        chunk_size=320,
        use_prefix_cache=False,
    )
    return {f"r{n}": outcome.channel.tokens(f"r{n}") for n in range(COUNT)}


def requests() -> list[ToScheduler]:
    script = image_script(1, COUNT, aborts=False)
    return [message for messages in script.values() for message in messages]


@pytest.mark.parametrize(
    ("tight", "overlap"),
    corners(
        [
            {},
            {"num_pages": 60},  # requests are retracted
            {"image_tokens": 60, "image_tiles": 2},  # two images at a time
            {"num_pages": 60, "image_tokens": 1, "image_tiles": 1},  # one request with images
        ],
        [True, False],
    ),
)
def test_tokens_of_a_busy_scheduler(
    folder: Path, wanted: dict[str, list[int]], tight: dict[str, int], overlap: bool
) -> None:
    outcome = serve(
        folder,
        image_script(1, COUNT, aborts=False),
        replace(ROOMY, **tight),
        overlap=overlap,
        schedule_conservativeness=0.01,
    )
    for rid, tokens in wanted.items():
        assert outcome.channel.tokens(rid) == tokens, rid
    stats = outcome.scheduler.stats()
    assert stats.cached_tokens > 0
    assert stats.retracted > 0 or tight != {"num_pages": 60}
    assert_nothing_is_allocated(outcome)


def test_tokens_of_piecewise_graphs(folder: Path, wanted: dict[str, list[int]]) -> None:
    """Images replace embeddings between two graphs, of steps with rows of padding, of text and of decode slots."""
    outcome = serve(folder, image_script(1, COUNT, aborts=False), ROOMY, graphs=(16, 32))
    for rid, tokens in wanted.items():
        assert outcome.channel.tokens(rid) == tokens, rid


class FakeTowerGraph:
    """One layer of a tower without a GPU: computes at each replay. The last one overwrites the features."""

    def __init__(self, encoder: VisionEncoder, graph: TowerGraph, last: bool) -> None:
        self.encoder, self.graph, self.last = encoder, graph, last

    def replay(self) -> None:
        if self.last:
            work = self.encoder.layers(self.graph.hidden)
            with pytest.raises(StopIteration) as end:
                for _ in range(self.encoder.num_layers):
                    next(work)
            self.graph.features.copy_(end.value.value)


def fake_tower_graphs(encoder: VisionEncoder, sizes: Sequence[int]) -> TowerGraphs:
    device = torch.device("cpu")
    graphs = TowerGraphs(encoder, device)
    for size in sizes:
        hidden = encoder.empty(size, device)
        features = torch.empty(size, encoder.format.tile_tokens, HIDDEN)
        layers: list[Any] = []
        graph = graphs._graphs[size] = TowerGraph(hidden, layers, features)
        count = encoder.num_layers - 1
        layers += [FakeTowerGraph(encoder, graph, last=n == count - 1) for n in range(count)]
    return graphs


def test_tokens_of_tower_graphs(
    folder: Path, wanted: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of an image that come in two batches outlive the second one."""
    monkeypatch.setattr(
        images, "TowerGraphs", lambda encoder, _: fake_tower_graphs(encoder, (1, 2))
    )
    tight = replace(ROOMY, image_tiles=2)
    outcome = serve(folder, image_script(1, COUNT, aborts=False), tight)
    for rid, tokens in wanted.items():
        assert outcome.channel.tokens(rid) == tokens, rid


def test_aborts(folder: Path) -> None:
    for seed in range(3):
        capacity = replace(ROOMY, num_pages=90, image_tokens=60, image_tiles=2)
        outcome = serve(folder, image_script(seed, COUNT, aborts=True), capacity)
        for n in range(COUNT):
            assert outcome.channel.reason(f"r{n}") in ("length", "stop", "abort")
        assert_nothing_is_allocated(outcome)
        assert len(outcome.scheduler.images) == 0


class Event:
    """A CUDA event that the device has reached."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        """Records nothing."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: Event) -> float:
        return 4.0  # ms


@pytest.mark.parametrize(("host_s", "expected"), [(0.001, 0.002), (0.01, 0.005 * HOST_SHARE)])
def test_a_layer_holds_up_steps_by_device_or_host_time(
    monkeypatch: pytest.MonkeyPatch, host_s: float, expected: float
) -> None:
    """A piece of two layers takes the device 4 ms."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = count(step=host_s)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    batch = EncodedImages(iter([None] * 5), layers=5, tiles=3, measured=LayerSeconds())
    assert batch.layer_s == 0
    batch.launch_measured(2)
    assert batch.layer_s == pytest.approx(expected)
    assert batch.measured.of_tile == pytest.approx(0.002 / 3)
    assert batch.layers_left == 3 and not batch.done()
    batch.launch_measured(9)
    assert batch.done()

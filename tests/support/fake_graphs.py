"""Decode graphs without a GPU: each fake graph calls the function that a real one would have captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.runners import decode_graph
from mla_router.worker.engine.runners.decode_graph import DecodeGraph, DecodeGraphRunner
from mla_router.worker.engine.runners.outputs import Decode, HeadOutput
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.kernels.kv_cache.out_cache_loc import LookedUp


class FakeGraph:
    """Calls `decode` again at each replay."""

    def __init__(self, decode: Decode, rows: LookedUp) -> None:
        self._decode, self._rows = decode, rows
        self.output = decode(rows)
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for kept, new in zip(self.output, self._decode(self._rows), strict=True):
            kept.copy_(new)


def fake_capture_sizes(
    kind: str, capture: Callable[[int, Any], Any], sizes: Sequence[int], device: torch.device
) -> dict[int, Any]:
    """Replaces `capture_sizes`, which asks a GPU for its memory."""
    del kind, device
    return {size: capture(size, None) for size in sizes}


def fake_decode_graphs(
    engine: Engine, sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> list[FakeGraph]:
    """Gives `engine`, on the CPU, fake decode graphs of `sizes`, and returns them."""
    graphs: list[FakeGraph] = []

    def capture(_: DecodeGraphRunner, decode: Decode, size: int, pool: object) -> DecodeGraph:
        del pool
        looked_up = engine.slots.idle_rows(size)
        graphs.append(FakeGraph(decode, looked_up))
        return DecodeGraph(graphs[-1], looked_up, HeadOutput(*graphs[-1].output))  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(decode_graph, "capture_sizes", fake_capture_sizes)
        patch.setattr(DecodeGraphRunner, "capture_size", capture)
        engine.capture_graphs(GraphSizes(decode=sizes))
    return graphs

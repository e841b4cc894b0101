"""Decode graphs without a GPU: in the place of each stands what would be captured in it."""

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
from mla_router.worker.kernels.kv_cache.locations import LookedUp


class Unrecorded:
    """Decodes again where a graph would be replayed."""

    def __init__(self, decode: Decode, rows: LookedUp) -> None:
        self._decode, self._rows = decode, rows
        self.output = decode(rows)
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for kept, new in zip(self.output, self._decode(self._rows), strict=True):
            kept.copy_(new)


def capture_each(
    kind: str, capture: Callable[[int, Any], Any], sizes: Sequence[int], device: torch.device
) -> dict[int, Any]:
    """In the place of `capture_sizes`, which asks a GPU for memory."""
    del kind, device
    return {size: capture(size, None) for size in sizes}


def replace_recording(
    engine: Engine, sizes: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> list[Unrecorded]:
    """Give `engine`, on the CPU, such graphs of `sizes`."""
    graphs: list[Unrecorded] = []

    def capture(_: DecodeGraphRunner, decode: Decode, size: int, pool: object) -> DecodeGraph:
        del pool
        looked_up = engine.slots.look_up(engine.slots.idle_rows(size))
        graphs.append(Unrecorded(decode, looked_up))
        return DecodeGraph(graphs[-1], looked_up, HeadOutput(*graphs[-1].output))  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(decode_graph, "capture_sizes", capture_each)
        patch.setattr(DecodeGraphRunner, "capture_size", capture)
        engine.capture_graphs(GraphSizes(decode=sizes))
    return graphs

"""Decode graphs without a GPU: each fake graph calls the function that a real one would have captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.runners import decode_graph
from mla_router.worker.engine.runners.outputs import HeadOutput
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.engine.speculation import extension, slot_drafts


class FakeGraph:
    """Calls `run` again at each replay."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run
        self.output = run()
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        new = self._run()
        if isinstance(self.output, Tensor):
            self.output.copy_(new)
        elif self.output is not None:
            for kept, replayed in zip(self.output, new, strict=True):
                kept.copy_(replayed)


def fake_capture_sizes(
    kind: str, capture: Callable[[int, Any], Any], sizes: Sequence[int]
) -> dict[int, Any]:
    """Replaces `capture_sizes`, which needs a GPU."""
    del kind
    return {size: capture(size, None) for size in sizes}


def fake_decode_graphs(
    engine: Engine,
    sizes: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
    verify: Sequence[int] = (),
    drafts: Sequence[int] = (),
) -> list[FakeGraph]:
    """Gives `engine`, on the CPU, fake graphs: decode graphs of `sizes`, which it returns, those of steps that verify drafts,
    and the drafter's."""
    graphs: list[FakeGraph] = []

    def capture(
        run: Callable[[], Any], pool: object, device: torch.device
    ) -> tuple[FakeGraph, Any]:
        del pool, device
        graph = FakeGraph(run)
        if isinstance(graph.output, HeadOutput):
            graphs.append(graph)
        return graph, graph.output

    with monkeypatch.context() as patch:
        for module in (decode_graph, extension, slot_drafts):
            patch.setattr(module, "capture_sizes", fake_capture_sizes)
            patch.setattr(module, "capture", capture)
            patch.setattr(module, "alias", lambda tensor: tensor, raising=False)
        engine.capture_graphs(GraphSizes(decode=sizes, verify=verify, drafts=drafts))
    return graphs

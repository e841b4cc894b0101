"""CUDA graphs of the vision tower for few tiles: one of each layer, so that a batch is still launched in pieces.

A layer of few tiles takes the host longer to launch, kernel by kernel, than the GPU to compute. The embeddings of the
pixels, before the layers, are launched kernel by kernel: they depend on an image's colour values.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_router.worker.engine.runners.capture import capture_sizes
from mla_router.worker.model.vision import VisionEncoder

# Maximum number of tiles of a graph. On an H100 LLaVA-OneVision-7B's tower takes 11.9, 14.3, 14.5 and 18.8 ms for 1, 2,
# 4 and 8 tiles kernel by kernel, and 3.8, 6.0, 9.3 and 17.6 in graphs
MAX_TILES = 4


@dataclass(frozen=True, slots=True)
class TowerGraph:
    """The captured graphs of one number of tiles."""

    hidden: Tensor  # input, as `VisionEncoder.layers`
    layers: Sequence[torch.cuda.CUDAGraph]
    features: Tensor  # output of the last graph


class TowerGraphs:
    """Captures and replays the graphs of a vision encoder."""

    def __init__(self, encoder: VisionEncoder, device: torch.device) -> None:
        self._encoder = encoder
        self._device = device
        self._graphs: dict[int, TowerGraph] = {}

    def capture(self, sizes: Sequence[int]) -> None:
        """Replaces all captured graphs by graphs of `sizes` tiles."""
        self._graphs = {}
        if not sizes:
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._graphs = capture_sizes(
            "tower graph",
            lambda size, pool: self._capture_size(size, stream, pool),
            sizes,
        )

    def _capture_size(self, size: int, stream: torch.cuda.Stream, pool: Any) -> TowerGraph:
        hidden = self._encoder.empty(size, self._device).zero_()
        for _ in self._encoder.layers(hidden):
            pass  # sets up libraries, which a capture does not permit
        torch.cuda.synchronize(self._device)
        graphs: list[torch.cuda.CUDAGraph] = []
        work, features = self._encoder.layers(hidden), None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            while features is None:
                graphs.append(torch.cuda.CUDAGraph())
                graphs[-1].capture_begin(pool=pool)
                try:
                    next(work)
                except StopIteration as end:
                    features = end.value
                graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return TowerGraph(hidden, graphs, features)

    def layers(self, hidden: Tensor) -> Generator[None, None, Tensor]:
        """Launches `VisionEncoder.layers`, in graphs if there are some for this many tiles. One batch runs at a time:
        the graphs of all sizes share their memory."""
        graph = self._graphs.get(len(hidden))
        if graph is None:
            return (yield from self._encoder.layers(hidden))
        graph.hidden.copy_(hidden)
        for layer in graph.layers[:-1]:
            layer.replay()
            yield
        graph.layers[-1].replay()
        return graph.features.clone()

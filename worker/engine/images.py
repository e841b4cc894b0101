"""Encodes images between the steps, and keeps their embeddings on the device.

A batch of tiles is launched in pieces of a few layers of the tower, in the stream of the steps: the next step waits for
a piece, not for the batch. Batches of few tiles run in CUDA graphs (`runners/tower_graphs.py`). On a CPU a batch runs
at once. The scheduler chooses the batches and the pieces, and bounds the kept embeddings (`scheduler/images.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from mla_router.worker.engine.runners.tower_graphs import TowerGraphs
from mla_router.worker.images import ImageInfo, ImagePart
from mla_router.worker.model.vision import VisionEncoder
from mla_router.worker.step.plan import PrefillChunk

# Share of the host's time for a layer that holds up the steps: it launches a piece while the device computes the step
# before
HOST_SHARE = 0.6


class LayerSeconds(NamedTuple):
    """Measured seconds of a layer."""

    of_tile: float = 0.0  # of the device, for one tile
    of_host: float = 0.0  # to launch it, for any number of tiles


class Piece(NamedTuple):
    """Layers that were launched together, between two events."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    layers: int
    host_s: float  # to launch them


class EncodedImages:
    """A batch of tiles, of which some layers are launched. Implements `PendingImages`."""

    def __init__(
        self, work: Iterator[None], layers: int, tiles: int, measured: LayerSeconds
    ) -> None:
        """`work`: launches a layer at each of `layers` steps. `measured`: before."""
        self.layers_left = layers
        self._work = work
        self._tiles = tiles
        self._measured = measured
        self._pieces: deque[Piece] = deque()  # launched and not measured

    @property
    def layer_s(self) -> float:
        measured = self.measured
        return max(measured.of_tile * self._tiles, measured.of_host * HOST_SHARE)

    @property
    def measured(self) -> LayerSeconds:
        while self._pieces and self._pieces[0].end.query():  # type: ignore[no-untyped-call]
            piece = self._pieces.popleft()
            seconds: float = piece.begin.elapsed_time(piece.end) / 1e3
            self._measured = LayerSeconds(
                seconds / piece.layers / self._tiles, piece.host_s / piece.layers
            )
        return self._measured

    def done(self) -> bool:
        return not self.layers_left and (not self._pieces or self._pieces[-1].end.query())  # type: ignore[no-untyped-call]

    def launch(self, layers: int) -> None:
        """Launches up to `layers` more layers."""
        layers = min(layers, self.layers_left)
        self.layers_left -= layers
        for _ in range(layers):
            next(self._work)

    def launch_measured(self, layers: int) -> None:
        """Launches like `launch`, between two events of a GPU that measure the layers."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before, began = self.layers_left, time.perf_counter()
        begin.record()
        self.launch(layers)
        end.record()
        host_s = time.perf_counter() - began
        self._pieces.append(Piece(begin, end, before - self.layers_left, host_s))


class ImageStore:
    """The embeddings of images by `ImageInfo.key`."""

    def __init__(self, encoder: VisionEncoder | None, device: torch.device) -> None:
        """`encoder`: None for a model without images, which encodes none."""
        self._encoder = encoder
        self._device = device
        self._graphs = None if encoder is None else TowerGraphs(encoder, device)
        self._batch: EncodedImages | None = None
        self._features: dict[int, list[Tensor]] = {}  # of images with tiles to come
        self._embeddings: dict[int, Tensor] = {}

    def capture_graphs(self, sizes: Sequence[int]) -> None:
        """Captures graphs of the tower for these numbers of tiles, in place of all earlier ones."""
        if self._graphs is not None:
            self._graphs.capture(sizes)

    def encode(self, parts: Sequence[ImagePart], dropped: Iterable[int] = ()) -> EncodedImages:
        """Drops the embeddings of the keys `dropped` and begins a batch with all tiles of `parts`. After the last part of
        an image its embeddings are kept."""
        for key in dropped:
            self._embeddings.pop(key, None)
            self._features.pop(key, None)
        before = LayerSeconds() if self._batch is None else self._batch.measured
        assert self._encoder is not None, "a model without images"
        alike = [[*some] for _, some in groupby(parts, key=lambda part: _colours(part.info))]
        layers, tiles = len(alike) * self._encoder.num_layers, sum(map(self._num_tiles, parts))
        self._batch = EncodedImages(self._layers(alike), layers, tiles, before)
        if self._device.type == "cpu":
            self._batch.launch(layers)
        return self._batch

    def encode_layers(self, count: int) -> None:
        """Launches up to `count` more layers of the batch."""
        assert self._batch is not None, "layers of no batch"
        self._batch.launch_measured(count)

    def _layers(self, alike: Sequence[Sequence[ImagePart]]) -> Iterator[None]:
        """Launches a layer at each step. Parts with the same colour values run together."""
        for parts in alike:
            yield from self._layers_of(parts)
            yield

    def _layers_of(self, parts: Sequence[ImagePart]) -> Generator[None]:
        """Launches the layers of `parts`, and keeps the embeddings of those images that are whole then."""
        assert self._encoder is not None and self._graphs is not None, "a model without images"
        size = self._encoder.tile_size
        # Pinned: the host would wait for the steps before any other copy
        raw = torch.frombuffer(bytearray().join(part.tiles for part in parts), dtype=torch.uint8)
        if self._device.type == "cuda":
            raw = raw.pin_memory()
        pixels = raw.view(-1, 3, size, size).to(self._device, non_blocking=True)
        hidden = self._encoder.embed(pixels, parts[0].info)
        yield
        features = yield from self._graphs.layers(hidden)
        counts = [self._num_tiles(part) for part in parts]
        for part, own in zip(parts, torch.split(features, counts), strict=True):
            key, tiles = part.info.key, self._features.setdefault(part.info.key, [])
            tiles.append(own)
            if sum(map(len, tiles)) == part.info.num_tiles:
                embeddings = self._encoder.arrange(torch.cat(tiles), part.info)
                assert len(embeddings) == part.info.num_tokens, f"{embeddings.shape} {part.info}"
                self._embeddings[key] = embeddings
                del self._features[key]

    def _num_tiles(self, part: ImagePart) -> int:
        assert self._encoder is not None, "a model without images"
        return len(part.tiles) // (3 * self._encoder.tile_size**2)

    def rows(self, first: int, chunks: Sequence[PrefillChunk]) -> Iterator[tuple[int, Tensor]]:
        """Yields `ForwardBatch.embedded` for `chunks`, whose rows begin at `first`."""
        for chunk in chunks:
            for image in chunk.images:
                embeddings = self._embeddings[image.key]
                yield first + image.row, embeddings[image.start : image.start + image.count]
            first += len(chunk.tokens)


def _colours(info: ImageInfo) -> tuple[object, ...]:
    return info.scale, info.mean, info.std

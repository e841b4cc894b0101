"""Encodes images beside the steps, and keeps their embeddings on the device.

A batch of tiles runs on a second stream of a GPU, so that decode steps do not wait for it. On a CPU it runs at once. The
scheduler bounds the batches and the kept embeddings (`scheduler/images.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby

import torch
from torch import Tensor

from mla_router.worker.core import ImageInfo, ImagePart, PrefillChunk
from mla_router.worker.model.vision import VisionEncoder


class EncodedImages:
    """A launched batch. Implements `PendingImages`."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]


class ImageStore:
    """The embeddings of images by `ImageInfo.key`."""

    def __init__(self, encoder: VisionEncoder | None, device: torch.device) -> None:
        """`encoder`: None for a model without images, which encodes none."""
        self._encoder = encoder
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._features: dict[int, list[Tensor]] = {}  # of images with tiles to come
        self._embeddings: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}

    def encode(self, parts: Sequence[ImagePart], dropped: Iterable[int] = ()) -> EncodedImages:
        """Drops the embeddings of the keys `dropped` and launches the tower for all tiles of `parts`. After the last
        part of an image its embeddings are kept."""
        for key in dropped:
            self._embeddings.pop(key, None)
            self._features.pop(key, None)
        event = None if self._stream is None else torch.cuda.Event()  # type: ignore[no-untyped-call]
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for _, alike in groupby(parts, key=lambda part: _colours(part.info)):
                self._encode([*alike], event)
            if event is not None:
                event.record()
        return EncodedImages(event)

    def _encode(self, parts: Sequence[ImagePart], event: torch.cuda.Event | None) -> None:
        """Encodes parts with the same colour values in one batch."""
        assert self._encoder is not None, "a model without images"
        size = self._encoder.tile_size
        raw = torch.frombuffer(bytearray().join(part.tiles for part in parts), dtype=torch.uint8)
        pixels = raw.view(-1, 3, size, size).to(self._device)
        counts = [len(part.tiles) // (3 * size * size) for part in parts]
        features = self._encoder.encode(pixels, parts[0].info)
        for part, own in zip(parts, torch.split(features, counts), strict=True):
            key, tiles = part.info.key, self._features.setdefault(part.info.key, [])
            tiles.append(own)
            if sum(map(len, tiles)) == part.info.num_tiles:
                embeddings = self._encoder.arrange(torch.cat(tiles), part.info)
                assert len(embeddings) == part.info.num_tokens, f"{embeddings.shape} {part.info}"
                self._embeddings[key] = embeddings, event
                del self._features[key]

    def rows(self, first: int, chunks: Sequence[PrefillChunk]) -> Iterator[tuple[int, Tensor]]:
        """Yields `ForwardBatch.embedded` for `chunks`, whose rows begin at `first`."""
        for chunk in chunks:
            for image in chunk.images:
                embeddings, event = self._embeddings[image.key]
                if event is not None:
                    current = torch.cuda.current_stream(self._device)
                    current.wait_event(event)
                    embeddings.record_stream(current)
                yield first + image.row, embeddings[image.start : image.start + image.count]
            first += len(chunk.tokens)


def _colours(info: ImageInfo) -> tuple[object, ...]:
    return info.scale, info.mean, info.std

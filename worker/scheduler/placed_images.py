"""The images in a prompt: their keys in prefix caches, and their rows in a chunk."""

from __future__ import annotations

from collections.abc import Sequence

from mla_router.worker.images import PlacedImage
from mla_router.worker.step.plan import ImageRows


def with_keys(prompt: list[int], images: Sequence[PlacedImage]) -> list[int]:
    """Returns `prompt` with the keys of images in place of their placeholders, so that prefix caches tell images apart."""
    tokens = list(prompt)
    for placed in images:
        key, count = placed.image.info.key, placed.image.info.num_tokens
        tokens[placed.start : placed.start + count] = [key] * count
    return tokens


def rows_between(images: Sequence[PlacedImage], start: int, end: int) -> tuple[ImageRows, ...]:
    """Returns the rows of `images` in the chunk from position `start` to `end`."""
    rows = []
    for placed in images:
        info = placed.image.info
        first = max(start, placed.start)
        count = min(end, placed.start + info.num_tokens) - first
        if count > 0:
            rows.append(ImageRows(first - start, info.key, first - placed.start, count))
    return tuple(rows)

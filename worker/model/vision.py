"""The interface of models that take images."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator

import torch
from torch import Tensor, nn

from mla_router.worker.images import ImageFormat, ImageInfo


class VisionEncoder(nn.Module):
    """Computes the embeddings of images and videos, which take the place of those of their placeholder tokens.

    An image comes as equal square tiles, and a video as frames. The tower sees each tile alone, so that one batch may
    have tiles of several images, and an image may be in several batches.
    """

    tile_size: int  # pixels of an edge
    format: ImageFormat
    num_layers: int  # `embed`, and the pieces of `layers`

    @abstractmethod
    def embed(self, pixels: Tensor, info: ImageInfo) -> Tensor:
        """Returns the input of `layers` for tiles [N, 3, tile_size, tile_size] uint8, which are all of images with the
        colour values of `info`. Does not wait for the device."""

    @abstractmethod
    def empty(self, tiles: int, device: torch.device) -> Tensor:
        """Returns memory for the input of `layers`, [tiles, ...]."""

    @abstractmethod
    def layers(self, hidden: Tensor) -> Generator[None, None, Tensor]:
        """Launches the tower in `num_layers` - 1 pieces: yields after each but the last, and does not wait for the
        device. Launches depend on the shape of `hidden` alone. Returns features [N, tile_tokens, hidden_size]."""

    @abstractmethod
    def arrange(self, features: Tensor, info: ImageInfo) -> Tensor:
        """Returns the embeddings [info.num_tokens, hidden_size] of one image from the features of all its tiles."""

"""Images on their way from the server to the vision tower."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ImageKind(StrEnum):
    TILED = "tiled"  # one image of any resolution: a small copy of it, then tiles
    SINGLE = "single"  # one of several images: one tile
    VIDEO = "video"  # its tiles are frames


class ImageFormat(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The images that a model takes."""

    image_token: int  # id of the placeholder of an image
    video_token: int
    tile_tokens: int  # placeholders of a tile
    aspect_ratio: str  # the rule for the number of tiles, in transformers' words


class ImageInfo(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image or a video without its pixels."""

    # A hash of the content beyond the vocabulary: the token id of its placeholders in prefix caches
    key: int
    kind: ImageKind
    num_tokens: int  # placeholders
    num_tiles: int
    height: int  # pixels of the original
    width: int
    # The tower takes (value * scale - mean) / std of each colour
    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class Image(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image or a video, resized and cut into tiles."""

    info: ImageInfo
    tiles: bytes  # [num_tiles, 3, tile_size, tile_size] uint8


class PlacedImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image in a prompt, whose placeholders are `info.num_tokens` tokens from `start` on."""

    image: Image
    start: int


class ImagePart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive tiles of an image. Its parts are encoded in order."""

    info: ImageInfo
    tiles: bytes  # [N, 3, tile_size, tile_size] uint8

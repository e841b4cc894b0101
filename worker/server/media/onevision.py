"""Tiles of images and frames of videos for LLaVA-OneVision, by transformers' processor.

The API processes run without torch, so the processor is the one that uses Pillow. It resizes and cuts; the vision tower
scales the colours, so that pixels travel as bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mla_router.worker.images import Image, ImageFormat, ImageInfo, ImageKind

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


class OnevisionProcessor:
    def __init__(self, folder: Path, format: ImageFormat, vocab_size: int) -> None:
        """Raises ImportError without Pillow, OSError without the processor's config in `folder`."""
        import PIL.Image
        from transformers import LlavaOnevisionProcessor
        from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
            LlavaOnevisionImageProcessorPil,
        )

        self._images: Any = LlavaOnevisionImageProcessorPil.from_pretrained(
            str(folder), local_files_only=True
        )
        # It counts placeholders. Its constructor wants a video processor, which needs torch.
        self._counter: Any = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
        self._counter.image_processor = self._images
        self._counter.num_image_tokens = format.tile_tokens
        self._counter.vision_aspect_ratio = format.aspect_ratio
        self._counter.vision_feature_select_strategy = "full"
        self._counter.image_token = self._counter.video_token = "."
        self._first_key = vocab_size
        self._beside = PIL.Image.new("RGB", (1, 1))

    def process(self, picture: Picture, *, alone: bool) -> Image:
        """Returns the tiles of an image. One that is `alone` in its request has as many as its resolution needs, one of
        several a single one."""
        batch = [[picture]] if alone else [[picture, self._beside]]
        made = self._images(batch, do_rescale=False, do_normalize=False)
        tiles = made["pixel_values"][0]
        height, width = made["image_sizes"][0]
        kind = ImageKind.TILED if alone else ImageKind.SINGLE
        return self._image(
            tiles, kind, len(self._counter.replace_image_token(made, 0)), height, width
        )

    def process_video(self, frames: Sequence[Picture]) -> Image:
        """Returns the frames as tiles, of the size of tiles whatever their ratio of edges."""
        from transformers.image_utils import SizeDict

        processor = self._images
        size = SizeDict(height=processor.size["height"], width=processor.size["width"])
        tiles = np.stack(
            [
                processor.resize(
                    np.asarray(frame.convert("RGB")).transpose(2, 0, 1),
                    size,
                    resample=processor.resample,
                )
                for frame in frames
            ]
        )
        count = len(self._counter.replace_video_token({"pixel_values_videos": [tiles]}, 0))
        return self._image(tiles, ImageKind.VIDEO, count, frames[0].height, frames[0].width)

    def _image(
        self, tiles: NDArray[np.uint8], kind: ImageKind, tokens: int, height: int, width: int
    ) -> Image:
        assert tiles.dtype == np.uint8, f"tiles of {tiles.dtype}"
        data = np.ascontiguousarray(tiles).tobytes()
        info = ImageInfo(
            key=self._first_key + content_hash(data, kind, height, width),
            kind=kind,
            num_tokens=tokens,
            num_tiles=len(tiles),
            height=height,
            width=width,
            scale=float(self._images.rescale_factor),
            mean=tuple(self._images.image_mean),
            std=tuple(self._images.image_std),
        )
        return Image(info, data)


def content_hash(tiles: bytes, *shape: object) -> int:
    """Returns 62 bits of SHA-256: nobody can find another image with the hash of a given one."""
    digest = hashlib.sha256(tiles)
    digest.update(repr(shape).encode())
    return int.from_bytes(digest.digest()[:8], "big") >> 2

"""Decodes images within limits that hold before any pixel is decoded."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from mla_router.worker.server.errors import InvalidField

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_EDGE = 8192  # pixels; several images are padded to squares
MAX_PIXELS = 1 << 25
MAX_OF_ALL = 1 << 27  # of the images of a request: some seconds


def decode_image(data: bytes, field: str, max_pixels: int = MAX_PIXELS) -> Image:
    """Returns the image in RGB, turned as its EXIF data says. Of an animation it is the first frame. `max_pixels`: those
    that the request may still have. Raises InvalidField."""
    from PIL import Image, ImageOps

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)  # reads the head only
        width, height = image.size
    except Image.DecompressionBombError:  # Pillow's own limit
        raise InvalidField(field, f"has more than {MAX_PIXELS} pixels") from None
    except Exception:  # noqa: BLE001 (Pillow raises whatever the format's reader raised)
        raise InvalidField(field, f"not an image; supported are {', '.join(FORMATS)}") from None
    if max(width, height) > MAX_EDGE or width * height > MAX_PIXELS:
        raise InvalidField(
            field,
            f"{width} x {height} pixels are more than {MAX_EDGE} on an edge or {MAX_PIXELS} in all",
        )
    if width * height > max_pixels:
        raise InvalidField(field, f"the images of a request have more than {MAX_OF_ALL} pixels")
    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception:  # noqa: BLE001 (as above)
        raise InvalidField(field, "the image is damaged or cut off") from None

"""Images that are refused before their pixels are decoded, and images that are damaged."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import pytest

pytest.importorskip("PIL", reason="needs Pillow: requirements.lock has it")

from PIL import Image

from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.media.decode import MAX_EDGE, MAX_PIXELS, decode_image
from mla_router.worker.server.media.source import MAX_BYTES, Source

FIELD = "messages[0].content[1].image_url"


def written(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)  # type: ignore[arg-type]
    return file.getvalue()


def png_head(width: int, height: int) -> bytes:
    """Returns a PNG that says it has so many pixels, with data for none."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"")),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_formats(format: str) -> None:
    image = Image.new("RGB", (20, 10), (250, 120, 10))
    got = decode_image(written(image, format), FIELD)
    assert (got.size, got.mode) == ((20, 10), "RGB")
    pixel = got.getpixel((3, 3))
    assert isinstance(pixel, tuple)
    assert max(abs(a - b) for a, b in zip(pixel, (250, 120, 10), strict=True)) < 12


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = Image.new(mode, (4, 4))
    data = written(image, "JPEG" if mode == "CMYK" else "PNG")
    assert decode_image(data, FIELD).mode == "RGB"


def test_a_photo_is_turned_as_its_exif_data_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    photo = written(Image.new("RGB", (30, 10)), "JPEG", exif=exif)
    assert decode_image(photo, FIELD).size == (10, 30)


REFUSED = {
    "empty": (b"", "not an image"),
    "text": (b"hello", "not an image"),
    "a cut head": (written(Image.new("RGB", (9, 9)))[:20], "not an image"),
    "another format": (
        written(Image.new("RGB", (9, 9)), "TIFF"),
        "not an image; supported are PNG",
    ),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    "a cut end": (written(Image.effect_noise((99, 99), 50))[:-400], "damaged or cut off"),
    "no data": (png_head(64, 64), "damaged or cut off"),
    "a bomb": (png_head(60_000, 60_000), f"has more than {MAX_PIXELS} pixels"),
    "a long bomb": (png_head(MAX_EDGE + 1, 1), f"{MAX_EDGE + 1} x 1 pixels"),
    "a square bomb": (png_head(8000, MAX_PIXELS // 8000 + 1), f"or {MAX_PIXELS} in all"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    data, message = REFUSED[name]
    with pytest.raises(InvalidField, match=message) as caught:
        decode_image(data, FIELD)
    assert caught.value.body.error.param == FIELD


def test_data_urls_and_base64() -> None:
    text = base64.b64encode(b"abc").decode()
    for url in (text, f"data:image/png;base64,{text}", f"data:;base64,{text}"):
        assert Source(url, FIELD).read() == b"abc"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png,abc", "must be data:TYPE;base64,DATA"),
        ("data:image/png;base64", "must be data:TYPE;base64,DATA"),
        ("data:image/png;base64,a b", "neither a data: URL nor base64"),
        ("data:image/png;base64,äö", "neither a data: URL nor base64"),
        ("A" * (MAX_BYTES["image"] * 4 // 3 + 8), "has more than 20971520 bytes"),
    ],
)
def test_refused_urls(url: str, message: str) -> None:
    with pytest.raises(InvalidField, match=message) as caught:
        Source(url, FIELD).read()
    assert caught.value.body.error.param == FIELD

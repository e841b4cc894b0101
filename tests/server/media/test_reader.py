"""Images of a request: their placeholders, keys and limits."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path

import pytest

pytest.importorskip("PIL", reason="needs Pillow: requirements.lock has it")

from PIL import Image

from mla_router.worker.images import Image as Tiles
from mla_router.worker.images import ImageFormat, ImageKind
from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.media.reader import MediaReader
from mla_router.worker.server.media.source import Kind, Source
from support.tiny_llava import VOCAB_SIZE, write_tiny_llava

VOCABULARY = VOCAB_SIZE + 2
TOKEN = VOCAB_SIZE
FIELDS: dict[Kind, str] = {"image": "messages", "video": "video_data"}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> MediaReader:
    folder: Path = tmp_path_factory.mktemp("llava")
    write_tiny_llava(folder)
    return MediaReader(folder, ImageFormat(TOKEN, TOKEN + 1, 9, "anyres_max_4"), VOCABULARY)


def source(colour: int, size: tuple[int, int] = (60, 50), format: str = "PNG") -> Source:
    file = io.BytesIO()
    Image.new("RGB", size, (colour, 0, 0)).save(file, format)
    return Source(base64.b64encode(file.getvalue()).decode(), "image_data[0]")


def read(reader: MediaReader, *sources: Source) -> list[Tiles]:
    return asyncio.run(reader.read(sources, context_length=2048))


def test_the_key_is_that_of_the_content(reader: MediaReader) -> None:
    """Not of the file's format. An image alone has other tiles than one of several."""
    (one,), (other,) = read(reader, source(1)), read(reader, source(2))
    assert one.info.key != other.info.key
    assert min(one.info.key, other.info.key) >= VOCABULARY
    assert max(one.info.key, other.info.key) < 1 << 63
    assert read(reader, source(1, format="BMP"))[0].info.key == one.info.key
    both = read(reader, source(1), source(1))
    assert both[0].info.key == both[1].info.key != one.info.key
    assert [image.info.kind for image in (one, *both)] == [
        ImageKind.TILED,
        ImageKind.SINGLE,
        ImageKind.SINGLE,
    ]


def test_placeholders_become_as_many_as_the_tokens(reader: MediaReader) -> None:
    sources = [source(1), source(2)]
    images = read(reader, *sources)
    prompt, placed = reader.place([5, TOKEN, 6, TOKEN, 7], sources, images, FIELDS)
    first, second = (image.info.num_tokens for image in images)
    assert prompt == [5, *[TOKEN] * first, 6, *[TOKEN] * second, 7]
    assert [image.start for image in placed] == [1, first + 2]


@pytest.mark.parametrize("prompt", [[5, 6], [TOKEN, 5, TOKEN]])
def test_another_number_of_placeholders(reader: MediaReader, prompt: list[int]) -> None:
    with pytest.raises(InvalidField, match=r"^messages: the prompt has . placeholders .* 1 images"):
        reader.place(prompt, [source(1)], read(reader, source(1)), FIELDS)


def test_many_images_are_refused_before_any_is_read(reader: MediaReader) -> None:
    with pytest.raises(InvalidField, match="10000 images and videos have at least 20000 tokens"):
        read(reader, *[Source("not read", "image_data[0]")] * 10_000)


@pytest.mark.parametrize("url", ["http://127.0.0.1/a.png", "https://a/b", "file:///etc/passwd"])
def test_no_url_is_fetched_by_default(reader: MediaReader, url: str) -> None:
    with pytest.raises(InvalidField, match=r"image_data\[0\]: this server fetches no URLs"):
        read(reader, Source(url, "image_data[0]"))


def test_the_pixels_of_all_images(reader: MediaReader) -> None:
    """Three images of 3,000 pixels are more than 8,000. The last one is refused."""

    def read_within(*sources: Source) -> list[Tiles]:
        return asyncio.run(reader.read(sources, context_length=2048, room=8_000))

    assert len(read_within(source(11), source(12))) == 2
    with pytest.raises(InvalidField, match="the images of a request have more than"):
        read_within(source(21), source(22), source(23))


def test_the_number_of_videos(reader: MediaReader) -> None:
    videos = [Source("not read", f"video {number}", "video") for number in range(9)]
    with pytest.raises(InvalidField, match=r"^video 4: more than 4 videos"):
        read(reader, *videos)


def test_a_folder_without_a_processor(tmp_path: Path) -> None:
    reader = MediaReader(tmp_path, ImageFormat(TOKEN, TOKEN + 1, 9, "anyres_max_4"), VOCABULARY)
    with pytest.raises(InvalidField, match=r"no preprocessor_config\.json"):
        read(reader, source(1))


@pytest.mark.parametrize("text", ["{", "[]", "null", "[" * 100_000])
def test_a_malformed_processor(tmp_path: Path, text: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text)
    reader = MediaReader(tmp_path, ImageFormat(TOKEN, TOKEN + 1, 9, "anyres_max_4"), VOCABULARY)
    with pytest.raises(InvalidField, match=r"preprocessor_config\.json is malformed"):
        read(reader, source(1))

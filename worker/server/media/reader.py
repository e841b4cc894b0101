"""Reads the images and videos of a request, and places them in its prompt."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from mla_router.worker.images import Image, ImageFormat, ImageKind, PlacedImage
from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.media.decode import MAX_OF_ALL, decode_image
from mla_router.worker.server.media.fetch import Fetcher
from mla_router.worker.server.media.onevision import OnevisionProcessor
from mla_router.worker.server.media.source import Kind, Source
from mla_router.worker.server.media.video import decode_video

log = logging.getLogger(__name__)

MAX_VIDEOS = 4  # of a request
THREADS = 2  # decoding releases the GIL; each may need some 500 MB
CACHED_BYTES = 128 << 20  # of tiles: each turn of a conversation has its images again


class MediaReader:
    """Reads images for one model. Each step of it is bounded, and runs outside of the event loop."""

    def __init__(
        self, folder: Path, format: ImageFormat, vocab_size: int, fetcher: Fetcher | None = None
    ) -> None:
        """`fetcher`: None: URLs are refused."""
        self._fetcher = fetcher
        # Ids of the placeholders, by the kind of a source
        self.placeholders: dict[Kind, int] = {
            "image": format.image_token,
            "video": format.video_token,
        }
        self._tile_tokens = format.tile_tokens
        self._unusable = ""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="media")
        self._cache = _Cache()
        try:
            self._processor = OnevisionProcessor(folder, format, vocab_size)
        except ImportError:
            self._unusable = "this worker has no Pillow; install mla-router[vision]"
        except Exception:  # noqa: BLE001 (transformers raises whatever the file's reader raised)
            exists = (folder / "preprocessor_config.json").exists()
            self._unusable = (
                "the model's preprocessor_config.json is malformed"
                if exists
                else "the model's folder has no preprocessor_config.json"
            )
        if self._unusable:
            log.warning("images and videos are refused: %s", self._unusable)

    async def read(
        self, sources: Sequence[Source], *, context_length: int, room: int = MAX_OF_ALL
    ) -> list[Image]:
        """Returns the images of a prompt in order. `room`: pixels that the images of the request may still have. Raises
        InvalidField, which names the field of the image."""
        if not sources:
            return []
        if self._unusable:
            raise InvalidField(sources[0].field, self._unusable)
        videos = [source for source in sources if source.kind == "video"]
        if len(videos) > MAX_VIDEOS:
            raise InvalidField(videos[MAX_VIDEOS].field, f"more than {MAX_VIDEOS} videos")
        least = len(sources) * (self._tile_tokens // 4)  # a video of one frame has a quarter
        if least > context_length:
            raise InvalidField(
                sources[0].field,
                f"{len(sources)} images and videos have at least {least} tokens, and the model's context length is {context_length}",
                code="context_length_exceeded",
            )
        alone = sum(source.kind == "image" for source in sources) == 1
        images: list[Image] = []
        for source in sources:
            images.append(await self._read(source, alone, room))
            room -= pixels_of(images[-1:])
        return images

    async def _read(self, source: Source, alone: bool, room: int) -> Image:
        data = await self._fetched(source) if source.is_remote else None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._decoded, source, data, alone, room)

    async def _fetched(self, source: Source) -> bytes:
        if self._fetcher is None:
            raise InvalidField(
                source.field,
                "this server fetches no URLs (--allowed-media-domains); send a data: URL",
            )
        return await self._fetcher.fetch(source.url, source.max_bytes, source.field)

    def _decoded(self, source: Source, data: bytes | None, alone: bool, room: int) -> Image:
        data = source.read() if data is None else data
        key = hashlib.sha256(data).digest(), source.kind if alone else f"{source.kind} of several"
        image = self._cache.get(key)
        if image is None:
            image = self._processed(data, source, alone, room)
            self._cache.put(key, image)
        return image

    def _processed(self, data: bytes, source: Source, alone: bool, room: int) -> Image:
        if source.kind == "image":
            picture = decode_image(data, source.field, room)
            return self._processor.process(picture, alone=alone)
        try:
            return self._processor.process_video(decode_video(data, source.field))
        except ImportError:
            raise InvalidField(
                source.field, "this worker has no PyAV; install mla-router[vision]"
            ) from None

    def place(
        self,
        prompt: list[int],
        sources: Sequence[Source],
        images: Sequence[Image],
        fields: Mapping[Kind, str],
    ) -> tuple[list[int], list[PlacedImage]]:
        """Returns `prompt` with as many placeholders for each image and video as it has tokens, in place of one, and the
        images with their places. `images` are those of `sources`; `fields` are the request's, by kind. Raises InvalidField
        unless there is one placeholder for each."""
        waiting: dict[int, deque[Image]] = {}
        for kind, token in self.placeholders.items():
            own = [
                image for source, image in zip(sources, images, strict=True) if source.kind == kind
            ]
            if prompt.count(token) != len(own):
                raise InvalidField(
                    fields[kind],
                    f"the prompt has {prompt.count(token)} placeholders of {kind}s for {len(own)} {kind}s; "
                    "each needs one, and no other text may contain them",
                )
            waiting[token] = deque(own)
        if not images:
            return prompt, []
        tokens: list[int] = []
        placed: list[PlacedImage] = []
        for token in prompt:
            if token not in waiting:
                tokens.append(token)
                continue
            image = waiting[token].popleft()
            placed.append(PlacedImage(image, len(tokens)))
            tokens += [token] * image.info.num_tokens
        return tokens, placed


def pixels_of(images: Sequence[Image]) -> int:
    """Returns the number of pixels of `images`, without videos."""
    infos = (image.info for image in images)
    return sum(info.width * info.height for info in infos if info.kind is not ImageKind.VIDEO)


class _Cache:
    """The last images by the hash of their bytes. For several threads."""

    def __init__(self) -> None:
        self._images: OrderedDict[tuple[bytes, str], Image] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def get(self, key: tuple[bytes, str]) -> Image | None:
        with self._lock:
            if (image := self._images.get(key)) is not None:
                self._images.move_to_end(key)
            return image

    def put(self, key: tuple[bytes, str], image: Image) -> None:
        with self._lock:
            if key in self._images:
                return
            self._images[key] = image
            self._bytes += len(image.tiles)
            while self._bytes > CACHED_BYTES:
                self._bytes -= len(self._images.popitem(last=False)[1].tiles)

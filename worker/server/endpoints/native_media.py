"""The images and videos of SGLang's native API."""

from __future__ import annotations

import itertools
from typing import cast

from mla_router.worker.images import PlacedImage
from mla_router.worker.server.errors import InvalidField
from mla_router.worker.server.media.decode import MAX_OF_ALL
from mla_router.worker.server.media.reader import MAX_VIDEOS, pixels_of
from mla_router.worker.server.media.source import Kind, Source
from mla_router.worker.server.schema.native import GenerateRequest, NativeMedia
from mla_router.worker.server.state import Service

FIELDS: dict[Kind, str] = {"image": "image_data", "video": "video_data"}


async def with_media(
    body: GenerateRequest, prompts: list[list[int]], service: Service
) -> tuple[list[list[int]], list[list[PlacedImage]]]:
    """Returns the prompts with as many placeholders as their images and videos have tokens, and these of each prompt."""
    given: dict[Kind, NativeMedia | None] = {"image": body.image_data, "video": body.video_data}
    if service.media is None:
        for kind, data in given.items():
            if data:
                raise InvalidField(
                    FIELDS[kind], f"this model takes no {kind}s", code="unsupported_parameter"
                )
        return prompts, []
    if isinstance(body.video_data, list) and _count(body.video_data) > MAX_VIDEOS:
        raise InvalidField("video_data", f"more than {MAX_VIDEOS} videos")
    kinds = [_sources(data, kind, len(prompts)) for kind, data in given.items()]
    expanded, images, room = [], [], MAX_OF_ALL
    for prompt, of_kinds in zip(prompts, zip(*kinds, strict=True), strict=True):
        sources = list(itertools.chain.from_iterable(of_kinds))
        read = await service.media.read(
            sources, context_length=service.limits.context_length, room=room
        )
        room -= pixels_of(read)
        tokens, placed = service.media.place(prompt, sources, read, FIELDS)
        expanded.append(tokens)
        images.append(placed)
    return expanded, images


def _count(data: list[str | list[str] | None]) -> int:
    return sum(len(entry) if isinstance(entry, list) else entry is not None for entry in data)


def _sources(data: NativeMedia | None, kind: Kind, prompts: int) -> list[list[Source]]:
    """Returns the images or videos of each prompt. Raises InvalidField."""
    field = FIELDS[kind]
    if not data:
        return [[] for _ in range(prompts)]
    if isinstance(data, str):
        data = [data]
    if prompts == 1 and not isinstance(data[0], list):
        data = [cast("list[str]", data)]
    if len(data) != prompts:
        raise InvalidField(field, f"{len(data)} entries for {prompts} prompts")
    sources = []
    for index, entry in enumerate(data):
        urls = [entry] if isinstance(entry, str) else entry or []
        if not all(isinstance(url, str) for url in urls):
            raise InvalidField(field, f"do not mix {kind}s and lists of {kind}s")
        sources.append([Source(url, f"{field}[{index}]", kind) for url in urls])
    return sources

"""Reads the images and videos of a conversation, and places them in its prompt."""

from __future__ import annotations

from mla_router.worker.images import PlacedImage
from mla_router.worker.server.endpoints.chat.messages import Media
from mla_router.worker.server.endpoints.chat.prompt import rendered
from mla_router.worker.server.endpoints.chat.tools import ToolUse
from mla_router.worker.server.schema.chat import ChatRequest
from mla_router.worker.server.state import Service


def media_of(service: Service) -> Media | None:
    """Returns the place for the images of a conversation; None if the model takes none."""
    if service.media is None:
        return None
    ids = service.media.placeholders
    return Media({kind: service.tokenizer.decode([token]) for kind, token in ids.items()})


async def placed(
    service: Service, prompt: list[int], media: Media | None, field: str
) -> tuple[list[int], list[PlacedImage]]:
    """Returns `prompt` with as many placeholders as `media` has tokens, and the images and videos with their places.
    `field` is the client's field of the messages. Raises InvalidField."""
    if service.media is None or media is None:
        return prompt, []
    read = await service.media.read(media.sources, context_length=service.limits.context_length)
    return service.media.place(prompt, media.sources, read, {"image": field, "video": field})


async def prompt_tokens(
    service: Service,
    body: ChatRequest,
    tools: ToolUse,
    field: str,
    *,
    add_special_tokens: bool = False,
) -> list[int]:
    """Returns the prompt of a conversation, with the placeholders of its images and videos. Raises InvalidRequest."""
    media = media_of(service)
    text = await rendered(service, body, tools, field, media)
    prompt = await service.tokenizer.encode(
        text,
        context_length=service.limits.context_length,
        add_special_tokens=add_special_tokens,
        field=field,
    )
    prompt, _ = await placed(service, prompt, media, field)
    return prompt

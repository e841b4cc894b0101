"""Requests with images: the encoding of their images before admission.

A request waits here until all of its images are encoded. They stay on the device until it ends, since it computes its
prompt again after a retraction. After that they are kept while there is room, the least recently used dropped first, so
that the same image is not encoded twice.

One batch of the tower runs at a time, in order of arrival. It is launched in pieces between the steps. A piece has as
many layers as take a share of a step's time, so the tower makes steps longer by that share, whatever the number of tiles.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mla_router.worker.images import Image, ImagePart
from mla_router.worker.messages import Generate
from mla_router.worker.scheduler.request import Request
from mla_router.worker.step.engine import PendingImages, StepEngine

# Time of the tower between two steps, as a share of a step's time
SHARE = 0.45


def layers_within(seconds: float, batch: PendingImages) -> int:
    """Returns the number of layers of `batch` to launch, which take up to `seconds`: at least one, if any is left."""
    if math.isinf(seconds):
        return batch.layers_left
    fitting = int(seconds / batch.layer_s) if batch.layer_s else 1
    return min(max(1, fitting), batch.layers_left)


@dataclass(slots=True)
class Entry:
    """An image, encoded or not."""

    image: Image
    users: set[str] = field(default_factory=set)  # rids of the requests that need it
    launched: int = 0  # tiles
    is_encoded: bool = False


class Batch(NamedTuple):
    """A batch of the tower, and the images whose tiles it has."""

    pending: PendingImages
    entries: list[Entry]


class ImageRequests:
    """Encodes the images of requests, a few layers between steps, and keeps the embeddings that requests share."""

    def __init__(self, engine: StepEngine[Any]) -> None:
        self._engine = engine
        self._room = engine.capacity.image_tokens
        self._line: deque[Request] = deque()  # requests whose images have no room yet
        self._encoding: list[Request] = []  # requests with room, whose images are being encoded
        self._entries: dict[int, Entry] = {}  # by key, the least recently used first
        self._held = 0  # tokens of all entries
        self._dropped: list[int] = []  # keys whose embeddings the engine still has
        self._batch: Batch | None = None  # in flight
        self._launched_s = 0.0

    def __len__(self) -> int:
        """The number of requests whose images are not encoded yet."""
        return len(self._line) + len(self._encoding)

    def can_take(self, message: Generate) -> bool:
        """Whether the model takes images, and those of `message` are in its prompt one after the other."""
        end = 0
        for placed in message.images:
            info = placed.image.info
            if placed.start < end or min(info.num_tokens, info.num_tiles) < 1:
                return False
            end = placed.start + info.num_tokens
        return self._room > 0 and end <= len(message.prompt)

    def add(self, request: Request) -> None:
        """Takes a request in state ENCODING. `advance` returns it when its images are encoded."""
        self._line.append(request)

    def advance(self, seconds: float) -> list[Request]:
        """Launches layers of the tower that take up to `seconds`, of the running batch or of the next one. Returns the
        requests whose images were encoded since the last call. Raises what the engine raises."""
        if self._batch is not None and self._batch.pending.done():
            for entry in self._batch.entries:
                entry.is_encoded = entry.launched == entry.image.info.num_tiles
            self._batch = None
        if not self:
            return []
        while self._line and self._take_room(self._line[0]):
            self._encoding.append(self._line.popleft())
        ready = [request for request in self._encoding if self._is_encoded(request)]
        self._encoding = [request for request in self._encoding if request not in ready]
        if self._batch is None and self._encoding:
            self._batch = self._begin()
        if self._batch is not None and self._batch.pending.layers_left:
            layers = layers_within(seconds, self._batch.pending)
            self._launched_s += layers * self._batch.pending.layer_s
            self._engine.encode_layers(layers)
        return ready

    def take_launched_s(self) -> float:
        """Returns the predicted seconds of the layers that were launched since the last call."""
        seconds, self._launched_s = self._launched_s, 0.0
        return seconds

    def fail(self) -> list[Request]:
        """Forgets the images that are being encoded, after an error of `advance`. Returns their requests, which must
        end."""
        failed, self._batch = [*self._encoding], None
        for request in failed:
            self.remove(request)
        for key, entry in [*self._entries.items()]:
            if not entry.is_encoded:
                self._drop(key)
        return failed

    def remove(self, request: Request) -> None:
        """Removes a request that has ended."""
        if not request.images:
            return
        if request in self._line:
            self._line.remove(request)
        if request in self._encoding:
            self._encoding.remove(request)
        for placed in request.images:
            if (entry := self._entries.get(placed.image.info.key)) is not None:
                entry.users.discard(request.rid)

    def _is_encoded(self, request: Request) -> bool:
        return all(self._entries[placed.image.info.key].is_encoded for placed in request.images)

    def _take_room(self, request: Request) -> bool:
        """Enters the images of `request` if they have room. A request that alone needs more than all room gets it when
        no other one holds images."""
        images = {placed.image.info.key: placed.image for placed in request.images}
        new = [image for key, image in images.items() if key not in self._entries]
        needed = sum(image.info.num_tokens for image in new)
        free = [key for key, entry in self._entries.items() if not self._is_used(entry)]
        free = [key for key in free if key not in images]
        while self._held + needed > self._room and free:
            self._drop(free.pop(0))
        if self._held + needed > self._room and any(map(self._is_used, self._entries.values())):
            return False
        for key, image in images.items():
            entry = self._entries.pop(key, None) or Entry(image)
            if image in new:
                self._held += image.info.num_tokens
            entry.users.add(request.rid)
            self._entries[key] = entry  # now the most recently used
        return True

    def _is_used(self, entry: Entry) -> bool:
        return bool(entry.users) or (self._batch is not None and entry in self._batch.entries)

    def _drop(self, key: int) -> None:
        self._held -= self._entries.pop(key).image.info.num_tokens
        self._dropped.append(key)

    def _begin(self) -> Batch | None:
        """Begins a batch with the next tiles of the waiting requests, the oldest first. Returns None if there are none."""
        parts: list[ImagePart] = []
        entries: list[Entry] = []
        room = self._engine.capacity.image_tiles
        for request in self._encoding:
            for placed in request.images:
                entry = self._entries[placed.image.info.key]
                info, tiles = entry.image.info, entry.image.tiles
                count = min(room, info.num_tiles - entry.launched)
                if not count or entry in entries:
                    continue
                size = len(tiles) // info.num_tiles
                begin = entry.launched * size
                parts.append(ImagePart(info, tiles[begin : begin + count * size]))
                entry.launched += count
                entries.append(entry)
                room -= count
        if not parts:
            return None
        dropped, self._dropped = tuple(self._dropped), []
        return Batch(self._engine.encode(tuple(parts), dropped), entries)

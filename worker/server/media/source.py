"""The bytes of an image or a video, from a data: URL or bare base64."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Literal

from mla_router.worker.server.errors import InvalidField

Kind = Literal["image", "video"]
# Of one image, OpenAI's limit, and of a video
MAX_BYTES = {"image": 20 << 20, "video": 48 << 20}


@dataclass(frozen=True, slots=True)
class Source:
    url: str
    field: str  # of the request, for errors
    kind: Kind = "image"

    @property
    def is_remote(self) -> bool:
        """Whether it is a URL to fetch."""
        scheme, colon, _ = self.url[:32].partition(":")
        return bool(colon) and scheme.lower() != "data"

    @property
    def max_bytes(self) -> int:
        """The limit of its bytes."""
        return MAX_BYTES[self.kind]

    def read(self) -> bytes:
        """Returns the encoded image or video of a source that is not remote. Raises InvalidField."""
        if ":" not in self.url[:32]:
            return self._base64(self.url)
        kind, comma, data = self.url.partition(",")
        if not comma or not kind.endswith(";base64"):
            raise InvalidField(self.field, "a data: URL must be data:TYPE;base64,DATA")
        return self._base64(data)

    def _base64(self, text: str) -> bytes:
        if len(text) > self.max_bytes * 4 // 3 + 4:
            raise InvalidField(self.field, f"has more than {self.max_bytes} bytes")
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidField(self.field, "is neither a data: URL nor base64") from None

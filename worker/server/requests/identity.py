"""The ids of one HTTP request: those that its client sees, and those by which the client may abort it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mla_router.worker.server.request_names import Names
from mla_router.worker.server.requests.replay import Origin


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """The ids of a request. The client's `rid` and X-Request-Id replace generated ids."""

    origin: Origin  # its id stays the same when another worker continues the stream
    size: int  # number of choices
    name: str | list[str] | None = None  # the client's `rid`: one name, or one for each choice
    trace: str | None = None  # the client's X-Request-Id; it need not be unique

    def answer_id(self, prefix: str) -> str:
        """Returns the id of the answer. The client can abort the request by it."""
        if self.name is not None:
            return self.name if isinstance(self.name, str) else self.name[0]
        return prefix + (self.trace or self.origin.id.hex())

    def choice_id(self, index: int) -> str:
        """Returns the id of choice `index`."""
        if isinstance(self.name, list):
            return self.name[index]
        name = self.name or self.origin.id.hex()
        return name if self.size == 1 else f"{name}-{index}"

    def envelope(self, prefix: str, model: str) -> dict[str, Any]:
        """Returns the fields that an answer in OpenAI's form and all its chunks share."""
        return {
            "id": self.answer_id(prefix),
            "created": self.origin.created,
            "model": model,
            "system_fingerprint": self.origin.fingerprint,
        }

    def names(self, rids: list[str]) -> Names:
        """Returns the names of the scheduler's request ids `rids`, one id a choice."""
        names = {self.origin.id.hex(): rids}
        if isinstance(self.name, list):
            names |= {name: [rid] for name, rid in zip(self.name, rids, strict=True)}
        elif self.name is not None:
            names[self.name] = rids
        return Names(names, self.trace, rids)

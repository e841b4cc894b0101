"""What OpenAI's answers, and each chunk of a streamed one, have in common besides their content."""

from __future__ import annotations

from typing import Any

from mla_router.worker.server.generation import Generation


def envelope(generation: Generation, prefix: str, model: str) -> dict[str, Any]:
    """Made once a request: all chunks of an answer carry the same id and time."""
    origin = generation.origin
    return {
        "id": generation.id_of(prefix),
        "created": origin.created,
        "model": model,
        "system_fingerprint": origin.fingerprint,
    }

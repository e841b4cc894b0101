"""Sliding windows of a config.json: which layers have one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mla_router.worker.model.config.fields import ModelError, size

FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(raw: Mapping[str, Any], default: Sequence[str]) -> tuple[int | None, ...]:
    """Returns the window of each layer in tokens, or None if it attends to all. `default`: the kinds of the layers if the
    config has no `layer_types`, which only transformers 5 writes. Raises ModelError."""
    window = size(raw, "sliding_window")
    kinds = raw.get("layer_types") or default
    if len(kinds) != len(default) or not set(kinds) <= {FULL, SLIDING}:
        raise ModelError(f"layer_types {kinds} are not {len(default)} of {FULL} and {SLIDING}")
    return tuple(window if kind == SLIDING else None for kind in kinds)

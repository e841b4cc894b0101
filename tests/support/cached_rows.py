"""What an engine's KV cache holds, as one tensor: of models whose layers all keep the same rows."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.engine.engine import Engine


def cached_rows(engine: Engine) -> Tensor:
    """A copy: [layers, pages, page_size, width]."""
    return torch.stack(engine.kv_cache.layers)


def put_back(engine: Engine, rows: Tensor) -> None:
    """Write the result of `cached_rows` over the cache."""
    for layer, own in zip(engine.kv_cache.layers, rows, strict=True):
        layer.copy_(own)


def clear(engine: Engine) -> None:
    for layer in engine.kv_cache.layers:
        layer.zero_()

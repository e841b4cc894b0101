"""The content of an engine's KV cache as one tensor, for models with equal rows in all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_router.worker.engine.engine import Engine


def cached_rows(engine: Engine) -> Tensor:
    """Returns a copy: [layers, pages, page_size, width]."""
    return torch.stack(engine.kv_cache.layers)


def put_back(engine: Engine, rows: Tensor) -> None:
    """Overwrites the cache with a result of `cached_rows`."""
    for layer, own in zip(engine.kv_cache.layers, rows, strict=True):
        layer.copy_(own)


def clear(engine: Engine) -> None:
    for layer in engine.kv_cache.layers:
        layer.zero_()

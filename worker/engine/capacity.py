"""Sizes the KV cache and the batch once, after the weights are loaded, and logs the sizes."""

from __future__ import annotations

import logging

import torch

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.core import Capacity
from mla_router.worker.engine.speculation.drafter import NewDrafter
from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kv_cache.spec import bytes_per_token, own_window
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.context_length import choose_context_length

logger = logging.getLogger(__name__)

_CPU_TOKENS = 65536
# Embeddings of images on the device, 470 MB with 7B parameters: those of 10 to 90 images
_IMAGE_TOKENS = 65536
# Tiles of one batch of the vision tower: a layer of more takes too long between two steps (`scheduler/images.py`). On a CPU
# each takes a second with the published weights
_IMAGE_TILES = 8
_GIB = 1 << 30
# For allocations of libraries, and for memory that is lost between tensors of different sizes
_SPARE = 3 * _GIB // 4


def plan_capacity(
    config: WorkerConfig,
    model: ModelConfig,
    kv_cache_dtype: torch.dtype,
    device: torch.device,
    *,
    working_bytes: int = 0,
    group: Group | None = None,
    takes_images: bool = False,
    new_drafter: NewDrafter | None = None,
) -> Capacity:
    """Sizes the KV cache, with the rows of a drafter, and the batch. On a GPU, memory in use and the KV cache together take
    `mem_fraction_static` of the memory, and leave at least `working_bytes` for the steps. All ranks of `group` get the size
    of the rank with the least room. Raises ConfigError if not even one page fits."""
    context_length = choose_context_length(config, model)
    specs = model.kv_cache_specs(kv_cache_dtype)
    if new_drafter is not None:
        specs += new_drafter.kv_cache_specs(kv_cache_dtype)
    token_bytes, window = bytes_per_token(specs), own_window(specs)
    kinds = 1 if window is None else 2
    # Rows of one kind of layers: with window pages, a token needs a row of each kind
    tokens = kinds * (config.max_total_tokens or _CPU_TOKENS)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        outside = max(total * (1 - config.mem_fraction_static), working_bytes + _SPARE)
        fitting = max(0, int(free - outside)) * kinds // token_bytes
        if tree := config.tree:
            fitting = max(0, fitting - tree.cache_rows - config.page_size)
        tokens = min(kinds * config.max_total_tokens or fitting, fitting)
    if group is not None:
        tokens = int(group.all_gather(torch.tensor([tokens], device=device), 0).min())
    num_pages = tokens // config.page_size
    if num_pages < kinds:
        raise ConfigError(
            f"no room for KV cache ({token_bytes} bytes a token): raise --mem-fraction-static or "
            f"--max-total-tokens, or lower --page-size"
        )
    capacity = Capacity(
        num_pages,
        config.page_size,
        config.max_running_requests,
        context_length,
        window=window,
        **image_sizes(device, context_length, takes_images=takes_images),
        tokens_per_row=1 + config.num_drafts,
        tree=config.tree,
    )
    longest = min(context_length, capacity.max_total_tokens)
    logger.info(
        "KV cache: %s, %d tokens in pages of %d, %d bytes a token, %.2f GiB; up to %d requests at once, "
        "%d tokens each",
        str(kv_cache_dtype).removeprefix("torch."),
        capacity.max_total_tokens,
        capacity.page_size,
        token_bytes,
        (num_pages + 1) * config.page_size * token_bytes / kinds / _GIB,
        capacity.num_slots,
        longest,
    )
    if window is not None:
        kept = (longest + min(longest, window)) / (2 * longest)
        logger.info(
            "KV cache: half of the layers keep a window of %d tokens: %d bytes a token in a request of %d, %.0f%%",
            window,
            round(kept * token_bytes),
            longest,
            100 * kept,
        )
    return capacity


def image_sizes(device: torch.device, context_length: int, *, takes_images: bool) -> dict[str, int]:
    """Returns the fields of a Capacity that are about images."""
    if not takes_images:
        return {}
    tiles = 1 if device.type == "cpu" else _IMAGE_TILES
    return {"image_tokens": max(_IMAGE_TOKENS, context_length), "image_tiles": tiles}

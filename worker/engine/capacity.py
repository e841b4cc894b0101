"""Sizes the KV cache and the batch once, after the weights are loaded, and logs the sizes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.host_limits import usable_memory
from mla_router.worker.kernels.comm.group import Group
from mla_router.worker.kv_cache.spec import KVCacheSpec, bytes_per_token
from mla_router.worker.step.engine import Capacity

logger = logging.getLogger(__name__)

_CPU_TOKENS = 65536  # of the KV cache on a CPU, unless --max-total-tokens is given
# Embeddings of images on the device, 470 MB with 7B parameters: those of 10 to 90 images
_IMAGE_TOKENS = 65536
# Tiles of one batch of the vision tower: a layer of more takes too long between two steps (`scheduler/images.py`). On a
# CPU each takes a second with the published weights
_IMAGE_TILES = 8
_GIB = 1 << 30
# For allocations of libraries, and for memory that is lost between tensors of different sizes
_SPARE = 3 * _GIB // 4
# More than this process has in addition to torch's allocations: the CUDA context, kernels, libraries and their buffers
_OWN_CONTEXT = 2 * _GIB


class _Room(NamedTuple):
    """The KV cache that fits into the memory of a device."""

    rows: int  # of one kind of layers: with window pages, a token needs a row of each kind
    reason: str  # for an error: why there are no more
    remedy: str  # the flags to raise then


def capacity_without_pages(
    config: WorkerConfig,
    context_length: int,
    window: int | None,
    device: torch.device,
    *,
    takes_images: bool = False,
) -> Capacity:
    """Returns the capacity of an engine whose KV cache has no pages yet. `window`: see `own_window`."""
    return Capacity(
        0,
        config.page_size,
        config.max_running_requests,
        context_length,
        window=window,
        image_tokens=max(_IMAGE_TOKENS, context_length) if takes_images else 0,
        image_tiles=_IMAGE_TILES if takes_images and device.type != "cpu" else 1,
        tokens_per_row=1 + config.num_drafts,
        tree=config.tree,
    )


def plan_capacity(
    config: WorkerConfig,
    empty: Capacity,
    specs: Sequence[KVCacheSpec],
    device: torch.device,
    *,
    working_bytes: int = 0,
    group: Group | None = None,
) -> Capacity:
    """Returns `empty`, of `capacity_without_pages`, with the pages that fit. `specs`: the rows of all layers, also of a
    drafter. On a GPU, memory in use and the KV cache together take `mem_fraction_static` of the memory, and leave at
    least `working_bytes` for the steps. All ranks of `group` get the size of the rank with the least room. Raises
    ConfigError if not even one page fits."""
    token_bytes, kinds = bytes_per_token(specs), empty.page_kinds
    if device.type == "cpu":
        room = _room_on_cpu(config, token_bytes, kinds)
    else:
        room = _room_on_gpu(config, token_bytes, kinds, device, working_bytes)
    rows = room.rows
    if group is not None:
        rows = int(group.all_gather(torch.tensor([rows], device=device), 0).min())
    num_pages = rows // config.page_size
    if num_pages < kinds:
        raise ConfigError(
            f"no room for KV cache ({token_bytes} bytes a token){room.reason}; raise {room.remedy}, or lower --page-size"
        )
    capacity = replace(empty, num_pages=num_pages)
    _log_size(capacity, specs[0].dtype, token_bytes)
    return capacity


def _room_on_cpu(config: WorkerConfig, token_bytes: int, kinds: int) -> _Room:
    """Returns --max-total-tokens. Raises ConfigError if this machine has less memory."""
    tokens = config.max_total_tokens or _CPU_TOKENS
    size, memory = tokens * token_bytes, usable_memory()
    if size > memory:
        raise ConfigError(
            f"no room for KV cache: {tokens} tokens take {size / _GIB:.1f} GiB, and this machine or container has "
            f"{memory / _GIB:.1f}; lower --max-total-tokens"
        )
    return _Room(kinds * tokens, "", "--max-total-tokens")


def _room_on_gpu(
    config: WorkerConfig, token_bytes: int, kinds: int, device: torch.device, working_bytes: int
) -> _Room:
    """Returns the rows that fit, at most those of --max-total-tokens. Logs a warning if other processes use the GPU."""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device) - _OWN_CONTEXT
    if others > 0:
        logger.warning(
            "Other processes use at least %.1f of the %.1f GiB of this GPU, and they count in --mem-fraction-static. To "
            "run two workers on one GPU, start the second one when the first is ready, with a larger fraction that "
            "covers both",
            others / _GIB,
            total / _GIB,
        )
    outside = max(total * (1 - config.mem_fraction_static), working_bytes + _SPARE)
    reason = (
        f": {free / _GIB:.1f} of {total / _GIB:.1f} GiB are free, and {outside / _GIB:.1f} stay free for the steps"
        + (f"; other processes use {others / _GIB:.1f} or more" if others > 0 else "")
    )
    remedy = "--mem-fraction-static"
    if working_bytes + _SPARE == outside:
        remedy = "--tp-size, lower --max-running-requests or --max-prefill-tokens"
    fitting = max(0, int(free - outside)) * kinds // token_bytes
    if tree := config.tree:
        fitting = max(0, fitting - tree.cache_rows - config.page_size)
    return _Room(min(kinds * config.max_total_tokens or fitting, fitting), reason, remedy)


def _log_size(capacity: Capacity, dtype: torch.dtype, token_bytes: int) -> None:
    """Logs the size of the KV cache. `token_bytes`: of a token in all layers."""
    longest = min(capacity.context_length, capacity.max_total_tokens)
    page_bytes = capacity.page_size * token_bytes / capacity.page_kinds
    logger.info(
        "KV cache: %s, %d tokens in pages of %d, %d bytes a token, %.2f GiB; up to %d requests at once, "
        "%d tokens each",
        str(dtype).removeprefix("torch."),
        capacity.max_total_tokens,
        capacity.page_size,
        token_bytes,
        (capacity.num_pages + 1) * page_bytes / _GIB,
        capacity.num_slots,
        longest,
    )
    if capacity.window is not None:
        kept = (longest + min(longest, capacity.window)) / (2 * longest)
        logger.info(
            "KV cache: half of the layers keep a window of %d tokens: %d bytes a token in a request of %d, %.0f%%",
            capacity.window,
            round(kept * token_bytes),
            longest,
            100 * kept,
        )

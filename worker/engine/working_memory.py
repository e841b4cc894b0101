"""Measures the device memory that a step needs in addition to weights and KV cache, by a profile run of the largest steps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.profile_run import profile_plans
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.engine.warmup_compile import row_counts, warmup_compile
from mla_router.worker.images import ImageInfo, ImageKind, ImagePart
from mla_router.worker.model.exchange import Exchange
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import StepPlan


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """Bytes of device memory."""

    tables: int  # page tables and sampling state of the request slots
    step: int  # activations and sampling of the largest step
    graphs: int  # CUDA graphs
    images: int  # embeddings of images, and a batch of the vision tower

    @property
    def total(self) -> int:
        return self.tables + self.step + self.graphs + self.images


def measure_working_memory(
    new_engine: Callable[[Capacity], Engine],
    capacity: Capacity,
    *,
    prefill_tokens: int,
    graph_sizes: GraphSizes,
) -> WorkingMemory:
    """Measures an engine of this `capacity` (its number of pages is ignored) on a CUDA device, in steps of
    `prefill_tokens` prompt tokens with a decode row for every other slot. Compiles the kernels of these steps."""
    small = replace(capacity, num_pages=capacity.num_slots)
    engine = new_engine(small)
    device = engine.device
    plans = profile_plans(small, prefill_tokens, engine.attention.max_keys)
    warmup_compile(engine, plans, graph_sizes)
    del engine
    _free()
    before = torch.cuda.memory_allocated(device)
    engine = new_engine(small)
    tables = torch.cuda.memory_allocated(device) - before - engine.kv_cache.nbytes
    step = max(_step_bytes(engine, plan) for plan in plans)
    _run_heads(engine)
    graphs = _graph_bytes(engine, graph_sizes)
    images = _image_bytes(engine)
    del engine
    _free()
    return WorkingMemory(tables, step, graphs, images)


def _step_bytes(engine: Engine, plan: StepPlan) -> int:
    """Runs a step, and returns the bytes of its activations and sampling."""
    device = engine.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    # Reserved memory includes fragmentation; allocated memory counts a small step that fits into free fragments
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    engine.sample(engine.forward(plan)).wait()
    return max(
        torch.cuda.max_memory_reserved(device) - reserved,
        torch.cuda.max_memory_allocated(device) - allocated,
    )


def _run_heads(engine: Engine) -> None:
    """Runs the end of the last layer and the head with all numbers of rows. They run outside of the graphs, only for the
    rows that are needed, and libraries load the kernel of a new number of rows at its first use."""
    model, group = engine.model, engine.model.groups.exchange
    for rows in row_counts(engine.capacity.num_slots):
        hidden_states = torch.zeros(
            rows, model.config.hidden_size, dtype=engine.dtype, device=engine.device
        )
        exchange = Exchange(None, group, (rows,) * group.size)
        model.logits(model.model.finish(hidden_states, hidden_states, exchange=exchange))


def _image_bytes(engine: Engine) -> int:
    """Returns the bytes of all images that are kept, and of the largest batch of the tower, which runs beside a step."""
    vision, capacity, device = engine.model.vision, engine.capacity, engine.device
    if vision is None:
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    reserved = torch.cuda.memory_reserved(device)
    tiles = capacity.image_tiles
    info = ImageInfo(0, ImageKind.TILED, 0, tiles + 1, 1, 1, 1.0, (0.0,) * 3, (1.0,) * 3)
    encoded = engine.encode((ImagePart(info, bytes(tiles * 3 * vision.tile_size**2)),), ())
    engine.encode_layers(encoded.layers_left)
    torch.cuda.synchronize(device)
    batch = torch.cuda.max_memory_reserved(device) - reserved
    return batch + capacity.image_tokens * engine.model.config.hidden_size * engine.dtype.itemsize


def _graph_bytes(engine: Engine, sizes: GraphSizes) -> int:
    """Returns the bytes of all captured graphs. Graphs of one kind share the memory of the largest, and each needs some
    more, which is measured by capturing the smallest beside the largest."""

    def taken(kind: str, some: Sequence[int]) -> int:
        engine.capture_graphs(GraphSizes())
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(engine.device)[0]
        alone: dict[str, Any] = {kind: some}
        engine.capture_graphs(GraphSizes(**alone))
        return max(0, free - torch.cuda.mem_get_info(engine.device)[0])

    total = 0
    for kind, own in sizes.by_kind().items():
        if not own:
            continue
        largest = taken(kind, own[-1:])
        each = taken(kind, [own[0], own[-1]]) - largest if len(own) > 1 else 0
        total += largest + max(0, each) * (len(own) - 1)
    return total


def _free() -> None:
    """Frees the memory of deleted engines, which have reference cycles."""
    gc.collect()
    torch.cuda.empty_cache()

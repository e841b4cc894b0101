"""Creates an engine from the settings of a worker."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from mla_router.worker.config import WorkerConfig
from mla_router.worker.engine.attention.choose import choose_attention
from mla_router.worker.engine.attention.model_attention import ModelAttention
from mla_router.worker.engine.capacity import capacity_without_pages, plan_capacity
from mla_router.worker.engine.choose import (
    choose_config,
    choose_device,
    choose_dtype,
    choose_graph_sizes,
    choose_kv_cache_dtype,
)
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.expert_location import choose_placement
from mla_router.worker.engine.runners.sizes import GraphSizes
from mla_router.worker.engine.runners.tower_graphs import MAX_TILES
from mla_router.worker.engine.speculation.load import load_drafter
from mla_router.worker.engine.supported import check_device
from mla_router.worker.engine.working_memory import WorkingMemory, measure_working_memory
from mla_router.worker.host_limits import usable_cores
from mla_router.worker.kernels.carveout import prefer_shared_memory
from mla_router.worker.kernels.comm.groups import ONE_RANK, Groups
from mla_router.worker.kv_cache.spec import own_window
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.context_length import choose_context_length
from mla_router.worker.model.expert_load import count_experts
from mla_router.worker.model.loader import load_model
from mla_router.worker.model.parallel.divide import config_of_rank
from mla_router.worker.model.parallel.placement import Placement
from mla_router.worker.model.parallel.ranks import Ranks

logger = logging.getLogger(__name__)

_GIB = 1 << 30


class _Choices(NamedTuple):
    """The choices that follow from the flags, the model's config and the device alone."""

    whole: ModelConfig  # of the model that ranks divide
    context_length: int
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    attention: ModelAttention
    placement: Placement | None
    graphs: GraphSizes


def load_engine(
    config: WorkerConfig, groups: Groups = ONE_RANK, *, expert_parts: int = 1
) -> Engine:
    """Selects the device, loads the weights, sizes the KV cache and captures the graphs. `groups`: the ranks among which
    the model is divided, by default one. `expert_parts`: --ep-size. Raises ConfigError, ModelError."""
    device = choose_device(config)
    _set_up(device, config)
    chosen = _choose(config, device, groups)  # checks settings before the slow loading of weights
    model = _load_model(config, chosen, device, groups, expert_parts)
    new_drafter = load_drafter(config, model, chosen.whole)
    specs = model.config.kv_cache_specs(chosen.kv_cache_dtype)
    if new_drafter is not None:
        specs += new_drafter.kv_cache_specs(chosen.kv_cache_dtype)
    empty = capacity_without_pages(
        config,
        chosen.context_length,
        own_window(specs),
        device,
        takes_images=model.vision is not None,
    )
    plan = partial(plan_capacity, config, empty, specs, device, group=groups.attention)
    new_engine = partial(
        Engine,
        model,
        device=device,
        dtype=chosen.dtype,
        attention=chosen.attention,
        kv_cache_dtype=chosen.kv_cache_dtype,
        new_drafter=new_drafter,
    )
    if device.type == "cpu":
        return new_engine(plan())
    graphs = chosen.graphs
    if model.vision is not None and graphs.decode:  # graphs are on
        graphs = replace(graphs, tiles=range(1, MAX_TILES + 1))
    working = measure_working_memory(
        new_engine, empty, prefill_tokens=config.max_prefill_tokens, graph_sizes=graphs
    )
    _log_memory(model, working)
    engine = new_engine(plan(working_bytes=working.total))
    _capture_graphs(engine, graphs)
    return engine


def _choose(config: WorkerConfig, device: torch.device, groups: Groups) -> _Choices:
    """Raises ConfigError, ModelError."""
    whole = choose_config(config)
    own = config_of_rank(whole, Ranks.of(groups))
    context_length = choose_context_length(config, own)
    dtype = choose_dtype(config, own, device)
    kv_cache_dtype = choose_kv_cache_dtype(config, dtype)
    check_device(device, own, dtype, kv_cache_dtype)
    attention = choose_attention(
        config.attention_backend,
        own,
        device,
        dtype,
        flashinfer_mla=config.enable_flashinfer_mla,
        kv_cache_dtype=kv_cache_dtype,
        with_trees=config.tree is not None,
    )
    placement = choose_placement(config, whole)
    graphs = choose_graph_sizes(config, device, attention, groups)
    return _Choices(whole, context_length, dtype, kv_cache_dtype, attention, placement, graphs)


def _load_model(
    config: WorkerConfig, chosen: _Choices, device: torch.device, groups: Groups, expert_parts: int
) -> CausalLM:
    model = load_model(
        config.folder,
        device=device,
        dtype=chosen.dtype,
        dummy=config.load_format == "dummy",
        config=chosen.whole,
        groups=groups,
        expert_parts=expert_parts,
        placement=chosen.placement,
    )
    if config.enable_expert_distribution_metrics and groups.attention.rank == 0:
        count_experts(model)  # each rank chooses the experts of all tokens, also of other DP ranks
    return model


def _set_up(device: torch.device, config: WorkerConfig) -> None:
    """Sets torch's threads on a CPU, and the current device of this process on a GPU."""
    if device.type == "cpu":
        # torch's own number ignores the quota of a container
        own = min(torch.get_num_threads(), usable_cores())
        torch.set_num_threads(config.cpu_threads or own)
    if device.type == "cuda":
        # Triton and FlashInfer launch on the current device, not on the device of the tensors.
        torch.cuda.set_device(device)
        prefer_shared_memory()


def _log_memory(model: CausalLM, working: WorkingMemory) -> None:
    parts = {
        "weights": sum(parameter.nbytes for parameter in model.parameters()),
        "request slots": working.tables,
        "largest step": working.step,
        "CUDA graphs": working.graphs,
    }
    if model.vision is not None:
        parts["images"] = working.images
    logger.info(
        "GPU memory: %s", ", ".join(f"{name} {size / _GIB:.2f} GiB" for name, size in parts.items())
    )


def _capture_graphs(engine: Engine, sizes: GraphSizes) -> None:
    begin = time.perf_counter()
    engine.capture_graphs(sizes)
    kinds = [f"{len(own)} {kind} up to {max(own)}" for kind, own in sizes.by_kind().items() if own]
    if kinds:
        logger.info(
            "CUDA graphs captured: %s: %.1f s", ", ".join(kinds), time.perf_counter() - begin
        )

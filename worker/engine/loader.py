"""Creates an engine from the settings of a worker."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.core import Capacity
from mla_router.worker.engine.attention.choose import choose_attention
from mla_router.worker.engine.attention.model_attention import ModelAttention
from mla_router.worker.engine.capacity import image_sizes, plan_capacity
from mla_router.worker.engine.engine import Engine
from mla_router.worker.engine.expert_location import choose_placement
from mla_router.worker.engine.runners.choose import MAX_INPUT_TOKENS
from mla_router.worker.engine.runners.sizes import GraphSizes, decode_sizes, prompt_sizes
from mla_router.worker.engine.speculation.chain import NewChain
from mla_router.worker.engine.speculation.drafter import NewDrafter
from mla_router.worker.engine.speculation.extension import DraftLayer
from mla_router.worker.engine.speculation.ngram import NewNgram
from mla_router.worker.engine.speculation.tree import NewTree
from mla_router.worker.engine.supported import check_device
from mla_router.worker.engine.working_memory import measure_working_memory
from mla_router.worker.kernels.carveout import prefer_shared_memory
from mla_router.worker.kernels.comm.groups import ONE_RANK, Groups
from mla_router.worker.kernels.kv_cache.fp8 import FORMATS
from mla_router.worker.kv_cache.spec import own_window
from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.context_length import choose_context_length
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.expert_load import count_experts
from mla_router.worker.model.loader import load_eagle, load_model, load_mtp
from mla_router.worker.model.parallel.divide import config_of_rank
from mla_router.worker.model.parallel.ranks import Ranks
from mla_router.worker.model.quantization.choose import choose_quantization
from mla_router.worker.model.quantization.spec import FP8

logger = logging.getLogger(__name__)

_GIB = 1 << 30
# Most rows of a DP rank in a piecewise graph, whose memory has the rows of all ranks
MAX_EXCHANGED_ROWS = 4096


def load_engine(
    config: WorkerConfig, groups: Groups = ONE_RANK, *, expert_parts: int = 1
) -> Engine:
    """Selects the device, loads the weights, sizes the KV cache and captures the graphs. `groups`: the ranks among which
    the model is divided, by default one. `expert_parts`: --ep-size. Raises ConfigError, ModelError."""
    device = choose_device(config)
    if device.type == "cpu" and config.cpu_threads:
        torch.set_num_threads(config.cpu_threads)
    if device.type == "cuda":
        # Triton and FlashInfer launch on the current device, not on that of the tensors.
        torch.cuda.set_device(device)
        prefer_shared_memory()
    whole = choose_config(config)
    model_config = config_of_rank(whole, Ranks.of(groups))
    # Settings are checked before the slow loading of the weights
    context_length = choose_context_length(config, model_config)
    dtype = choose_dtype(config, model_config, device)
    kv_cache_dtype = choose_kv_cache_dtype(config, dtype)
    check_device(device, model_config, dtype, kv_cache_dtype)
    attention = choose_attention(
        config.attention_backend,
        model_config,
        device,
        dtype,
        flashinfer_mla=config.enable_flashinfer_mla,
        kv_cache_dtype=kv_cache_dtype,
        with_drafts=config.num_drafts > 0,
        with_trees=config.tree is not None,
    )
    placement = choose_placement(config, whole)
    sizes = choose_graph_sizes(config, device, attention, groups)
    model = load_model(
        config.folder,
        device=device,
        dtype=dtype,
        dummy=config.load_format == "dummy",
        config=whole,
        groups=groups,
        expert_parts=expert_parts,
        placement=placement,
    )
    if config.enable_expert_distribution_metrics and groups.attention.rank == 0:
        count_experts(model)  # each rank chooses the experts of all tokens, also of other DP ranks
    takes_images = model.vision is not None
    new_drafter = load_drafter(config, model, whole)
    if device.type == "cpu":
        capacity = plan_capacity(
            config,
            model.config,
            kv_cache_dtype,
            device,
            group=groups.attention,
            takes_images=takes_images,
            new_drafter=new_drafter,
        )
        return Engine(
            model,
            capacity,
            device=device,
            dtype=dtype,
            attention=attention,
            kv_cache_dtype=kv_cache_dtype,
            new_drafter=new_drafter,
        )

    shape = Capacity(
        0,
        config.page_size,
        config.max_running_requests,
        context_length,
        window=own_window(model.config.kv_cache_specs(kv_cache_dtype)),
        **image_sizes(device, context_length, takes_images=takes_images),
        tokens_per_row=1 + config.num_drafts,
        tree=config.tree,
    )
    working = measure_working_memory(
        model,
        shape,
        prefill_tokens=config.max_prefill_tokens,
        graph_sizes=sizes,
        device=device,
        dtype=dtype,
        attention=attention,
        kv_cache_dtype=kv_cache_dtype,
        new_drafter=new_drafter,
    )
    weights = sum(parameter.nbytes for parameter in model.parameters())
    logger.info(
        "GPU memory: weights %.2f GiB, request slots %.2f GiB, largest step %.2f GiB, CUDA graphs %.2f GiB, "
        "images %.2f GiB",
        weights / _GIB,
        working.tables / _GIB,
        working.step / _GIB,
        working.graphs / _GIB,
        working.images / _GIB,
    )
    capacity = plan_capacity(
        config,
        model.config,
        kv_cache_dtype,
        device,
        working_bytes=working.total,
        group=groups.attention,
        takes_images=takes_images,
        new_drafter=new_drafter,
    )
    engine = Engine(
        model,
        capacity,
        device=device,
        dtype=dtype,
        attention=attention,
        kv_cache_dtype=kv_cache_dtype,
        new_drafter=new_drafter,
    )
    engine.capture_graphs(sizes)
    return engine


def load_drafter(config: WorkerConfig, model: CausalLM, whole: ModelConfig) -> NewDrafter | None:
    """Returns the drafter of --speculative-algorithm, with its weights. `whole`: the config of the model that ranks divide.
    Raises ConfigError, ModelError."""
    if config.speculative_algorithm == "none":
        return None
    flag = f"--speculative-algorithm {config.speculative_algorithm}"
    if config.speculative_algorithm == "NGRAM":
        if own_window(model.config.kv_cache_specs(model.head.values.dtype)) is not None:
            raise ConfigError(f"{flag}: not for models whose layers have windows of their own")
        logger.info("%s: %d drafts a request", flag, config.num_drafts)
        return NewNgram(config.num_drafts)
    try:
        layer = _draft_layer(config, model, whole)
    except ModelError as error:
        raise ConfigError(f"{flag}: {error}") from error
    logger.info(
        "%s: %s makes %d drafts a request%s, in steps of at most %d requests%s",
        flag,
        config.speculative_draft_model_path or "the layer for multi-token prediction",
        config.num_drafts,
        f" behind each other, trees of {config.rows_per_decode} nodes" if config.tree else "",
        config.speculative_max_bs,
        ", where they pay by measured times" if config.chooses_drafts else "",
    )
    if config.tree is not None:
        return NewTree(layer, config.tree)
    return NewChain(layer, config.num_drafts)


def _draft_layer(config: WorkerConfig, model: CausalLM, whole: ModelConfig) -> DraftLayer:
    folder, dummy = config.draft_folder, config.load_format == "dummy"
    if config.speculative_algorithm == "EAGLE":
        assert folder is not None, "checked by WorkerConfig"
        return load_eagle(model, folder, config=whole, dummy=dummy)
    return load_mtp(model, config.folder, config=whole, draft_folder=folder, dummy=dummy)


def choose_config(config: WorkerConfig) -> ModelConfig:
    """Returns the model's config, changed by --quantization, --disable-mla and --mla-bmm-dtype. Raises ConfigError,
    ModelError."""
    model = read_config(config.folder)
    model = replace(model, quantization=choose_quantization(config, model))
    if config.enable_torch_compile and model.quantization:
        raise ConfigError(
            f"--enable-torch-compile: the linear weights are {model.quantization.dtype}, which only our kernels multiply; "
            f"leave --enable-torch-compile out"
        )
    keeps = config.mla_bmm_dtype != "auto"
    if not (config.disable_mla or keeps):
        return model
    if not isinstance(model, DeepseekConfig):
        flag = "--disable-mla" if config.disable_mla else "--mla-bmm-dtype"
        raise ConfigError(f"{flag}: {model.architecture} has no MLA: leave {flag} out")
    if keeps:
        _check_kv_b_proj(config, model)
    return replace(model, disable_mla=config.disable_mla, mla_bmm_dtype=config.mla_bmm_dtype)


def _check_kv_b_proj(config: WorkerConfig, model: DeepseekConfig) -> None:
    """Raises ConfigError if the matrices of MLA's batched products are not FP8."""
    flag = f"--mla-bmm-dtype {config.mla_bmm_dtype}"
    if config.disable_mla:
        raise ConfigError(f"{flag}: with --disable-mla there are no such products")
    found = model.quantization
    if found is None or found.dtype != FP8 or found.online or found.weight_only:
        raise ConfigError(
            f"{flag}: the checkpoint has no FP8 kv_b_proj with FP8 activations; leave the flag out"
        )


def choose_graph_sizes(
    config: WorkerConfig,
    device: torch.device,
    attention: ModelAttention,
    groups: Groups = ONE_RANK,
) -> GraphSizes:
    """Returns the sizes of the graphs to capture. Raises ConfigError if decode graphs should be compiled but cannot be
    captured."""
    without = None
    if config.disable_cuda_graph:
        without = "--disable-cuda-graph"
    elif device.type != "cuda":
        without = f"device {device.type}"
    elif not attention.supports_decode_graph:
        without = f"attention backend {attention.name}"
    if without is not None:
        if config.enable_torch_compile:
            raise ConfigError(
                f"--enable-torch-compile: needs captured decode graphs, and with {without} there are none; "
                f"leave --enable-torch-compile out"
            )
        return GraphSizes()
    # A decode graph may have rows of a full batch and of the tokens of chunks.
    largest = min(config.cuda_graph_max_bs, config.max_running_requests + MAX_INPUT_TOKENS)
    decode = config.decode_graph_sizes or decode_sizes(largest)
    batches: list[int] = []  # with drafts
    if config.num_drafts:
        most = min(config.speculative_max_bs, config.max_running_requests)
        batches = config.decode_graph_sizes or decode_sizes(most)
    verify = [config.rows_per_decode * size for size in batches]
    if verify and groups.exchange.size > 1:
        # DP ranks that verify drafts run beside others, in graphs of one size
        decode = sorted({*decode, *verify})
    tokens = min(config.piecewise_cuda_graph_max_tokens, config.max_prefill_tokens)
    if groups.exchange.size > 1:
        tokens = min(tokens, MAX_EXCHANGED_ROWS)
    prompts = prompt_sizes(tokens)
    # DP ranks have different steps: a prompt alone on one of them is not alone (`runners/choose.py`)
    without_prefill = attention.plans_prefill_on_host or groups.exchange.size > 1
    return GraphSizes(
        decode=decode,
        piecewise=prompts,
        prefill=() if without_prefill else prompts,
        compiled=config.torch_compile_max_bs if config.enable_torch_compile else 0,
        verify=verify,
        drafts=batches,
    )


def choose_device(config: WorkerConfig) -> torch.device:
    count = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.device == "cuda" and count == 0:
        raise ConfigError("--device cuda: torch sees no GPU")
    if count == 0:
        return torch.device("cpu")
    if config.base_gpu_id >= count:
        raise ConfigError(f"--base-gpu-id {config.base_gpu_id}: this machine has {count} GPUs")
    return torch.device("cuda", config.base_gpu_id)


def choose_dtype(config: WorkerConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Returns the dtype of --dtype. "auto" is the model's dtype on a GPU, and float32 on a CPU, because few CPUs are
    faster with 16 bits."""
    if config.dtype != "auto":
        name = config.dtype
    else:
        name = "float32" if device.type == "cpu" else model.dtype
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def choose_kv_cache_dtype(config: WorkerConfig, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of --kv-cache-dtype. "auto" is the model's `dtype`."""
    return FORMATS.get(config.kv_cache_dtype, dtype)

"""Choices by the settings of a worker and by its device: device, dtypes, the model's config and the sizes of CUDA
graphs."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.engine.attention.model_attention import ModelAttention
from mla_router.worker.engine.runners.choose import MAX_INPUT_TOKENS
from mla_router.worker.engine.runners.sizes import GraphSizes, decode_sizes, prompt_sizes
from mla_router.worker.kernels.comm.groups import ONE_RANK, Groups
from mla_router.worker.kernels.kv_cache.fp8 import FORMATS
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.quantization.choose import choose_quantization
from mla_router.worker.model.quantization.spec import FP8

logger = logging.getLogger(__name__)

# Maximum number of rows of a DP rank in a piecewise graph, whose memory has the rows of all ranks
MAX_EXCHANGED_ROWS = 4096


def choose_device(config: WorkerConfig) -> torch.device:
    """Returns the device of --device and --base-gpu-id. "auto" is the CPU if torch sees no GPU. Raises ConfigError."""
    count = torch.cuda.device_count() if config.device != "cpu" else 0
    if config.device == "cuda" and count == 0:
        raise ConfigError("--device cuda: torch sees no GPU")
    if count == 0:
        if config.device == "auto" and config.model_path:
            logger.warning("Torch sees no GPU: this model runs on the CPU (--device cpu)")
        return torch.device("cpu")
    if config.base_gpu_id >= count:
        raise ConfigError(f"--base-gpu-id {config.base_gpu_id}: this machine has {count} GPUs")
    return torch.device("cuda", config.base_gpu_id)


def choose_dtype(config: WorkerConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Returns the dtype of --dtype. "auto" is float32 on a CPU, because few CPUs are faster with 16 bits. On a GPU it is
    the model's dtype, but bfloat16 for float32: attention kernels need 16 bits."""
    if config.dtype != "auto":
        name = config.dtype
    elif device.type == "cpu":
        name = "float32"
    elif model.dtype == "float32":
        name = "bfloat16"
        logger.info("float32 checkpoint: served in bfloat16; --dtype float32 is exact and slow")
    else:
        name = model.dtype
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def choose_kv_cache_dtype(config: WorkerConfig, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of --kv-cache-dtype. "auto" is the model's `dtype`."""
    return FORMATS.get(config.kv_cache_dtype, dtype)


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
        largest_batch = min(config.speculative_max_bs, config.max_running_requests)
        batches = config.decode_graph_sizes or decode_sizes(largest_batch)
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

"""Checks that a GPU can run the kernels of a model, before the weights are loaded."""

from __future__ import annotations

import torch

from mla_router.worker.config import ConfigError
from mla_router.worker.kernels.attention.decode_tiling import MANY_REQUESTS, gqa_tiling, tiling
from mla_router.worker.kernels.attention.prefill_work import TALL_BLOCK
from mla_router.worker.kernels.attention.ragged_attention.tiling import tiling as prefill_tiling
from mla_router.worker.kernels.device import (
    FIRST_WITH_E4M3,
    Limits,
    UnsupportedDevice,
    check_architecture,
    limits,
)
from mla_router.worker.kernels.kv_cache.fp8 import is_fp8
from mla_router.worker.kernels.quantize import GROUP
from mla_router.worker.model.config.attention_spec import (
    GroupedQueryAttentionSpec,
    LatentAttentionSpec,
)
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.quantization.spec import Quantization


def check_device(
    device: torch.device,
    model: ModelConfig,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype | None = None,
) -> None:
    """Raises ConfigError if `device` is a GPU without the architecture or the limits that our kernels need. 32-bit
    models use torch's operations instead. Raises ModelError if the model is quantized in blocks that the kernels do not
    support."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return
    if model.quantization is not None:
        check_blocks(model.quantization)
    found = limits(device)
    if kv_cache_dtype == torch.float8_e4m3fn and not found.converts_e4m3:
        raise ConfigError(
            f"--kv-cache-dtype fp8_e4m3 on {torch.cuda.get_device_name(device)}: needs compute capability "
            f"{FIRST_WITH_E4M3 / 10}, not {found.architecture / 10}; use fp8_e5m2 or auto"
        )
    try:
        check_limits(found, model, fp8=is_fp8(kv_cache_dtype or dtype))
    except UnsupportedDevice as error:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"--dtype {str(dtype).removeprefix('torch.')} on {name}: {error}; use --dtype float32 or --device cpu, "
            f"which do not need these kernels"
        ) from None


def check_blocks(quantization: Quantization) -> None:
    """Raises ModelError if the number of columns that share a scale is not a multiple of GROUP."""
    columns = quantization.block[1]
    if columns is not None and columns % GROUP:
        raise ModelError(
            f"quantization_config: blocks of {columns} columns are not supported on a GPU, only of multiples of {GROUP}; "
            f"use --device cpu"
        )


def check_limits(found: Limits, model: ModelConfig, *, fp8: bool = False) -> None:
    """Raises UnsupportedDevice if there is no tiling for the model's attention within the limits. `fp8`:
    whether the KV cache is FP8."""
    check_architecture(found)
    for spec in model.attention_specs:
        if isinstance(spec, LatentAttentionSpec):
            widths = spec.kv_lora_rank, spec.qk_rope_head_dim
            for requests in (1, 2, MANY_REQUESTS + 1):
                tiling(spec.num_heads, requests, widths=widths, fp8=fp8, on=found)
        else:
            assert isinstance(spec, GroupedQueryAttentionSpec), f"attention {type(spec)}"
            width, share = spec.head_dim + spec.v_head_dim, spec.num_heads // spec.num_kv_heads
            gqa_tiling(
                share,
                width,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                fp8=fp8,
                on=found,
            )
        prefill_tiling(
            TALL_BLOCK, 2, 1, head_dim=spec.head_dim, v_head_dim=spec.v_head_dim, on=found
        )

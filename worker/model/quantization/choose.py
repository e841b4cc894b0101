"""The value of --quantization, and the checkpoint's own format. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping

from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.quantization.compressed_tensors import METHOD as COMPRESSED_TENSORS
from mla_router.worker.model.quantization.spec import BLOCKS, FP8, INT8, Quantization

# Formats for plain checkpoints, by the value of --quantization
ONLINE: Mapping[str, Quantization] = {
    "fp8": Quantization("fp8", FP8, (128, 128), online=True),
    "w8a8_fp8": Quantization("w8a8_fp8", FP8, BLOCKS["channel"], online=True),
    "w8a8_int8": Quantization("w8a8_int8", INT8, BLOCKS["channel"], online=True),
}


def choose_quantization(config: WorkerConfig, model: ModelConfig) -> Quantization | None:
    """Returns the format of the model's linear layers; None if they are plain. Raises ConfigError if --quantization
    contradicts the checkpoint."""
    wanted, found = config.quantization, model.quantization
    if wanted == "auto":
        return found
    if found is None:
        if wanted not in ONLINE:
            raise ConfigError(
                f"--quantization {wanted}: the checkpoint is not quantized; use one of {', '.join(ONLINE)} to "
                f"quantize it while it loads"
            )
        return ONLINE[wanted]
    if wanted not in _names(found):
        raise ConfigError(
            f"--quantization {wanted}: the checkpoint is quantized already, with {found.dtype} weights of "
            f"quant_method {found.method}; leave the flag out"
        )
    return found


def _names(found: Quantization) -> tuple[str, ...]:
    """Returns the values of --quantization that name the format of a checkpoint."""
    if found.method != COMPRESSED_TENSORS:
        return (found.method,)
    return found.method, "w8a8_int8" if found.dtype == INT8 else "w8a8_fp8"

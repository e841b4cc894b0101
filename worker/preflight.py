"""Checks of the settings before the import of torch, which takes seconds, and before the port is opened."""

from __future__ import annotations

import ctypes
from pathlib import Path

from mla_router.worker.bounded_file import check_bounded, read_bounded
from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.model.config.context_length import choose_context_length
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.quantization.choose import choose_quantization

# The files of a folder that this server, transformers, tokenizers or xgrammar may read whole, and their largest size. The
# largest published tokenizer.json have some 30 MB.
_TEXTS = ("*.json", "*.jinja", "*.txt", "*.model", "additional_chat_templates/*.jinja")
_MAX_TEXT_BYTES = 256 << 20


def check(config: WorkerConfig) -> None:
    """Checks model, files of its folders, division of heads, context length, quantization, chat template and GPU of a
    config with local folders. Raises ConfigError."""
    _check_texts("--model-path", config.folder)
    _check_texts("--tokenizer-path", config.tokenizer_folder)
    if config.draft_folder is not None:
        _check_texts("--speculative-draft-model-path", config.draft_folder)
    try:
        model = read_config(config.folder)
    except ModelError as error:
        raise ConfigError(f"--model-path {config.folder}: {error}") from error
    if config.attn_dp_size > 1 and not getattr(model, "num_experts", 0):
        raise ConfigError(
            f"--enable-dp-attention: this {model.architecture} has no routed experts; leave it out, and each worker of --dp-size "
            f"has a copy of the model"
        )
    if model.num_heads % (parts := config.tp_size // config.attn_dp_size):
        raise ConfigError(
            f"--tp-size {config.tp_size}: the model's {model.num_heads} attention heads cannot be divided into {parts} equal parts"
        )
    choose_context_length(config, model)
    choose_quantization(config, model)
    if config.chat_template:
        _check_readable("--chat-template", Path(config.chat_template))
    if config.device != "cpu":
        _check_gpu(config.device, config.base_gpu_id + len(config.ranks_here) - 1, count_gpus())


def _check_texts(flag: str, folder: Path) -> None:
    for path in [path for pattern in _TEXTS for path in sorted(folder.glob(pattern))]:
        try:
            check_bounded(path, _MAX_TEXT_BYTES)
        except OSError as error:
            raise ConfigError(
                f"{flag} {path}: {error.strerror}; replace it by the model's file, or remove it"
            ) from error


def _check_readable(flag: str, path: Path) -> None:
    try:
        read_bounded(path).decode()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; give a file in Jinja") from error
    except ValueError as error:
        raise ConfigError(f"{flag} {path}: not UTF-8: {error}") from error


def _check_gpu(device: str, wanted: int, count: int) -> None:
    if device == "cuda" and count == 0:
        raise ConfigError("--device cuda: this machine has no GPU, or its driver is not installed")
    if 0 < count <= wanted:
        raise ConfigError(
            f"GPU {wanted}, counted from 0, does not exist: this machine has {count}; lower --dp-size, "
            "--tp-size or --base-gpu-id, or use --device cpu"
        )


def count_gpus() -> int:
    """Returns the number of GPUs that the CUDA driver shows this process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value

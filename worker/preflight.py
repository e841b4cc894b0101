"""Checks of the settings before the import of torch, which takes seconds, and before the port is opened."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import tempfile
from pathlib import Path

from mla_router.worker.bounded_file import check_bounded
from mla_router.worker.config import ConfigError, WorkerConfig
from mla_router.worker.model.config.context_length import choose_context_length
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.config.read import read_config
from mla_router.worker.model.quantization.choose import choose_quantization
from mla_router.worker.tokenizer_files import MalformedError, read_chat_template

# The files of a folder that this server, transformers, tokenizers or xgrammar may read whole, and their largest size. The
# largest published tokenizer.json have some 30 MB.
_TEXTS = ("*.json", "*.jinja", "*.txt", "*.model", "additional_chat_templates/*.jinja")
_MAX_TEXT_BYTES = 256 << 20
_MIN_OPEN_FILES = 128


def check(config: WorkerConfig) -> None:
    """Checks limits of the process, model, files of its folders, division of heads, context length, quantization, chat
    template, folders for records and GPU of a config with local folders. Raises ConfigError."""
    _check_process()
    folders = {
        config.draft_folder: "--speculative-draft-model-path",
        config.tokenizer_folder: "--tokenizer-path",
        config.folder: "--model-path",
    }
    for folder, flag in folders.items():
        if folder is not None:
            _check_texts(flag, folder)
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
        _check_template(Path(config.chat_template))
    for flag, written in (
        ("--profile-dir", config.profile_dir),
        ("--expert-distribution-recorder-dir", config.expert_distribution_recorder_dir),
    ):
        if written:
            _check_writable(flag, Path(written))
    if config.device != "cpu":
        _check_gpu(config.device, config.base_gpu_id + len(config.ranks_here) - 1, count_gpus())


def _check_process() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < _MIN_OPEN_FILES:
        raise ConfigError(
            f"at most {most} open files are allowed, but a worker needs {_MIN_OPEN_FILES}; "
            "raise the hard limit, as by `ulimit -n`"
        )
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError(
            "the working directory has been deleted; change to another one"
        ) from error
    try:
        tempfile.gettempdir()  # for the sockets of the processes
    except FileNotFoundError as error:
        raise ConfigError(
            "no folder for temporary files can be written; name one in TMPDIR"
        ) from error


def _check_texts(flag: str, folder: Path) -> None:
    for path in [path for pattern in _TEXTS for path in sorted(folder.glob(pattern))]:
        try:
            check_bounded(path, _MAX_TEXT_BYTES)
        except OSError as error:
            raise ConfigError(
                f"{flag} {path}: {error.strerror}; replace it by the model's file, or remove it"
            ) from error


def _check_template(path: Path) -> None:
    try:
        read_chat_template(path)
    except MalformedError as error:
        raise ConfigError(str(error)) from error


def _check_writable(flag: str, folder: Path) -> None:
    """Makes the folder if there is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"{flag} {folder}: {error.strerror}; give a folder in which this user may write"
        ) from error


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

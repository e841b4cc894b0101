"""The optional package FlashInfer (Ye et al., 2025, arXiv:2501.01005), and the GPUs for its kernels."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

logger = logging.getLogger(__name__)


def package_reason(name: str, device: torch.device) -> str | None:
    """Returns the reason for which the class `name` of the package cannot be used on the GPU `device`, or None."""
    try:
        flashinfer_class(name)
    except ImportError as error:
        return f"needs FlashInfer: pip install 'mla-router[flashinfer]' ({error})"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"needs a Hopper GPU (sm_90), not sm_{major}{minor}"
    return None


def flashinfer_class(name: str) -> Any:
    """Returns the class `name` of the package. Raises ImportError without it."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError as error:
        raise ImportError(str(error)) from None


@contextmanager
def loading(kernel: str) -> Iterator[None]:
    """Logs the load time of `kernel`, which is first used inside."""
    logger.info(
        "FlashInfer: loading its %s kernel, or compiling it, which can take minutes", kernel
    )
    begin = time.monotonic()
    yield
    logger.info("FlashInfer: ready after %.1f s", time.monotonic() - begin)

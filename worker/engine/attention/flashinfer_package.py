"""FlashInfer (Ye et al., 2025, arXiv:2501.01005) is optional: its package, and the GPUs its kernels here are for."""

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
    """Why the class `name` of the package cannot be used on the GPU `device`."""
    try:
        flashinfer_class(name)
    except ImportError as error:
        return f"needs FlashInfer: pip install 'mla-router[flashinfer]' ({error})"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"needs a Hopper GPU (sm_90), not sm_{major}{minor}"
    return None


def flashinfer_class(name: str) -> Any:
    """The class `name` of the package. Raises ImportError without it."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError as error:
        raise ImportError(str(error)) from None


@contextmanager
def loading(kernel: str) -> Iterator[None]:
    """Says that `kernel` is loaded by what is done inside, its first use, and how long that took."""
    logger.info(
        "FlashInfer: loading its %s kernel, or compiling it, which can take minutes", kernel
    )
    begun = time.monotonic()
    yield
    logger.info("FlashInfer: ready after %.1f s", time.monotonic() - begun)

"""FlashInfer (Ye et al., 2025, arXiv:2501.01005) is optional: its package, and the GPUs its kernels here are for."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mla_router.worker.config import ConfigError

logger = logging.getLogger(__name__)


def flashinfer_class(name: str, flag: str, device: torch.device) -> Any:
    """The class `name` of the package. Raises ConfigError, which begins with `flag`, without the package
    or a Hopper GPU."""
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(f"{flag}: pip install 'mla-router[flashinfer]' ({error})") from None
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        raise ConfigError(
            f"{flag}: is for Hopper GPUs (sm_90), not sm_{major}{minor}: leave it out"
        )
    return found


@contextmanager
def loading(kernel: str) -> Iterator[None]:
    """Says that `kernel` is loaded by what is done inside, its first use, and how long that took."""
    logger.info(
        "FlashInfer: loading its %s kernel, or compiling it, which can take minutes", kernel
    )
    begun = time.monotonic()
    yield
    logger.info("FlashInfer: ready after %.1f s", time.monotonic() - begun)

"""From a Hugging Face folder to a model that is ready to run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.registry import build_model, read_config
from mla_router.worker.model.weights import load_weights


def load_model(folder: Path, *, device: torch.device | str, dtype: torch.dtype) -> CausalLM:
    """The model in `folder` on `device`, its weights converted to `dtype`. Raises ModelError.

    The weights never change again and take no part in autograd.
    """
    config = read_config(folder)
    with torch.device(device), default_dtype(dtype):
        model = build_model(config)
    load_weights(model, config, folder)
    return model.eval()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters made inside are of `dtype`, unless they ask for another."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

"""The config.json of an EAGLE draft head: that of its model, with one layer. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.config.llama import LlamaConfig
from mla_router.worker.model.config.read import read_config, read_raw

# Fields that a head has in common with its model: it takes the model's embedding, head, rotations and attention plan.
SHARED = ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "rope")


def read_draft_config(folder: Path, model: ModelConfig) -> LlamaConfig:
    """Returns the config of the draft head in `folder` for a model of the config `model`. Raises ModelError."""
    path = folder / "config.json"
    raw = read_raw(folder)
    # EAGLE-3 (arXiv:2503.01840) reads hidden states of several layers, and has a vocabulary of its own
    if "draft_vocab_size" in raw or str(raw.get("architectures", [""])[0]).endswith("Eagle3"):
        raise ModelError(
            f"{path}: a head of EAGLE-3, which is not supported; EAGLE-1 and EAGLE-2 are"
        )
    config = read_config(folder)
    if not isinstance(model, LlamaConfig) or not isinstance(config, LlamaConfig):
        raise ModelError(f"{path}: EAGLE heads are supported for Llama models")
    if config.num_layers != 1:
        raise ModelError(f"{path}: a draft head has one layer, not {config.num_layers}")
    for name in SHARED:
        own, other = getattr(config, name), getattr(model, name)
        if own != other:
            raise ModelError(f"{path}: {name} is {own}, but {other} in the model")
    return config

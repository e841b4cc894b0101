"""The config.json of a folder with the layer of a drafter alone. Does not import torch.

Such a layer takes embedding, head and rotations of its model, and shares the attention plan of the model's layers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.deepseek import DeepseekConfig
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.config.llama import LlamaConfig
from mla_router.worker.model.config.read import MALFORMED, parse_config, read_raw

_NEXTN = "ForCausalLMNextN"  # end of the architecture that SGLang's export_deepseek_nextn.py writes


def read_nextn_config(folder: Path, model: DeepseekConfig) -> DeepseekConfig:
    """Returns the config of `model` with the NextN layer in `folder`, which may be quantized otherwise. Raises
    ModelError."""
    path, raw = folder / "config.json", read_raw(folder)
    named = _architecture(path, raw)
    if not named.endswith(_NEXTN):
        raise ModelError(
            f"{path}: {named or 'no architecture'} is not a NextN layer; SGLang's export_deepseek_nextn.py writes "
            f"such folders"
        )
    config = _parsed(path, raw | {"architectures": [named.removesuffix("NextN")]})
    _check_equal(path, config, model, "num_experts", "kv_lora_rank", "q_lora_rank", "v_head_dim")
    return replace(model, num_mtp_layers=1, quantization=config.quantization)


def read_eagle_config(folder: Path, model: ModelConfig) -> LlamaConfig:
    """Returns the config of the EAGLE head in `folder` for `model`. Raises ModelError."""
    path, raw = folder / "config.json", read_raw(folder)
    # EAGLE-3 (arXiv:2503.01840) reads hidden states of several layers, and has a vocabulary of its own
    if "draft_vocab_size" in raw or _architecture(path, raw).endswith("Eagle3"):
        raise ModelError(
            f"{path}: a head of EAGLE-3, which is not supported; EAGLE-1 and EAGLE-2 are"
        )
    named = _architecture(path, raw).removesuffix("Eagle")
    config = _parsed(path, raw | {"architectures": [named]})
    if not type(model) is type(config) is LlamaConfig:
        raise ModelError(f"{path}: EAGLE heads are supported for Llama models")
    if config.num_layers != 1:
        raise ModelError(f"{path}: a draft head has one layer, not {config.num_layers}")
    _check_equal(path, config, model, "num_kv_heads", "head_dim")
    return config


def _architecture(path: Path, raw: dict[str, Any]) -> str:
    named = raw.get("architectures") or [""]
    if not isinstance(named, list):
        raise ModelError(f"{path}: architectures {named!r} is not a list of names")
    return str(named[0])


def _parsed(path: Path, raw: dict[str, Any]) -> ModelConfig:
    try:
        return parse_config(raw)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except MALFORMED as error:
        raise ModelError(f"{path}: malformed: {error!r}") from error


def _check_equal(path: Path, config: ModelConfig, model: ModelConfig, *names: str) -> None:
    for name in ("vocab_size", "hidden_size", "num_heads", "rope", *names):
        own, other = getattr(config, name, None), getattr(model, name)
        if own != other:
            raise ModelError(f"{path}: {name} is {own}, but {other} in the model")

"""Reads the config.json of a Hugging Face folder by its architecture. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_router.worker.bounded_file import read_bounded
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.config.deepseek import parse_v2, parse_v3
from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.config.gemma2 import parse_gemma2
from mla_router.worker.model.config.llama import parse_llama
from mla_router.worker.model.config.llava_onevision import parse_llava_onevision
from mla_router.worker.model.config.qwen2 import parse_qwen2


@dataclass(frozen=True, slots=True)
class Architecture:
    model_type: str  # for configs that name only this
    parse: Callable[[Mapping[str, Any]], ModelConfig]


ARCHITECTURES = {
    "DeepseekV2ForCausalLM": Architecture("deepseek_v2", parse_v2),
    "DeepseekV3ForCausalLM": Architecture("deepseek_v3", parse_v3),
    "Gemma2ForCausalLM": Architecture("gemma2", parse_gemma2),
    "LlamaForCausalLM": Architecture("llama", parse_llama),
    "LlavaOnevisionForConditionalGeneration": Architecture(
        "llava_onevision", parse_llava_onevision
    ),
    "Qwen2ForCausalLM": Architecture("qwen2", parse_qwen2),
}


# Errors of the arithmetic with a config's values that are of another type or out of range
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def read_config(folder: Path) -> ModelConfig:
    """Returns the config of the model in `folder`. Raises ModelError."""
    path = folder / "config.json"
    raw = read_raw(folder)
    try:
        return parse_config(raw)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except MALFORMED as error:
        raise ModelError(f"{path}: malformed: {error!r}") from error


def read_raw(folder: Path) -> dict[str, Any]:
    """Returns the fields of the config.json in `folder`. Raises ModelError."""
    path = folder / "config.json"
    try:
        raw = json.loads(read_bounded(path))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: not a JSON object")
    return raw


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Returns the config of a parsed config.json. Raises ModelError."""
    return ARCHITECTURES[_architecture(raw)].parse(raw)


def _architecture(raw: Mapping[str, Any]) -> str:
    named = (raw.get("architectures") or [None])[0]
    for name, architecture in ARCHITECTURES.items():
        if named == name or (named is None and raw.get("model_type") == architecture.model_type):
            return name
    found = named or raw.get("model_type") or "no architecture at all"
    raise ModelError(f"{found} is not supported; supported are {', '.join(ARCHITECTURES)}")

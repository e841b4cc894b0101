"""The supported models, by the architecture that `config/read.py` finds in a folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mla_router.worker.model.causal_lm import CausalLM
from mla_router.worker.model.config.base import ModelConfig
from mla_router.worker.model.deepseek import DeepseekForCausalLM
from mla_router.worker.model.gemma2 import Gemma2ForCausalLM
from mla_router.worker.model.llama import LlamaForCausalLM
from mla_router.worker.model.llava_onevision import LlavaOnevisionForConditionalGeneration

MODELS: dict[str, Callable[[Any], CausalLM]] = {
    "DeepseekV2ForCausalLM": DeepseekForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekForCausalLM,
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "LlavaOnevisionForConditionalGeneration": LlavaOnevisionForConditionalGeneration,
    "Qwen2ForCausalLM": LlamaForCausalLM,
}


def build_model(config: ModelConfig) -> CausalLM:
    """Returns the model with parameters that have no memory yet (`loader.py`)."""
    return MODELS[config.architecture](config)

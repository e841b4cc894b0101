"""LLaVA-OneVision's config.json: the values of published checkpoints, and refused values."""

from __future__ import annotations

from typing import Any

import pytest

from mla_router.worker.model.config.fields import ModelError
from mla_router.worker.model.config.llava_onevision import LlavaOnevisionConfig
from mla_router.worker.model.config.read import parse_config

# As on the hub, without fields that do not change the arithmetic. Absent fields have transformers' default values.
ONEVISION_7B: dict[str, Any] = {
    "architectures": ["LlavaOnevisionForConditionalGeneration"],
    "model_type": "llava_onevision",
    "torch_dtype": "float16",
    "image_token_index": 151646,
    "video_token_index": 151647,
    "image_grid_pinpoints": [[384, 384], [384, 768]],
    "projector_hidden_act": "gelu",
    "tie_word_embeddings": False,
    "vision_aspect_ratio": "anyres_max_9",
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "text_config": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rope_theta": 1000000.0,
        "torch_dtype": "bfloat16",
        "vocab_size": 152000,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "image_size": 384,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 26,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


def parse(**changes: Any) -> LlavaOnevisionConfig:
    config = parse_config(ONEVISION_7B | changes)
    assert isinstance(config, LlavaOnevisionConfig)
    return config


def text(**changes: Any) -> dict[str, Any]:
    return {"text_config": ONEVISION_7B["text_config"] | changes}


def vision(**changes: Any) -> dict[str, Any]:
    return {"vision_config": ONEVISION_7B["vision_config"] | changes}


def test_onevision_7b() -> None:
    config = parse()
    assert config.architecture == "LlavaOnevisionForConditionalGeneration"
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (28, 4, 128)
    assert (config.vocab_size, config.max_position_embeddings) == (152000, 32768)
    assert (config.attention_bias, config.output_bias, config.dtype) == (True, False, "bfloat16")
    assert (config.tile_size, config.tile_tokens) == (384, 729)
    assert (config.image_token, config.video_token) == (151646, 151647)


def test_the_dtype_of_the_whole_model() -> None:
    own = {k: v for k, v in ONEVISION_7B["text_config"].items() if k != "torch_dtype"}
    assert parse(text_config=own).dtype == "float16"
    # A default of transformers
    assert parse(text_config=own | {"dtype": "float32"}).dtype == "float16"


def test_tied_embeddings_of_the_language_model() -> None:
    assert parse(**text(tie_word_embeddings=True)).tie_word_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "text_config is missing"),
        (text(model_type="llama"), "model_type 'llama' is not supported, only qwen2"),
        (vision(model_type="clip_vision_model"), "'clip_vision_model' .* only siglip_vision_model"),
        (vision(image_size=0), "image_size 0 is not a positive integer"),
        ({"vision_feature_select_strategy": "default"}, "'default' is not supported, only full"),
        ({"vision_aspect_ratio": "pad"}, "'pad' is not supported, only anyres_max_N"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config .* only none"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(ONEVISION_7B | change)

"""The config.json of LLaVA-OneVision: a Qwen2 language model, a SigLIP vision tower, and a projector between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from mla_router.worker.model.config.fields import ModelError, expect, read_dtype, size
from mla_router.worker.model.config.qwen2 import Qwen2Config, parse_qwen2

ARCHITECTURE = "LlavaOnevisionForConditionalGeneration"

# transformers leaves fields with these values out of a nested config.
_TEXT_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_VISION_DEFAULTS = {"image_size": 224, "patch_size": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaOnevisionConfig(Qwen2Config):
    tile_size: int  # pixels of an edge of a tile, which the vision tower takes
    tile_tokens: int  # rows that the tower gives for a tile
    image_token: int
    video_token: int
    aspect_ratio: str
    # The config.json, for transformers' vision tower
    raw: Mapping[str, Any] = field(repr=False, compare=False)


def parse_llava_onevision(raw: Mapping[str, Any]) -> LlavaOnevisionConfig:
    """Raises ModelError."""
    text, vision = _part(raw, "text_config"), _part(raw, "vision_config")
    expect(text, "model_type", "qwen2")
    expect(vision, "model_type", "siglip_vision_model")
    expect(raw, "vision_feature_select_strategy", "full")  # SigLIP has no token to leave out
    expect(raw, "quantization_config")
    tied = raw.get("tie_word_embeddings") or text.get("tie_word_embeddings")
    language = parse_qwen2(
        _TEXT_DEFAULTS | dict(text) | {"dtype": _dtype(raw, text)} | {"tie_word_embeddings": tied}
    )
    vision = _VISION_DEFAULTS | dict(vision)
    edge = size(vision, "image_size")
    of_language = {spec.name: getattr(language, spec.name) for spec in fields(language)}
    return LlavaOnevisionConfig(
        **of_language | {"architecture": ARCHITECTURE},
        tile_size=edge,
        tile_tokens=(edge // size(vision, "patch_size")) ** 2,
        image_token=int(raw.get("image_token_index", 151646)),
        video_token=int(raw.get("video_token_index", 151647)),
        aspect_ratio=_aspect_ratio(raw),
        raw=raw,
    )


def _aspect_ratio(raw: Mapping[str, Any]) -> str:
    value = str(raw.get("vision_aspect_ratio") or "anyres_max_9")
    if not re.fullmatch(r"anyres_max_[1-9]\d*", value):
        raise ModelError(f"vision_aspect_ratio {value!r} is not supported, only anyres_max_N")
    return value


def _dtype(raw: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Returns the dtype of the language model: its own, unless that is float32, which transformers writes into the parts
    of a config by default, whatever the tensors are. Raises ModelError."""
    own = read_dtype(text)
    return read_dtype(raw) if own == "float32" else own


def _part(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = raw.get(name)
    if not isinstance(part, dict):
        raise ModelError(f"{name} is missing")
    return part

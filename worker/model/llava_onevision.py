"""LLaVA-OneVision (arXiv:2408.03326): Qwen2 with images.

The vision tower, the projector and the order of an image's features are transformers'. The language model is ours:
rows of image tokens take their embeddings from `ForwardBatch.embedded`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mla_router.worker.core import ImageFormat, ImageInfo, ImageKind
from mla_router.worker.model.config.llava_onevision import LlavaOnevisionConfig
from mla_router.worker.model.llama import LlamaForCausalLM
from mla_router.worker.model.vision import VisionEncoder

# Prefixes of names in checkpoints, old and new, and of the names here
_PREFIXES = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "model.vision_tower.vision_model.": "vision.vision_tower.",
    "model.vision_tower.": "vision.vision_tower.",
    "vision_tower.vision_model.": "vision.vision_tower.",
    "vision_tower.": "vision.vision_tower.",
    "model.multi_modal_projector.": "vision.multi_modal_projector.",
    "multi_modal_projector.": "vision.multi_modal_projector.",
    "model.image_newline": "vision.image_newline",
    "image_newline": "vision.image_newline",
}


class LlavaOnevisionForConditionalGeneration(LlamaForCausalLM):
    config: LlavaOnevisionConfig

    def __init__(self, config: LlavaOnevisionConfig) -> None:
        super().__init__(config)
        self.vision = LlavaOnevisionVision(config)

    def own_name(self, name: str) -> str:
        for prefix, own in _PREFIXES.items():
            if name.startswith(prefix):
                return own + name.removeprefix(prefix)
        return name


class LlavaOnevisionVision(VisionEncoder):
    def __init__(self, config: LlavaOnevisionConfig) -> None:
        super().__init__()
        reference = _without_language_model(config)
        self.tile_size = config.tile_size
        self.format = ImageFormat(
            config.image_token, config.video_token, config.tile_tokens, config.aspect_ratio
        )
        self.vision_tower: nn.Module = reference.vision_tower
        self.multi_modal_projector: nn.Module = reference.multi_modal_projector
        self.image_newline = reference.image_newline
        # In a tuple: its parameters are those above
        self._reference = (reference,)

    def encode(self, pixels: Tensor, info: ImageInfo) -> Tensor:
        mean, std = (pixels.new_tensor(v, dtype=torch.float32) for v in (info.mean, info.std))
        colours = pixels.float() * info.scale
        normal = (colours - mean[:, None, None]) / std[:, None, None]
        tower = self.vision_tower(normal.to(self.image_newline.dtype), output_hidden_states=True)
        features: Tensor = self.multi_modal_projector(self._selected(tower.hidden_states))
        return features

    def _selected(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        layers = self._reference[0].config.vision_feature_layer
        if isinstance(layers, int):
            return hidden_states[layers]
        return torch.cat([hidden_states[layer] for layer in layers], dim=-1)

    def arrange(self, features: Tensor, info: ImageInfo) -> Tensor:
        (reference,) = self._reference
        if info.kind is ImageKind.VIDEO:
            pooled = reference.apply_pooling(features).flatten(0, 1)
            return torch.cat((pooled, self.image_newline[None]))
        packed, _ = reference.pack_image_features(
            [features],
            [[info.height, info.width]],
            image_newline=self.image_newline,
            vision_aspect_ratio=self.format.aspect_ratio,
        )
        embeddings: Tensor = packed[0]
        return embeddings


def _without_language_model(config: LlavaOnevisionConfig) -> Any:
    """Returns transformers' model of images, with uninitialized weights and a language model of no size, removed."""
    from transformers import LlavaOnevisionConfig as ReferenceConfig
    from transformers import LlavaOnevisionModel
    from transformers.initialization import no_init_weights

    raw = dict(config.raw)
    nothing = {"num_hidden_layers": 1, "intermediate_size": 1, "vocab_size": 1, "layer_types": None}
    raw["text_config"] = {**raw["text_config"], **nothing, "pad_token_id": None}
    raw["vision_config"] = dict(raw["vision_config"])
    # Without a dtype of its own each part takes the current default
    for part in (raw, raw["text_config"], raw["vision_config"]):
        part.pop("dtype", None)
        part.pop("torch_dtype", None)
    with no_init_weights():
        reference: Any = LlavaOnevisionModel(ReferenceConfig(**raw))  # type: ignore[no-untyped-call]
    del reference.language_model
    return reference

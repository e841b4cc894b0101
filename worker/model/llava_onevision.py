"""LLaVA-OneVision (arXiv:2408.03326): Qwen2 with images.

The modules of the vision tower and of the projector are transformers'. They are called one by one here, because a whole
tower would hold up the decode steps. The language model is ours: rows of image tokens take their embeddings from
`ForwardBatch.embedded`.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from mla_router.worker.images import ImageFormat, ImageInfo, ImageKind
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
        vision = reference.config.vision_config
        self.vision_width: int = vision.hidden_size
        self.edge: int = vision.image_size // vision.patch_size  # rows of features of a tile
        self.grids: list[list[int]] = reference.config.image_grid_pinpoints
        self.max_tiles = int(config.aspect_ratio.removeprefix("anyres_max_"))
        chosen = reference.config.vision_feature_layer
        chosen = [chosen] if isinstance(chosen, int) else chosen
        depth = vision.num_hidden_layers + 1  # with the embeddings
        self.feature_layers = [range(depth)[layer] for layer in chosen]
        self.num_layers = max(self.feature_layers) + 2  # with the embeddings and the projector
        # In a tuple: its parameters are those above
        self._reference = (reference,)

    def embed(self, pixels: Tensor, info: ImageInfo) -> Tensor:
        # Colour by colour: a tensor of the values would be a copy to the device that the host waits for
        colours = [
            (pixels[:, colour].float() * info.scale - info.mean[colour]) / info.std[colour]
            for colour in range(3)
        ]
        tower: Any = self.vision_tower
        hidden: Tensor = tower.embeddings(torch.stack(colours, 1).to(self.image_newline.dtype))
        return hidden

    def empty(self, tiles: int, device: torch.device) -> Tensor:
        rows, width = self.format.tile_tokens, self.vision_width
        return torch.empty(tiles, rows, width, dtype=self.image_newline.dtype, device=device)

    def layers(self, hidden: Tensor) -> Generator[None, None, Tensor]:
        tower: Any = self.vision_tower
        states = {0: hidden} if 0 in self.feature_layers else {}
        for depth, layer in enumerate(tower.encoder.layers[: max(self.feature_layers)], 1):
            hidden = layer(hidden, None)
            if depth in self.feature_layers:
                states[depth] = hidden
            yield
        selected = torch.cat([states[depth] for depth in self.feature_layers], dim=-1)
        features: Tensor = self.multi_modal_projector(selected)
        return features

    def arrange(self, features: Tensor, info: ImageInfo) -> Tensor:
        newline = self.image_newline[None]
        if info.kind is ImageKind.VIDEO:
            (reference,) = self._reference
            return torch.cat((reference.apply_pooling(features).flatten(0, 1), newline))
        if info.num_tiles == 1:
            return torch.cat((features[0], newline))
        rows = self._rows(features[1:], info)
        newlines = newline.expand(len(rows), 1, -1)
        return torch.cat((features[0], torch.cat((rows, newlines), dim=1).flatten(0, 1)))

    def _rows(self, tiles: Tensor, info: ImageInfo) -> Tensor:
        """Returns the features [rows, columns, hidden_size] of a picture from those of its tiles, without its border and
        no larger than `max_tiles`. transformers' `pack_image_features` gives the same, but waits for the device."""
        from transformers.models.llava_onevision.modeling_llava_onevision import (
            get_anyres_image_grid_shape,
            unpad_image,
        )

        size = [info.height, info.width]
        rows, columns = get_anyres_image_grid_shape(size, self.grids, self.tile_size)  # type: ignore[no-untyped-call]
        by_tile = tiles.view(rows, columns, self.edge, self.edge, -1)
        picture = by_tile.permute(4, 0, 2, 1, 3).flatten(3, 4).flatten(1, 2)
        picture = unpad_image(picture, size)  # type: ignore[no-untyped-call]
        height, width = picture.shape[1:]
        ratio = math.sqrt(height * width / (self.max_tiles * self.edge**2))
        if ratio > 1.1:
            smaller = [int(height // ratio), int(width // ratio)]
            picture = nn.functional.interpolate(picture[None], smaller, mode="bilinear")[0]
        return picture.permute(1, 2, 0)


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

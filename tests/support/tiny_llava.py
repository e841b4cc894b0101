"""A small random LLaVA-OneVision checkpoint, written by transformers' classes, and their answers about images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedTokenizerFast,
)

if TYPE_CHECKING:
    from PIL.Image import Image

from support.tiny_model import COMMON, VOCAB_SIZE, _spread, tiny_tokenizer

TILE, PATCH = 42, 14  # pixels of an edge; 9 rows a tile
IMAGE, VIDEO = "<image>", "<video>"
# transformers' template of the published checkpoints, for images and text
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'video') %}<video>{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ '\\n' + part['text'] }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BICUBIC = 3  # Pillow's number of it
GRID = [[TILE * rows, TILE * columns] for rows in range(1, 5) for columns in range(1, 5)]


def llava_config(**changes: Any) -> LlavaOnevisionConfig:
    text = COMMON | {"num_key_value_heads": 2, "vocab_size": VOCAB_SIZE + 2}
    return LlavaOnevisionConfig(
        text_config=text | {"model_type": "qwen2"},
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": TILE,
            "patch_size": PATCH,
            "vision_use_head": False,
        },
        image_token_index=VOCAB_SIZE,
        video_token_index=VOCAB_SIZE + 1,
        image_grid_pinpoints=GRID,
        **{"vision_aspect_ratio": "anyres_max_4"} | changes,
    )


def llava_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE, VIDEO]})
    assert tokenizer.convert_tokens_to_ids([IMAGE, VIDEO]) == [VOCAB_SIZE, VOCAB_SIZE + 1]
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_tiny_llava(
    folder: Path, *, seed: int = 0, processor: bool = True, **changes: Any
) -> None:
    """`processor`: writes its config as well, which needs Pillow."""
    torch.manual_seed(seed)
    model = LlavaOnevisionForConditionalGeneration(llava_config(**changes))
    _spread(model)
    model.save_pretrained(folder)
    llava_tokenizer().save_pretrained(folder)
    if processor:
        size = {"height": TILE, "width": TILE}
        _processor()(size=size, image_grid_pinpoints=GRID).save_pretrained(folder)


def _processor() -> Any:
    """Returns transformers' class of the image processor, which needs Pillow."""
    from transformers.models.llava_onevision import image_processing_pil_llava_onevision as module

    return module.LlavaOnevisionImageProcessorPil


@dataclass(frozen=True, slots=True)
class Answer:
    prompt: list[int]  # with all placeholders
    tokens: list[int]
    logprobs: list[float]


class LlavaReference:
    """transformers' model in float32."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = LlavaOnevisionForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self._images = _processor().from_pretrained(folder)
        self._image_token = self._model.config.image_token_index

    @torch.inference_mode()
    def answer(
        self,
        prompt: Sequence[int],
        images: Sequence[Image],
        new_tokens: int,
        video: Sequence[Image] = (),
    ) -> Answer:
        """Answers greedily. `prompt` has one placeholder for each image, and one for the frames of `video`."""
        inputs: dict[str, Any] = {}
        lengths: list[int] = []
        if images:
            inputs = dict(self._images([list(images)], return_tensors="pt"))
            features = self._model.get_image_features(**inputs, return_dict=True).pooler_output
            lengths = [len(one) for one in features]
        tokens: list[int] = []
        following = iter(lengths)
        in_video = 0
        if video:
            frames = inputs["pixel_values_videos"] = self._frames(video)
            pooled = self._model.get_video_features(frames, return_dict=True).pooler_output
            in_video = pooled.shape[1] + 1  # a newline
        for token in prompt:
            count = next(following) if token == self._image_token else 1
            if token == self._model.config.video_token_index:
                count = in_video
            tokens += [token] * count
        ids = torch.tensor([tokens])
        out = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **inputs,
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            eos_token_id=[],
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        answered = out.sequences[0, len(tokens) :].tolist()
        scores = [logits[0].log_softmax(-1) for logits in out.logits]
        logprobs = [float(row[t]) for row, t in zip(scores, answered, strict=True)]
        return Answer(tokens, answered, logprobs)

    def _frames(self, video: Sequence[Image]) -> torch.Tensor:
        """Returns pixels [1, frames, 3, TILE, TILE]: each frame resized as a whole, by Pillow itself."""
        frames = [frame.resize((TILE, TILE), BICUBIC) for frame in video]
        pixels = torch.tensor(np.stack([np.asarray(frame) for frame in frames]))
        colours = pixels.permute(0, 3, 1, 2).double() / 255
        mean, std = (
            torch.tensor(values)[:, None, None]
            for values in (self._images.image_mean, self._images.image_std)
        )
        return ((colours - mean) / std).float()[None]

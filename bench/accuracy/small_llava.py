"""The files of a small LLaVA-OneVision besides its weights: configuration, tokenizer, chat template, image processor.

It has the layout of LLaVA-OneVision (a SigLIP tower, a projector, a Qwen2 language model) and the template of its published
checkpoints, at a size that a CPU trains and serves. Nothing is downloaded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from pictures.tasks import SIZES, TASKS, TILE
from small_model import byte_level_bpe, write_json
from transformers import LlavaOnevisionConfig

SEED = 20261126
PATCH = 16  # pixels of an edge, as of a cell of the drawings: 9 rows a tile, 4 rows a frame
END, TURN, TURN_END, IMAGE, VIDEO = MARKS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image>",
    "<video>",
)
VOCAB_SIZE = 384
CONTEXT = 4096
BEFORE = f"{TURN}user "  # the text before the images of a question

CHAT_TEMPLATE = """\
{%- for message in messages -%}
  {{- '<|im_start|>' + message['role'] + ' ' -}}
  {%- for part in message['content'] | selectattr('type', 'equalto', 'image') -%}{{- '<image>' -}}{%- endfor -%}
  {%- for part in message['content'] | selectattr('type', 'equalto', 'video') -%}{{- '<video>' -}}{%- endfor -%}
  {%- for part in message['content'] | selectattr('type', 'equalto', 'text') -%}
    {{- '\\n' + part['text'] -}}
  {%- endfor -%}
  {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def after(question: str) -> str:
    """Returns the text between the images of a question and its answer, as the template has it."""
    return f"\n{question}{TURN_END}{TURN}assistant\n"


def config() -> LlavaOnevisionConfig:
    return LlavaOnevisionConfig(
        text_config={
            "model_type": "qwen2",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "initializer_range": 0.06,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": MARKS.index(TURN_END),
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "image_size": TILE,
            "patch_size": PATCH,
            "vision_use_head": False,
        },
        image_token_index=MARKS.index(IMAGE),
        video_token_index=MARKS.index(VIDEO),
        image_grid_pinpoints=[list(size) for size in SIZES],
        vision_aspect_ratio="anyres_max_4",
        tie_word_embeddings=True,
    )


def corpus() -> Iterator[str]:
    draw = random.Random(SEED)
    for make in TASKS.values():
        for _ in range(100):
            problem = make(draw, SIZES[0], False)
            yield from ("user assistant\n", problem.question, problem.answer)


def write_tokenizer(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_bpe(corpus(), VOCAB_SIZE, list(MARKS))
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    write_json(out / "generation_config.json", {"eos_token_id": MARKS.index(TURN_END)})
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": TURN_END,
            "pad_token": END,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
        },
    )


def write_processor(out: Path) -> None:
    """Needs Pillow."""
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )

    pinpoints = [list(size) for size in SIZES]
    LlavaOnevisionImageProcessorPil(
        size={"height": TILE, "width": TILE},
        image_grid_pinpoints=pinpoints,
        image_mean=[0.5] * 3,  # SigLIP's, as training has them; the class's default is CLIP's
        image_std=[0.5] * 3,
    ).save_pretrained(out)

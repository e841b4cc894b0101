"""Picture tasks of bench/accuracy: pictures are cut as the server cuts them, and the training computes transformers' model."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

Image = pytest.importorskip("PIL.Image", reason="needs Pillow: requirements.lock has it")

import small_llava
from pictures.batches import batch, cut
from pictures.tasks import SINGLE, SIZES, TASKS, TILE
from train_llava import Trained

from mla_router.worker.images import ImageFormat
from mla_router.worker.server.media.onevision import OnevisionProcessor

ROWS = (TILE // small_llava.PATCH) ** 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small_llava")
    small_llava.write_tokenizer(folder)
    small_llava.write_processor(folder)
    return folder


@pytest.mark.parametrize("size", SIZES)
def test_a_picture_alone_has_the_tiles_of_the_server(folder: Path, size: tuple[int, int]) -> None:
    processor = OnevisionProcessor(folder, ImageFormat(3, 4, ROWS, "anyres_max_4"), 384)
    (picture,) = TASKS["counting"](random.Random(1), size, True).pictures
    made = processor.process(Image.fromarray(picture), alone=True)
    assert made.tiles == np.ascontiguousarray(cut("counting", picture)).tobytes()
    # As training scales the colours
    assert made.info.mean == made.info.std == (0.5, 0.5, 0.5)


def test_several_pictures_have_one_tile_each(folder: Path) -> None:
    processor = OnevisionProcessor(folder, ImageFormat(3, 4, ROWS, "anyres_max_4"), 384)
    for picture in TASKS["several"](random.Random(1), SIZES[0], True).pictures:
        made = processor.process(Image.fromarray(picture), alone=False)
        assert made.tiles == np.ascontiguousarray(cut("several", picture)).tobytes()


@pytest.mark.parametrize("name", ["counting", "frames", "several"])
@torch.no_grad()
def test_the_training_computes_the_logits_of_transformers(folder: Path, name: str) -> None:
    torch.manual_seed(0)
    network = Trained(None).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for size in SIZES if name in SINGLE else SIZES[:1]:
        asked = batch(tokenizer, name, [TASKS[name](random.Random(2), size, True)])
        pixels = asked.tiles.float() / 127.5 - 1
        count = asked.tiles.shape[1]
        if name == "frames":
            pictures = {"pixel_values_videos": pixels}
            rows, mark = count * 4 + 1, small_llava.VIDEO
        else:
            alone = name in SINGLE
            pictures = {
                "pixel_values": pixels if alone else pixels[0][:, None],
                "image_sizes": torch.tensor([size] * (1 if alone else count)),
                "batch_num_images": torch.tensor([1 if alone else count]),
            }
            height, width = size[0] // small_llava.PATCH, size[1] // small_llava.PATCH
            rows = ROWS + height * (width + 1) if alone else count * (ROWS + 1)
            mark = small_llava.IMAGE
        ids = torch.cat(
            (
                asked.tokens[:, : asked.layout.before],
                torch.full((1, rows), small_llava.MARKS.index(mark)),
                asked.tokens[:, asked.layout.before :],
            ),
            dim=1,
        )
        wanted = network.whole(input_ids=ids, **pictures).logits[:, asked.layout.before + rows :]
        torch.testing.assert_close(network(asked), wanted, atol=1e-4, rtol=1e-4)


def test_questions_are_those_of_the_chat_template(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    parts = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
    )
    assert text == small_llava.BEFORE + small_llava.IMAGE + small_llava.after("How many?")


def test_no_held_out_problem_is_in_training() -> None:
    draw = random.Random(3)
    for name in ("digits", "frames", "several"):
        taught = {TASKS[name](draw, SIZES[0], False).answer for _ in range(200)}
        asked = {TASKS[name](draw, SIZES[0], True).answer for _ in range(50)}
        assert not {answer for answer in taught & asked if len(answer) > 1}

"""Random requests with images for a scripted scheduler with a tiny LLaVA, without pixels of a file."""

from __future__ import annotations

import random

from mla_router.worker.images import Image, ImageInfo, ImageKind, PlacedImage
from mla_router.worker.messages import Abort, Generate, ToScheduler
from support.random_sampling import random_sampling
from support.tiny_llava import TILE
from support.tiny_model import VOCAB_SIZE

IMAGE_TOKEN = VOCAB_SIZE
# (tiles, tokens, edge of the original): of a single tile, of four tiles beside a small copy, and of three frames
_SHAPES = {
    ImageKind.SINGLE: (1, 9 + 1, TILE),
    ImageKind.TILED: (5, 9 + 36 + 6, 2 * TILE),
    ImageKind.VIDEO: (3, 3 * 4 + 1, TILE),
}


def random_image(rng: random.Random, number: int) -> Image:
    kind = rng.choice([*ImageKind])
    tiles, tokens, edge = _SHAPES[kind]
    key = VOCAB_SIZE + 2 + (number << 40)
    info = ImageInfo(
        key, kind, tokens, tiles, edge, edge, 1 / 255, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    )
    return Image(info, rng.randbytes(tiles * 3 * TILE * TILE))


def image_script(seed: int, count: int, *, aborts: bool) -> dict[int, list[ToScheduler]]:
    """Returns `count` requests, most of them with some of a few images, at random times. A fifth of them is aborted."""
    rng = random.Random(seed)
    images = [random_image(rng, number) for number in range(6)]
    script: dict[int, list[ToScheduler]] = {}
    for n in range(count):
        prompt, placed = [5, 6, 7], []
        for image in rng.choices(images, k=rng.randrange(4)):
            placed.append(PlacedImage(image, len(prompt)))
            prompt += [IMAGE_TOKEN] * image.info.num_tokens
            prompt += [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(3))]
        prompt += [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 9))]
        sampling = random_sampling(rng, VOCAB_SIZE, rng.randint(1, 24))
        arrives = rng.randrange(count)
        script.setdefault(arrives, []).append(Generate(f"r{n}", prompt, sampling, images=placed))
        if aborts and rng.random() < 0.2:
            script.setdefault(arrives + rng.randrange(30), []).append(Abort(f"r{n}"))
    return script

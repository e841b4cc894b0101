"""Endless batches of picture problems: tiles as the processor cuts them, and the tokens of questions and answers."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import small_llava
import torch
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from pictures.drawing import Picture
from pictures.tasks import FRAMES, SIZES, TASKS, TILE, Maker, Problem, frames

# Each batch has pictures of one layout. (task or "single", size, weight)
LAYOUTS = [
    ("single", SIZES[0], 0.3),
    ("single", SIZES[1], 0.4),
    ("frames", SIZES[0], 0.24),
    ("several", SIZES[0], 0.06),
]
# Digits and colours need more examples than counting, as videos do
LENGTHS = 16  # the lengths of batches are multiples of it, for few shapes
SINGLE_WEIGHTS = {"counting": 0.1, "digits": 0.45, "colours": 0.45}


class Layout(NamedTuple):
    """What a batch's tensors have in common. Batches with the same layout have the same shapes."""

    kind: str  # a task
    size: tuple[int, int]  # of a picture
    tiles: int  # of a problem
    length: int  # T
    before: int  # tokens before the pictures


@dataclass(frozen=True, slots=True)
class Batch:
    """Problems with as many pictures each, of one size. The tokens have no placeholders: the rows of the pictures come
    after the first `layout.before` tokens."""

    layout: Layout
    tiles: Tensor  # [B, tiles of a problem, 3, TILE, TILE] uint8
    tokens: Tensor  # [B, T] int64, padded with 0
    weights: Tensor  # [B, T] in the loss; 1 for a token of an answer

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.tiles, self.tokens, self.weights

    def to(self, device: torch.device) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Pins the tensors. DataLoader calls it by this name."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(self.layout, *map(change, self.tensors))


class Batches(IterableDataset[Batch]):
    def __init__(self, tokenizer_file: Path, problems: int, seed: int) -> None:
        """`problems`: in a batch."""
        self.tokenizer_file = tokenizer_file
        self.problems, self.seed = problems, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        draw = random.Random(self.seed * 1000 + (worker.id if worker else 0))
        tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        shares = [share for _, _, share in LAYOUTS]
        while True:
            ((kind, size, _),) = draw.choices(LAYOUTS, shares)
            kinds = SINGLE_WEIGHTS if kind == "single" else {kind: 1.0}
            weights = list(kinds.values())
            makers: list[Maker] = [TASKS[name] for name in kinds]
            if kind == "frames":
                makers = [functools.partial(frames, count=draw.choice(FRAMES))]
            chosen = draw.choices(makers, weights, k=self.problems)
            problems = [make(draw, size, False) for make in chosen]
            yield batch(tokenizer, kind, problems)


def batch(tokenizer: Tokenizer, kind: str, problems: Sequence[Problem]) -> Batch:
    """Returns a batch of problems of one layout."""
    tiles = np.stack([np.concatenate([cut(kind, p) for p in one.pictures]) for one in problems])
    rows = []
    before = tokenizer.encode(small_llava.BEFORE).ids
    for problem in problems:
        asked = tokenizer.encode(small_llava.after(problem.question)).ids
        answer = tokenizer.encode(problem.answer + small_llava.TURN_END).ids
        rows.append((before + asked + answer, len(answer)))
    longest = -(-max(len(row) for row, _ in rows) // LENGTHS) * LENGTHS
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    weights = torch.zeros(len(rows), longest)
    for index, (row, answer_length) in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
        weights[index, len(row) - answer_length : len(row)] = 1
    height, width, _ = problems[0].pictures[0].shape
    layout = Layout(kind, (height, width), tiles.shape[1], longest, len(before))
    return Batch(layout, torch.from_numpy(tiles), tokens, weights)


def cut(kind: str, picture: Picture) -> NDArray[np.uint8]:
    """Returns the tiles [N, 3, TILE, TILE] of a picture, as transformers' processor makes them for these sizes: the whole
    picture small, then, if it is alone, its parts."""
    height, width, _ = picture.shape
    small = np.asarray(Image.fromarray(picture).resize((TILE, TILE), Image.Resampling.BICUBIC))
    tiles = [small]
    if kind not in ("frames", "several"):
        tiles += [
            picture[top : top + TILE, left : left + TILE]
            for top in range(0, height, TILE)
            for left in range(0, width, TILE)
        ]
    return np.stack(tiles).transpose(0, 3, 1, 2)

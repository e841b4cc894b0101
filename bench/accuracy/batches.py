"""Endless training text: examples of all tasks, one after the other in rows of equal length."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from first_questions import asks_held_out
from tasks import TASKS, Example, Maker, Part
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

EXAMPLES_A_TURN = 64  # tokenized together
QUESTION_WEIGHT = 0.05  # weight of a token of a question; a token of an answer has 1


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    """Yields tokens [rows, length] int16, and their weights in the loss, float32."""

    def __init__(
        self,
        tokenizer_file: str,
        rows: int,
        length: int,
        seed: int,
        tasks: Mapping[str, tuple[Maker, float]] = TASKS,
    ) -> None:
        self.tokenizer_file, self.tasks = tokenizer_file, tasks
        self.rows, self.length, self.seed = rows, length, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        draw = random.Random(self.seed * 1000 + (worker.id if worker else 0))
        tokenizer = Tokenizer.from_file(self.tokenizer_file)
        makers = [maker for maker, _ in self.tasks.values()]
        weights = [weight for _, weight in self.tasks.values()]
        size = self.rows * self.length
        tokens, shares = np.empty(0, np.int16), np.empty(0, np.float32)
        while True:
            pieces: list[tuple[np.ndarray, np.ndarray]] = [(tokens, shares)]
            have = len(tokens)
            while have < size:
                chosen = draw.choices(makers, weights, k=EXAMPLES_A_TURN)
                drawn = (maker(draw, False) for maker in chosen)
                kept = [example for example in drawn if not asks_held_out(example)]
                for example in encode(tokenizer, kept):
                    pieces.append(example)
                    have += len(example[0])
            tokens, shares = (np.concatenate(column) for column in zip(*pieces, strict=True))
            shape = self.rows, self.length
            yield (
                torch.from_numpy(tokens[:size].reshape(shape).copy()),
                torch.from_numpy(shares[:size].reshape(shape).copy()),
            )
            tokens, shares = tokens[size:], shares[size:]


def encode(tokenizer: Tokenizer, examples: list[Example]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the tokens of each example and their weights; tokens of answers have 1."""
    texts = [part.text for example in examples for part in example]
    ids = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    encoded = []
    for example in examples:
        runs = [(encoding.ids, weight(part)) for part, encoding in zip(example, ids, strict=False)]
        tokens = list(itertools.chain.from_iterable(run for run, _ in runs))
        shares = [share for run, share in runs for _ in run]
        encoded.append((np.array(tokens, np.int16), np.array(shares, np.float32)))
    return encoded


def weight(part: Part) -> float:
    """Returns the weight of the tokens of `part` in the loss."""
    return 1.0 if part.is_answer else 0.0 if part.is_forced else QUESTION_WEIGHT

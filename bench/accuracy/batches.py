"""Endless training text: examples of all tasks, one behind the other in rows of equal length."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import torch
from tasks import TASKS, Example
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

EXAMPLES_A_TURN = 64  # tokenized together


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    """Yields tokens [rows, length] int16, and which of them are part of an answer, bool."""

    def __init__(self, tokenizer_file: str, rows: int, length: int, seed: int) -> None:
        self.tokenizer_file = tokenizer_file
        self.rows, self.length, self.seed = rows, length, seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        draw = random.Random(self.seed * 1000 + (worker.id if worker else 0))
        tokenizer = Tokenizer.from_file(self.tokenizer_file)
        makers = [maker for maker, _ in TASKS.values()]
        weights = [weight for _, weight in TASKS.values()]
        size = self.rows * self.length
        tokens, answers = np.empty(0, np.int16), np.empty(0, bool)
        while True:
            pieces: list[tuple[np.ndarray, np.ndarray]] = [(tokens, answers)]
            have = len(tokens)
            while have < size:
                chosen = draw.choices(makers, weights, k=EXAMPLES_A_TURN)
                for example in encode(tokenizer, [maker(draw, False) for maker in chosen]):
                    pieces.append(example)
                    have += len(example[0])
            tokens, answers = (np.concatenate(column) for column in zip(*pieces, strict=True))
            shape = self.rows, self.length
            yield (
                torch.from_numpy(tokens[:size].reshape(shape).copy()),
                torch.from_numpy(answers[:size].reshape(shape).copy()),
            )
            tokens, answers = tokens[size:], answers[size:]


def encode(tokenizer: Tokenizer, examples: list[Example]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The tokens of each example, and which of them it must say."""
    texts = [part.text for example in examples for part in example]
    ids = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    encoded = []
    for example in examples:
        runs = [
            (encoding.ids, part.is_answer) for part, encoding in zip(example, ids, strict=False)
        ]
        tokens = list(itertools.chain.from_iterable(run for run, _ in runs))
        answers = [is_answer for run, is_answer in runs for _ in run]
        encoded.append((np.array(tokens, np.int16), np.array(answers, bool)))
    return encoded

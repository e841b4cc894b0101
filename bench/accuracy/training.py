"""Flags, data and loss of the trainers of the small models."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from batches import Rows
from tasks import TASKS, Maker
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

WARM_UP_STEPS = 200

Batch = TypeVar("Batch")


def add_flags(parser: argparse.ArgumentParser, *, seed: int) -> None:
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--results", type=Path, help="file to append the JSON line to")


def add_text_flags(
    parser: argparse.ArgumentParser, *, rows: int, length: int, examples: int
) -> None:
    """Adds the flags of a model that learns the text of `Rows`."""
    parser.add_argument("--rows", type=int, default=rows, help="of --length tokens, in each step")
    parser.add_argument("--length", type=int, default=length)
    parser.add_argument("--eval-examples", type=int, default=examples, help="of each task")


def prepare(seed: int) -> torch.device:
    """Seeds torch, and returns the device to train on."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def loaded(
    batches: IterableDataset[Batch], args: argparse.Namespace, device: torch.device
) -> Iterator[Batch]:
    """Yields `batches`, made by `--workers` processes, in memory that `device` can copy from."""
    yield from DataLoader(
        batches, batch_size=None, num_workers=args.workers, pin_memory=device.type == "cuda"
    )


def text(
    args: argparse.Namespace,
    tokenizer: Path,
    device: torch.device,
    tasks: Mapping[str, tuple[Maker, float]] = TASKS,
    *,
    ahead: int = 1,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields tokens [rows, length + `ahead`] int64 of `tasks`, and their weights in the loss."""
    rows = Rows(str(tokenizer), args.rows, args.length + ahead, args.seed, tasks)
    for tokens, weights in loaded(rows, args, device):
        yield (
            tokens.to(device, non_blocking=True).long(),
            weights.to(device, non_blocking=True),
        )


def weighted(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Returns the mean cross-entropy of `targets` [B, T], weighted."""
    each = functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), reduction="none"
    )
    return (each * weights.flatten()).sum() / weights.sum()


def runs(flags: list[bool]) -> list[tuple[int, int]]:
    """Returns the maximal ranges in which `flags` is true."""
    edges = [
        i
        for i in range(len(flags) + 1)
        if (i > 0 and flags[i - 1]) != (i < len(flags) and flags[i])
    ]
    return list(zip(edges[::2], edges[1::2], strict=True))

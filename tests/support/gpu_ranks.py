"""Ranks that use the memory of GPUs: several processes on one GPU, and on as many GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.ranks import Ranks

SIZES = [("GPUs", 2), ("GPUs", 4), ("one GPU", 2), ("one GPU", 4)]


def ranks_on_gpus(where: str, size: int, memory: str) -> Iterator[tuple[Ranks, int]]:
    """Yields ranks of SIZES with `memory`, "mailboxes" or "row boxes", and their number. Skips the test if there are not as
    many GPUs."""
    if where == "GPUs" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    processes = Ranks(size, f"{memory} on {where}")
    yield processes, size
    processes.close()

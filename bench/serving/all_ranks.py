"""Runs a bench on all ranks of a model (`--tp-size`), each with its GPU and process.

Each rank runs the same function, and so launches the same steps: none sends another one its plans, as a worker does
(`worker/ranks/`). So no plan may depend on a measured time.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch._C._distributed_c10d import FileStore, PrefixStore

from mla_router.worker.config import WorkerConfig
from mla_router.worker.engine.engine import Engine
from mla_router.worker.ranks.load import load_rank

R = TypeVar("R")


@dataclass
class Loader:
    """Loads the engines of a rank."""

    rank: int
    store: Path  # file that the ranks share
    loaded: int = 0

    def __call__(self, config: WorkerConfig) -> Engine:
        """Returns an engine. All ranks load equally many, with the same settings."""
        if config.tp_size == 1:
            return load_rank(config, 0, None)
        self.loaded += 1
        # Each engine meets those of the other ranks at keys of its own
        store = PrefixStore(f"engine {self.loaded}", FileStore(str(self.store), -1))
        return load_rank(config, self.rank, store)


def on_all_ranks(measure: Callable[..., R], config: WorkerConfig, *arguments: Any) -> R:
    """Returns the result of measure(loader, *arguments) on rank 0. The others print nothing. DP ranks (`--attn-dp-size`) launch
    steps of equally many rows. Raises SystemExit for those with drafts, on which they agree by measured times."""
    if config.attn_dp_size > 1 and config.speculative_algorithm != "none":
        raise SystemExit(f"--attn-dp-size {config.attn_dp_size}: DP ranks agree on their drafts")
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        context = multiprocessing.get_context("spawn")
        others = [
            context.Process(target=_other, args=(measure, rank, store, arguments), daemon=True)
            for rank in range(1, config.tp_size)
        ]
        for other in others:
            other.start()
        result = measure(Loader(0, store), *arguments)
        for other in others:
            other.join()
    if others:
        atexit.register(_end)
    return result


def _end() -> None:
    """Ends this process without the teardown of NCCL, which would wait for ranks that have ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _other(measure: Callable[..., Any], rank: int, store: Path, arguments: tuple[Any, ...]) -> None:
    with open(os.devnull, "w") as nowhere:
        sys.stdout = nowhere
        measure(Loader(rank, store), *arguments)
        _end()

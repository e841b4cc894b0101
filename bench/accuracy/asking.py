"""The flags of the benches that ask a served model held-out questions."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--workers", type=int, default=1, help="behind the router")
    parser.add_argument("--questions", type=int, default=200, help="of each task")
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--least", type=float, default=0.95, help="share of right answers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file to append the JSON line to")


# Kept with the results
CONFIG = ("device", "dtype", "workers", "questions", "parallel")


def worker_flags(args: argparse.Namespace) -> list[str]:
    """Returns the flags of the worker to ask."""
    return [
        f"--{name.replace('_', '-')}={getattr(args, name)}"
        for name in ("model_path", "device", "dtype")
    ]

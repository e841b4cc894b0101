"""The router's binaries and its mock engine, unoptimized."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from support.processes import ROOT


@cache
def build_binaries() -> Path:
    """Builds all binaries. Returns their folder.

    The features of dependencies are those of `cargo test --workspace`, because an example is built as well: after it
    nothing is left to compile.
    """
    cargo = ["cargo", "build", "--quiet", "--locked", "--workspace", "--bins"]
    subprocess.run([*cargo, "--example", "own_policy"], cwd=ROOT, check=True)
    return ROOT / "target" / "debug"

"""Writes the result of a bench: one JSON line with the figures, the machine and the commit.

Kept lines are in `bench/results/<bench>.jsonl`; see `bench/results/README.md`.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "transformers")


def _commit() -> str:
    """Returns the short hash of the commit, with `+` if the tree differs from it in more than kept figures."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
        return done.stdout.strip()

    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + (
        "+"
        if git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/bench/results")
        else ""
    )


def _command() -> str:
    """Returns the command to run at the root of the repository, without the option for the output file."""
    script = Path(sys.argv[0]).resolve()
    words = [str(script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name)]
    arguments = iter(sys.argv[1:])
    for word in arguments:
        if word in ("--out", "--output-file"):
            next(arguments, None)
        elif not word.startswith(("--out=", "--output-file=")):
            words.append(word)
    return shlex.join(["python", *words])


def _machine() -> dict[str, Any]:
    cpu = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    machine = {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "os": platform.platform()}
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = [
        line.partition(":")[2].strip()
        for gpu in gpus
        for line in gpu.read_text().splitlines()
        if line.startswith("Model")
    ]
    return machine | ({"gpus": models} if models else {})


def _versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def record(bench: str, result: dict[str, Any], out: Path | None) -> None:
    """Prints the line as the last one of the output, and appends it to `out`."""
    line = json.dumps(
        {
            "bench": bench,
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": _commit(),
            "command": _command(),
            "machine": _machine(),
            "versions": _versions(),
            **result,
        }
    )
    print(line, flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(line + "\n")

"""Common code of the scripts in this folder: their arguments, and one line of output for each check.

A script runs in a separate environment without this project. `run.py`
starts it as `SCRIPT URL MODEL TOKENIZER FOLDER`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

KEY = "unused"  # clients require a key; the server has none
PASSED, FAILED = "passed", "FAILED"
MAX_CHARS = 400  # of a failure's message; the rest is in the log


@dataclass(frozen=True)
class Server:
    url: str
    model: str
    tokenizer: Path  # folder with the model's tokenizer
    folder: Path  # an empty folder for output

    @property
    def v1(self) -> str:
        return self.url + "/v1"


def main(*checks: Callable[[Server], None]) -> None:
    """Runs all checks, also after a failure. Exits with 1 if any failed."""
    url, model, tokenizer, folder = sys.argv[1:]
    server = Server(url, model, Path(tokenizer), Path(folder))
    passed = [_passes(check, server) for check in checks]
    sys.exit(0 if all(passed) else 1)


def _passes(check: Callable[[Server], None], server: Server) -> bool:
    try:
        check(server)
    except Exception as error:  # noqa: BLE001 (clients have types of their own)
        traceback.print_exc()
        said = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"{FAILED} {check.__name__}: {said[:MAX_CHARS]}", flush=True)
        return False
    print(f"{PASSED} {check.__name__}", flush=True)
    return True


def command(*words: str | Path, cwd: Path, **environment: str) -> str:
    """Runs a program of the script's environment. Prints and returns its output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        list(map(str, words)),
        check=False,
        cwd=cwd,
        env=os.environ | {"PATH": path, "NO_COLOR": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    print(done.stdout)
    if done.returncode != 0:
        raise RuntimeError(f"{words[0]} exited with {done.returncode}")
    return done.stdout

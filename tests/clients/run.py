"""Independent, unchanged clients against a real router and two workers with the shipped model.

    make test-clients                          # ARGS="--venvs DIR openai_sdk lm_eval_cli"

Each client is a script of this folder, which names its packages at its top; uv creates an
environment for it, which is deleted at the end unless `--venvs` names a folder. The
scripts check the protocol, not the quality of the small model's answers. The output of the clients is in
`target/clients`. Ends with a table, and with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from checks import FAILED, PASSED

from support import processes

TOKENIZER = processes.ROOT / "worker/model/small"
LOGS = processes.ROOT / "target/clients"
VERSION = re.compile(r'"[\w-]+(?:\[\w+\])?==([^"]+)"')  # the first package is the client
TIMEOUT = 900.0  # seconds until a client is killed, its installation included


@dataclass(frozen=True)
class Row:
    """The result of one client."""

    client: str
    version: str
    what: str
    passed: int
    failed: list[str]
    seconds: float

    @property
    def result(self) -> str:
        return (
            f"{len(self.failed)} of {self.passed + len(self.failed)} FAILED"
            if self.failed
            else PASSED
        )


def parse_args() -> argparse.Namespace:
    scripts = [path for path in HERE.glob("*.py") if path.read_text().startswith("# /// script")]
    known = sorted(path.stem for path in scripts)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--venvs", type=Path, help="folder for the environments, used again")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(known)}")
    args = parser.parse_args()
    if unknown := set(args.clients) - set(known):
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    args.clients = args.clients or known
    return args


def run(client: str, server: processes.Running, model: str, environment: dict[str, str]) -> Row:
    script = HERE / f"{client}.py"
    uv = Path(sys.executable).with_name("uv")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mla-client-") as folder:
        command = [uv, "run", "--quiet", "--python", sys.executable, "--script", script]
        process = subprocess.Popen(
            [*map(str, command), server.url, model, str(TOKENIZER), folder],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # the processes of a client must end with it
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
    (LOGS / f"{client}.log").write_text(output)
    lines = output.splitlines()
    failed = [line for line in lines if line.startswith(FAILED + " ")]
    if process.returncode != 0 and not failed:
        failed = [f"{FAILED} exited with {process.returncode}: {' '.join(lines[-3:])}"]
    text = script.read_text()
    return Row(
        client,
        VERSION.search(text)[1],
        ast.get_docstring(ast.parse(text)).partition("\n")[0],
        sum(line.startswith(PASSED + " ") for line in lines),
        failed,
        time.monotonic() - begun,
    )


def table(rows: list[Row]) -> str:
    cells = [("client", "version", "result", "seconds", "what was run")]
    cells += [(r.client, r.version, r.result, f"{r.seconds:.0f}", r.what) for r in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join(
        [*(f"{row.client}: {line}" for row in rows for line in row.failed), "", *lines]
    )


@contextlib.contextmanager
def environments(kept: Path | None) -> Iterator[dict[str, str]]:
    """Returns the environment variables of the clients. uv creates their environments in its cache."""
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with contextlib.ExitStack() as stack:
        folder = kept or stack.enter_context(tempfile.TemporaryDirectory(prefix="mla-venvs-"))
        yield variables | {"UV_CACHE_DIR": str(Path(folder).resolve())}


def main() -> None:
    args = parse_args()
    with environments(args.venvs) as environment, processes.server(dp_size=2) as server:
        model = processes.get_json(server.url + "/v1/models")["data"][0]["id"]
        LOGS.mkdir(parents=True, exist_ok=True)
        rows = []
        for client in args.clients:
            row = run(client, server, model, environment)
            print(f"{row.client}: {row.result}", flush=True)
            rows.append(row)
    print(table(rows))
    sys.exit(1 if any(row.failed for row in rows) else 0)


if __name__ == "__main__":
    main()

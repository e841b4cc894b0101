"""A worker with the fake scheduler: the real API process, and the messages that the scheduler received."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from mla_router.worker.messages import Generate
from support import processes
from support.processes import Flag, Running, wait_until

FAKE_SCHEDULER = Path(__file__).resolve().with_name("fake_scheduler.py")
FAKE_RANK = Path(__file__).resolve().with_name("fake_rank.py")
# A worker that ends gives its requests and its other processes some seconds. Here they have an hour, because a busy
# machine may delay any of them.
ENTRY = """
import sys
sys.modules["torch"] = None  # as in a real worker: an import of torch fails
from mla_router.worker.__main__ import main
from mla_router.worker.server.processes import children, first
first.DRAIN_GRACE_S = children.EXTRA_STOP_S = 3600.0
scheduler, record, rank, *flags = sys.argv[1:]
sys.exit(main(flags, [sys.executable, scheduler, record], [sys.executable, rank]))
"""


@dataclass
class FakeWorker:
    running: Running
    record: Path

    @property
    def url(self) -> str:
        return self.running.url

    def received(self, kind: str) -> list[list[Any]]:
        """Returns the received messages of this kind, each as a list of its fields."""
        messages = [json.loads(line) for line in self._lines()]
        return [message[1:] for message in messages if message[0] == kind]

    def generates(self) -> list[Generate]:
        """Returns the received requests, in order."""
        ours = [line for line in self._lines() if line.startswith('["Generate"')]
        return [msgspec.json.decode(line, type=Generate) for line in ours]

    def _lines(self) -> list[str]:
        """Returns the complete lines: the last one may be incomplete."""
        text = self.record.read_text() if self.record.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()

    def say(self, token_ids: list[int], **fields: Any) -> str:
        """Returns a cache_salt. The fake scheduler answers requests with this salt by `token_ids`, of any length."""
        text = json.dumps(token_ids)
        file = self.record.with_name(hashlib.sha256(text.encode()).hexdigest()[:16])
        file.write_text(text)
        return script(say_from=file.name, **fields)

    def wait_for(self, condition: Callable[[FakeWorker], bool], what: str) -> None:
        wait_until(lambda: condition(self), what)


def script(**fields: Any) -> str:
    """Returns a cache_salt with the fields of fake_scheduler.Script."""
    return json.dumps(fields, separators=(",", ":"))


@contextlib.contextmanager
def fake_worker(
    ready_path: str | None = "/health",
    extra: Sequence[str] = (),
    prefix: Sequence[str] = (),
    **flags: Flag,
) -> Iterator[FakeWorker]:
    """Starts a worker. `extra`: flags as on the command line. `prefix`: words before its command."""
    (port,) = processes.free_ports(1)
    with tempfile.TemporaryDirectory(prefix="mla-test-") as folder:
        record = Path(folder) / "received"
        values = {"port": port, "tokenizer_worker_num": 1} | flags
        entry = ["-c", ENTRY, str(FAKE_SCHEDULER), str(record), str(FAKE_RANK)]
        argv = [*entry, *processes.to_argv(values), *extra]
        url = f"http://127.0.0.1:{values['port']}"
        with processes.running(argv, url, ready_path, prefix) as running:
            yield FakeWorker(running, record)

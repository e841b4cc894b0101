"""The router's mock engine (`router/mock_worker`): answers as told, and in the times it is told."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from support.processes import ROOT, Flag, get_json, post_json, to_argv


@dataclass(frozen=True)
class MockEngine:
    url: str

    def stats(self) -> dict[str, Any]:
        """Its own sums: `requests`, `prompt_tokens`, `cached_tokens`, `completion_tokens` and more."""
        stats: dict[str, Any] = get_json(self.url + "/mock/stats")
        return stats

    def fault(self, **fault: Any) -> None:
        """Do that wrong, for the next `count` requests; see `router/mock_worker/src/fault.rs`."""
        post_json(self.url + "/mock/fault", fault)


@contextlib.contextmanager
def mock_engine(**flags: Flag) -> Iterator[MockEngine]:
    """Built if it is not; instant unless `flags` give it times."""
    instant: dict[str, Flag] = {
        "prefill_rate": "inf",
        "decode_base_ms": 0,
        "decode_per_request_ms": 0,
    }
    cargo = ["cargo", "run", "--quiet", "--locked", "-p", "mla-mock-worker"]
    cargo += ["--bin", "mla-mock-worker", "--"]  # cargo becomes the program it runs
    process = subprocess.Popen(
        [*cargo, *to_argv(instant | flags)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), f"no address, but {url!r}"
        yield MockEngine(url)
    finally:
        process.kill()
        process.communicate()

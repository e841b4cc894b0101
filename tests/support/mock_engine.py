"""The router's mock engine (`router/mock_worker`), with given answers and times."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from support.binaries import build_binaries
from support.processes import Flag, get_json, post_json, to_argv


@dataclass(frozen=True)
class MockEngine:
    url: str

    def stats(self) -> dict[str, Any]:
        """Returns its totals: `requests`, `prompt_tokens`, `cached_tokens`, `completion_tokens` and more."""
        stats: dict[str, Any] = get_json(self.url + "/mock/stats")
        return stats

    def fault(self, **fault: Any) -> None:
        """Injects a fault into the next `count` requests; see `router/mock_worker/src/fault.rs`."""
        post_json(self.url + "/mock/fault", fault)


@contextlib.contextmanager
def mock_engine(**flags: Flag) -> Iterator[MockEngine]:
    """Builds and starts a mock engine. It answers at once unless `flags` set times."""
    instant: dict[str, Flag] = {
        "prefill_rate": "inf",
        "decode_base_ms": 0,
        "decode_per_request_ms": 0,
    }
    process = subprocess.Popen(
        [build_binaries() / "mla-mock-worker", *to_argv(instant | flags)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), f"no address, but {url!r}"
        yield MockEngine(url)
    finally:
        process.kill()
        process.communicate()

"""Real servers of the shipped model that tests of several files share. Each start takes seconds of CPU time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import processes
from support.processes import Running


@pytest.fixture(scope="session")
def small_server() -> Iterator[Running]:
    """`launch_server --dp-size 2`. Tests only send requests to it."""
    with processes.server(dp_size=2) as server:
        yield server


@pytest.fixture(scope="session")
def small_worker(small_server: Running) -> str:
    """Returns the URL of a worker with the default settings."""
    return str(processes.workers(small_server.url)[0]["url"])


@pytest.fixture(scope="session")
def other_worker() -> Iterator[Running]:
    """A worker that differs from `small_worker` in all settings that must change no answer: several API processes,
    prompts in chunks, small pages, no overlap. Tests leave it healthy."""
    with processes.worker(
        tokenizer_worker_num=2,
        chunked_prefill_size=16,
        page_size=1,
        disable_overlap_schedule=True,
    ) as worker:
        yield worker


@pytest.fixture(scope="session")
def mortal_server() -> Iterator[Running]:
    """A server whose workers are killed and stopped by tests, which leave two healthy ones. Requests alternate between
    them."""
    with processes.server(dp_size=2, router_policy="round_robin") as server:
        yield server

"""Sends one load from several processes: a client needs 15 to 40 us of its core for each event, and several GPUs write
more events than one process can read."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from queue import Empty
from threading import BrokenBarrierError
from typing import Any

from loadgen import traffic
from loadgen.apis import BACKENDS, RequestOptions
from loadgen.client import Client, Outcome, open_session
from loadgen.workload import Conversation

START_TIMEOUT = 120.0  # seconds until all processes have started


class ClientError(Exception):
    """The client itself failed, not the server."""


@dataclass(frozen=True, slots=True)
class Target:
    """The target of the requests, and their common fields."""

    base_url: str
    backend: str
    options: RequestOptions
    timeout: float

    async def send(
        self,
        conversations: Sequence[Conversation],
        due: Sequence[float],
        max_concurrency: int | None,
        on_outcome: Callable[[Outcome], None],
    ) -> None:
        """Sends each conversation at its time `due`, in seconds from now."""
        api = BACKENDS[self.backend]
        async with open_session(os.environ.get("OPENAI_API_KEY"), self.timeout) as http:
            client = Client(http, self.base_url, api)
            await traffic.run(
                client, api, self.options, conversations, iter(due), max_concurrency, on_outcome
            )


@dataclass(frozen=True, slots=True)
class Load:
    """The part of the load of one process."""

    target: Target
    conversations: list[Conversation]
    due: list[float]
    max_concurrency: int | None


def run(loads: Sequence[Load], on_outcome: Callable[[Outcome], None]) -> tuple[float, float]:
    """Sends all parts at once. Returns the seconds until the last outcome, and the CPU seconds of the busiest
    process."""
    spawning = multiprocessing.get_context("spawn")  # threads do not survive a fork
    together, results = spawning.Barrier(len(loads) + 1), spawning.Queue()
    processes = [
        spawning.Process(target=_process, args=(load, together, results), daemon=True)
        for load in loads
    ]
    for process in processes:
        process.start()
    duration, cpu_seconds = 0.0, list[float]()
    try:
        together.wait(START_TIMEOUT)
        start = time.perf_counter()
        while len(cpu_seconds) < len(processes):
            result = _next(results, processes)
            if isinstance(result, float):
                cpu_seconds.append(result)
            else:
                on_outcome(result)
                duration = time.perf_counter() - start
    except BrokenBarrierError:
        raise ClientError("a process of the client did not start; it said why") from None
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return duration, max(cpu_seconds)


def _next(results: Queue[Any], processes: Sequence[BaseProcess]) -> Outcome | float:
    while True:
        with contextlib.suppress(Empty):
            result: Outcome | float = results.get(timeout=1)
            return result
        if any(process.exitcode for process in processes):
            raise ClientError("a process of the client died; it said why")


def share_out(
    target: Target,
    conversations: Sequence[Conversation],
    due: Sequence[float],
    max_concurrency: int | None,
    processes: int,
) -> list[Load]:
    """Deals the conversations out in turns. Every process has a conversation and a place."""
    processes = min(processes, len(conversations), max_concurrency or processes)
    return [
        Load(
            target,
            list(conversations[i::processes]),
            list(due[i::processes]),
            max_concurrency and (max_concurrency + i) // processes,
        )
        for i in range(processes)
    ]


def _process(load: Load, together: Barrier, results: Queue[Any]) -> None:
    """Puts every outcome into the queue, and then the CPU seconds of the process."""
    gc.collect()
    gc.freeze()
    together.wait(START_TIMEOUT)
    cpu = time.process_time()
    sent = load.target.send(load.conversations, load.due, load.max_concurrency, results.put)
    asyncio.run(sent)
    results.put(time.process_time() - cpu)

"""The times of requests: a Poisson process of arrivals, and a limit of concurrency."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

from loadgen.apis import Api, RequestOptions
from loadgen.client import Client, Outcome
from loadgen.workload import Conversation


def arrivals(rng: random.Random, count: int, rate: float) -> Iterator[float]:
    """Yields the start times of conversations in seconds; all 0 for an infinite rate."""
    if math.isinf(rate):
        return itertools.repeat(0.0, count)
    gaps = (rng.expovariate(rate) for _ in range(count - 1))
    return itertools.accumulate(gaps, initial=0.0)


async def run(
    client: Client,
    api: Api,
    options: RequestOptions,
    conversations: Sequence[Conversation],
    due: Iterator[float],
    max_concurrency: int | None,
    on_outcome: Callable[[Outcome], None],
) -> None:
    """Runs all conversations, each from its start time `due`. `on_outcome` gets the outcome of every turn."""
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def hold(conversation: Conversation) -> None:
        history: list[tuple[str, str]] = []
        failed = ""
        async with places:
            for number, turn in enumerate(conversation):
                outcome = Outcome(number, len(turn.prompt.ids), turn.output_tokens)
                if failed:
                    outcome.error = f"not sent, as an earlier turn failed ({failed})"
                else:
                    body = api.body(options, history, turn.prompt, turn.output_tokens)
                    await client.send(body, outcome)
                    failed = outcome.error
                if number + 1 < len(conversation):
                    history.append((turn.prompt.text, outcome.answer.text))
                on_outcome(outcome)

    tasks = []
    for conversation, at in zip(conversations, due, strict=True):
        if (wait := start + at - loop.time()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(hold(conversation)))
    await asyncio.gather(*tasks)

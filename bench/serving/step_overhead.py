"""The CPU time of the scheduler in each phase of its loop, with an engine that does nothing.

    python bench/serving/step_overhead.py --out bench/results/step_overhead.jsonl
    python bench/serving/step_overhead.py --tp-size 1 2 8 --out bench/results/step_overhead.jsonl
    python bench/serving/step_overhead.py --dp-size 1 2 8 --out bench/results/step_overhead.jsonl

With several ranks, the calls go to other processes, which decode them and do nothing. With several DP ranks, the schedulers
of the others are processes without requests, which agree on each step; `schedule` then has the agreement.

It is the CPU time of the scheduler's thread, which other processes hardly affect. Medians are over steps. Messages use
real sockets. Further figures: requests per second with prompts of one token, and operations per second of the prefix
cache.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import select
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq

from mla_router.worker.config import WorkerConfig
from mla_router.worker.dp_group import DpGroup, LocalMailbox, dp_groups
from mla_router.worker.generation import SamplingParams
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.mask_memory import MaskMemory
from mla_router.worker.messages import Generate, ToScheduler
from mla_router.worker.ranks.calls import Masks, Sample
from mla_router.worker.ranks.channel import CallReceiver, CallSender
from mla_router.worker.ranks.leader import Leader
from mla_router.worker.scheduler.channel import ZmqChannel
from mla_router.worker.scheduler.lockstep import Lockstep
from mla_router.worker.scheduler.radix_cache import RadixCache
from mla_router.worker.scheduler.scheduler import Scheduler
from mla_router.worker.scheduler.step import Step
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import StepPlan, TokenMasks
from mla_router.worker.step.result import StepResult

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from record import record

GOALS_US = {1: 300, 256: 1000}
PAGE_SIZE = 16
VOCAB = 1 << 17
PROMPT_TOKENS = 100
PHASES = ("receive", "schedule", "launch", "postprocess")


class Load(NamedTuple):
    """Decoding requests, and others that wait for a slot or for memory."""

    rows: int
    waiting: int = 0
    for_memory: bool = False
    ranks: int = 1
    dp_size: int = 1


LOADS = (
    Load(1),
    Load(32),
    Load(256),
    Load(1024),
    Load(32, waiting=4096),
    Load(32, waiting=64, for_memory=True),
)
RANK_ROWS = 1, 32, 256  # with several ranks or DP ranks


@dataclass
class Nothing:
    """A step that ends at once."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class NullEngine:
    """An engine whose tokens are all 7, without cost."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity

    def forward(self, plan: StepPlan) -> StepPlan:
        return plan

    def sample(
        self,
        forward_output: StepPlan,
        masks: TokenMasks | None = None,  # noqa: ARG002 (nobody asks for a grammar)
    ) -> Nothing:
        rows = len(forward_output.decode_slots) + sum(
            chunk.is_last for chunk in forward_output.chunks
        )
        return Nothing(StepResult([[7]] * rows))

    def is_usable_after(self, error: Exception) -> bool:
        raise error


def decode_calls(folder: Path, rank: int) -> None:
    """Decodes the calls of rank 0 until this process ends."""
    receiver = CallReceiver(folder, rank)
    while True:
        receiver.receive(1.0)


class Ranks:
    """The processes of the other ranks, and the sockets to them."""

    def __init__(self, folder: Path, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes = [
            context.Process(target=decode_calls, args=(folder, rank), daemon=True)
            for rank in range(1, size)
        ]
        for process in self._processes:
            process.start()
        while any(not (folder / f"to_rank_{rank}").exists() for rank in range(1, size)):
            time.sleep(0.01)
        self.sender = CallSender(folder, size)

    def close(self) -> None:
        self.sender.close()
        for process in self._processes:
            process.kill()
            process.join()


def agree(group: DpGroup, rank: int) -> None:
    """Takes part in the steps of other DP ranks until this process ends."""
    mailbox = LocalMailbox(group, rank)
    lockstep = Lockstep(mailbox, Heartbeat.create())
    while True:
        lockstep.join(None)
        if not lockstep.is_awaited:
            select.select([mailbox.wake], [], [], 1.0)


class DpRanks:
    """The processes of the other DP ranks."""

    def __init__(self, size: int) -> None:
        self._opened = ExitStack()
        groups = self._opened.enter_context(dp_groups(size))
        context = multiprocessing.get_context("fork")  # they inherit the sockets
        self._processes = [
            context.Process(target=agree, args=(groups[rank], rank), daemon=True)
            for rank in range(1, size)
        ]
        for process in self._processes:
            process.start()
        self.lockstep = Lockstep(LocalMailbox(groups[0], 0), Heartbeat.create())

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._opened.close()


class Bench:
    """A scheduler with a null engine, and the server's end of its sockets."""

    def __init__(
        self, folder: Path, capacity: Capacity, ranks: int = 1, dp_ranks: DpRanks | None = None
    ) -> None:
        self.context = zmq.Context()
        self.heard = self.context.socket(zmq.PULL)
        self.heard.bind(f"ipc://{folder}/to_server_0")
        self.said = self.context.socket(zmq.PUSH)
        for socket in (self.heard, self.said):
            socket.set_hwm(0)
        self.channel = ZmqChannel(folder)
        self.said.connect(f"ipc://{folder}/to_scheduler")
        self.ranks = Ranks(folder, ranks)
        engine: Any = NullEngine(capacity)
        if ranks > 1:
            engine = Leader(engine, self.ranks.sender)
        group = dp_ranks.lockstep if dp_ranks is not None else None
        self.scheduler = Scheduler(
            engine, self.channel, WorkerConfig(), vocab_size=VOCAB, group=group
        )
        self.last: Step | None = None

    def send(self, messages: list[ToScheduler]) -> None:
        """Sends messages, and runs the loop until all of them have arrived."""
        for message in messages:
            self.said.send(msgspec.msgpack.encode(message))
        wanted = len(self.scheduler.requests) + len(messages)
        while len(self.scheduler.requests) < wanted:
            self.scheduler.receive(in_flight=True)

    def turn(self) -> tuple[int, ...]:
        """Runs one turn of the overlap loop. Returns the CPU nanoseconds of its phases."""
        scheduler, clock = self.scheduler, time.thread_time_ns
        begin = clock()
        scheduler.receive(in_flight=self.last is not None)
        received = clock()
        step = scheduler.next_step()
        scheduled = clock()
        step = scheduler.forward(step)
        launched = clock()
        if self.last is not None:
            scheduler.postprocess(self.last)
        processed = clock()
        self.last = scheduler.sample(step)
        end = clock()
        return (
            received - begin,
            scheduled - received,
            launched - scheduled + end - processed,
            processed - launched,
        )

    def close(self) -> None:
        self.channel.close()
        self.ranks.close()
        self.context.destroy(linger=0)


def requests(
    count: int, max_tokens: int, prompt_tokens: int, name: str = "row"
) -> list[ToScheduler]:
    """Makes prompts without common prefixes."""
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=frozenset([0, 1]))
    text = [VOCAB // 2 + i % 1000 for i in range(prompt_tokens - 1)]
    return [Generate(f"{name}-{i}", [i, *text], sampling) for i in range(count)]


def steps(folder: Path, load: Load, count: int) -> dict[str, Any]:
    """Returns the median microseconds of the phases of a decode step, over `count` steps."""
    rows, waiting, for_memory, ranks, dp_size = load
    max_tokens = 2 * count + 1000
    pages = rows * -(-(PROMPT_TOKENS + max_tokens) // PAGE_SIZE)
    slots = 2 * rows if for_memory else rows
    dp_ranks = DpRanks(dp_size) if dp_size > 1 else None
    bench = Bench(folder, Capacity(pages, PAGE_SIZE, slots, 1 << 20), ranks, dp_ranks)
    bench.send(requests(rows, max_tokens, PROMPT_TOKENS))
    while bench.scheduler.planner.waiting:
        bench.turn()
    # The request that waits for memory needs all of it.
    prompt_tokens = pages * PAGE_SIZE - 64 if for_memory else PROMPT_TOKENS
    bench.send(requests(waiting, 64, prompt_tokens, "other"))
    for _ in range(100):
        bench.turn()
    gc.collect()
    gc.freeze()
    timed = [bench.turn() for _ in range(count)]
    assert len(bench.scheduler.planner.running) == rows, "somebody has ended or come"
    assert len(bench.scheduler.planner.waiting) == waiting
    bench.close()
    if dp_ranks is not None:
        dp_ranks.close()
    phases = [statistics.median(column) / 1000 for column in zip(*timed, strict=True)]
    totals = sorted(sum(turn) / 1000 for turn in timed)
    return {
        **({"ranks": ranks} if ranks > 1 else {}),
        **({"dp_ranks": dp_size} if dp_size > 1 else {}),
        "rows": rows,
        "waiting": waiting,
        "for": ("memory" if for_memory else "slot") if waiting else None,
        **{name: round(value, 1) for name, value in zip(PHASES, phases, strict=True)},
        "step": round(statistics.median(totals), 1),
        "step_p99": round(totals[len(totals) * 99 // 100], 1),
        **({"goal": GOALS_US[rows]} if rows in GOALS_US and not waiting else {}),
    }


def masks_us(folder: Path, rows: int, ranks: int, count: int) -> dict[str, float]:
    """Returns the median microseconds of CPU time in which a call to sample is encoded and sent, with the token bitmasks of
    `rows` rows."""
    memory = MaskMemory.create(max(rows, 1), VOCAB)
    step = memory.begin()
    masks = TokenMasks(tuple(range(rows)), memory.of(step), step)
    others = Ranks(folder, ranks)
    spent = []
    for _ in range(count):
        begin = time.thread_time_ns()
        others.sender.send(Sample(Masks.of(masks) if rows else None))
        spent.append(time.thread_time_ns() - begin)
        time.sleep(0.01)  # as long as a step: the other ranks have received it
    others.close()
    return {"ranks": ranks, "rows": rows, "masks": round(statistics.median(spent) / 1000, 1)}


def throughput(folder: Path, count: int) -> int:
    """Returns the requests per second of CPU time, with one prompt token and one output token."""
    bench = Bench(folder, Capacity(4096, PAGE_SIZE, 256, 4096))
    for message in requests(count, 1, 1):
        bench.said.send(msgspec.msgpack.encode(message))
    spent = 0
    while bench.scheduler.requests.num_generated_tokens < count:
        spent += sum(bench.turn())
    bench.close()
    return round(count / (spent / 1e9))


def cache(count: int, tokens: int) -> dict[str, float]:
    """Returns the operations per second of the prefix cache. The prompts share their first half."""
    rng = random.Random(0)
    half = [rng.randrange(VOCAB) for _ in range(tokens // 2)]
    prompts = [[*half, *(rng.randrange(VOCAB) for _ in half)] for _ in range(count)]
    pages = tokens // PAGE_SIZE
    tree = RadixCache(PAGE_SIZE)

    def rate(operation: Any) -> float:
        begin = time.thread_time_ns()
        for i, prompt in enumerate(prompts):
            operation(i, prompt)
        return round(count / ((time.thread_time_ns() - begin) / 1e9))

    def insert(i: int, prompt: list[int]) -> None:
        tree.insert(tree.root(""), prompt, list(range(i * pages, (i + 1) * pages)))

    def match(_: int, prompt: list[int]) -> None:
        node, _pages = tree.match("", prompt)
        tree.lock(node)
        tree.unlock(node)

    def miss(i: int, prompt: list[int]) -> None:
        tree.match(str(i % 8), prompt)

    rates = {"insert": rate(insert), "match": rate(match), "miss": rate(miss)}
    return rates | {"evict": rate(lambda _, __: tree.evict(pages // 2))}


def shown(measure: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Prints and returns the result of `measure` in a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        line = measure(Path(folder), *arguments)
    print(line, flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="timed steps of each batch")
    parser.add_argument("--tp-size", type=int, nargs="*", help="ranks; only their steps then")
    parser.add_argument("--dp-size", type=int, nargs="*", help="DP ranks; only their steps then")
    parser.add_argument("--out", type=Path, help="append the line to this file")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "config": {"steps": args.steps, "page_size": PAGE_SIZE, "prompt_tokens": PROMPT_TOKENS},
        # The load of the machine: shared caches and cores change CPU time, too.
        "load_average": round(os.getloadavg()[0], 1),
    }
    if args.dp_size:
        loads = [Load(rows, dp_size=size) for size in args.dp_size for rows in RANK_ROWS]
    elif args.tp_size:
        loads = [Load(rows, ranks=size) for size in args.tp_size for rows in RANK_ROWS]
    else:
        loads = list(LOADS)
    result["step_us"] = [shown(steps, load, args.steps) for load in loads]
    if args.tp_size and not args.dp_size:
        sizes = [size for size in args.tp_size if size > 1]
        result["masks_us"] = [
            shown(masks_us, rows, size, 200) for size in sizes for rows in (0, *RANK_ROWS)
        ]
    if not (args.tp_size or args.dp_size):
        with tempfile.TemporaryDirectory() as folder:
            result["requests_per_s"] = throughput(Path(folder), 20_000)
        result["cache_per_s"] = {str(tokens): cache(2000, tokens) for tokens in (128, 2048)}
    record("step_overhead", result, args.out)


if __name__ == "__main__":
    main()

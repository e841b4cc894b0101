"""Schedulers of DP ranks, each in a thread with real sockets, and a client of all of them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import zmq

from mla_router.worker.config import WorkerConfig
from mla_router.worker.dp_group import DpGroup, LocalMailbox, dp_groups
from mla_router.worker.heartbeat import Heartbeat
from mla_router.worker.messages import (
    Delta,
    Deltas,
    Shutdown,
    ToScheduler,
    ToServer,
    scheduler_socket,
    server_socket,
)
from mla_router.worker.scheduler.channel import ZmqChannel
from mla_router.worker.scheduler.lockstep import Lockstep
from mla_router.worker.scheduler.scheduler import Scheduler
from mla_router.worker.step.engine import Capacity
from mla_router.worker.step.plan import GroupStep, StepPlan
from support.fake_engine import VOCAB, FakeEngine, FakeStep, continuation
from support.processes import EVENT_TIMEOUT_S, wait_until
from support.scripted_scheduler import generate, run


class GroupedEngine(FakeEngine):
    """Keeps the agreements of its steps."""

    def __init__(self, capacity: Capacity, rank: int) -> None:
        super().__init__(capacity)
        self.rank = rank
        self.groups: list[GroupStep] = []

    def forward(self, plan: StepPlan) -> FakeStep:
        assert plan.group is not None
        assert plan.group.rows[self.rank] == plan.num_tokens, plan
        self.groups.append(plan.group)
        return super().forward(plan)

    def is_usable_after(self, error: Exception) -> bool:
        raise error


class CountingChannel(ZmqChannel):
    receives = 0

    def receive(self, timeout_s: float) -> list[ToScheduler]:
        self.receives += 1
        return super().receive(timeout_s)


class DpScheduler:
    """DP rank `rank`, and the server's end of its sockets."""

    def __init__(
        self, folder: Path, group: DpGroup, rank: int, capacity: Capacity, *, overlap: bool
    ) -> None:
        folder.mkdir()
        self._context = zmq.Context()
        self._heard, self._said = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for socket in (self._heard, self._said):
            socket.set_hwm(0)
        self._heard.bind(server_socket(folder, 0))
        self.deltas: dict[str, list[Delta]] = defaultdict(list)
        self.engine = GroupedEngine(capacity, rank)
        self.heartbeat = Heartbeat.create()
        self._mailbox = LocalMailbox(group, rank)
        self.channel = CountingChannel(folder, wake=self._mailbox.wake)
        self._said.connect(scheduler_socket(folder))
        config = WorkerConfig(chunked_prefill_size=8, max_prefill_tokens=16)
        self.scheduler = Scheduler(
            self.engine,
            self.channel,
            config,
            vocab_size=VOCAB,
            heartbeat=self.heartbeat,
            group=Lockstep(self._mailbox, self.heartbeat),
        )
        loop = self.scheduler.overlap_loop if overlap else self.scheduler.normal_loop
        self._thread = threading.Thread(target=self._run, args=(loop,), daemon=True)
        self.error: BaseException | None = None
        self._thread.start()

    def say(self, message: ToScheduler) -> None:
        self._said.send(msgspec.msgpack.encode(message))

    def listen(self) -> None:
        """Takes all messages that have arrived."""
        while self._heard.poll(0):
            message = msgspec.msgpack.decode(self._heard.recv(), type=ToServer)
            for delta in message.items if isinstance(message, Deltas) else ():
                self.deltas[delta.rid].append(delta)

    def tokens(self, rid: str) -> list[int]:
        return [token for delta in self.deltas[rid] for token in delta.token_ids]

    def has_ended(self, rid: str) -> bool:
        assert self.error is None, self.error
        self.listen()
        return any(delta.finish_reason for delta in self.deltas[rid])

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(EVENT_TIMEOUT_S)
        assert not self.is_running, f"DP rank {self.engine.rank} goes on"
        assert self.error is None, self.error

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._mailbox.close()

    def _run(self, loop: object) -> None:
        assert callable(loop)
        try:
            loop()
        except BaseException as error:  # noqa: BLE001 (raised by `join`)
            self.error = error
        finally:
            self.channel.close()


@contextmanager
def dp_schedulers(
    folder: Path, size: int, capacity: Capacity, *, overlap: bool = True
) -> Iterator[list[DpScheduler]]:
    """Starts the DP ranks. At the end of the block all must agree to end."""
    with ExitStack() as opened:
        groups = opened.enter_context(dp_groups(size))
        ranks = [
            DpScheduler(folder / str(rank), group, rank, capacity, overlap=overlap)
            for rank, group in enumerate(groups)
        ]
        for one in ranks:
            opened.callback(one.close)
        yield ranks
        for one in ranks:
            one.say(Shutdown())
        for one in ranks:
            one.join()
        assert all(one.engine.groups == ranks[0].engine.groups for one in ranks), "other steps"


@contextmanager
def other_dp_rank() -> Iterator[Lockstep]:
    """Yields the side of DP rank 0 of an agreement. DP rank 1 has requests of its own in the first steps, and checks its
    tokens at the end."""
    asked = [generate(f"other {n}", [n, 7, n + 1] * 4, 10 + n, seed=n) for n in range(4)]
    capacity = Capacity(num_pages=64, page_size=4, num_slots=3, context_length=64)
    with dp_groups(2) as groups, ThreadPoolExecutor(1) as pool:
        mailboxes = [LocalMailbox(group, rank) for rank, group in enumerate(groups)]
        own, other = (Lockstep(one, Heartbeat.create()) for one in mailboxes)
        done = pool.submit(
            run, {0: list(asked)}, engine=GroupedEngine(capacity, 1), capacity=capacity, group=other
        )
        try:
            yield own
            outcome = done.result(EVENT_TIMEOUT_S)
        finally:  # without the sockets, the thread ends with an error
            for one in mailboxes:
                one.close()
    for request in asked:
        expected = continuation(request.prompt, request.sampling.max_tokens, request.sampling.seed)
        assert outcome.channel.tokens(request.rid) == expected


def wait_idle(ranks: list[DpScheduler]) -> None:
    """Waits until no step has run for some time."""

    def steps() -> int:
        assert all(one.is_running for one in ranks), [one.error for one in ranks]
        return sum(len(one.engine.groups) for one in ranks)

    def is_idle() -> bool:
        before = steps()
        time.sleep(0.05)
        return steps() == before

    wait_until(is_idle, "all DP ranks sleep")

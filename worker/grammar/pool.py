"""The scheduler's end: which grammars have a process, and which requests wait for theirs.

Nothing here waits but `fill`, and that at most as long as a grammar worker may take for one step.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mla_router.worker.grammar import supervisor
from mla_router.worker.grammar.client import GrammarWorker, WorkerLost
from mla_router.worker.grammar.compile_queues import CompileQueues, Waiting
from mla_router.worker.grammar.errors import Problem
from mla_router.worker.grammar.fork_server import ForkServer
from mla_router.worker.grammar.options import GrammarOptions
from mla_router.worker.grammar.protocol import Row
from mla_router.worker.grammar.supervisor import Settings, Supervisor
from mla_router.worker.messages import Grammar

logger = logging.getLogger(__name__)

# How many compile at the same time, and for how long in CPU time.
MAX_QUICK, QUICK_CPU_S = 2, 0.5
MAX_SLOW, SLOW_CPU_S = 1, 5.0
# A request waits no longer for its grammar, in line and compiling: below the time (10 s) after which a
# router takes a request elsewhere, where it would begin again. It counts from the time at which the
# fork server had loaded, if the request came before.
WAIT_S = 8.0
# A request waits no longer for a fork server to load: the first one, or one that replaces a lost one.
LOAD_S = 60.0
MAX_WORKERS = 128
IDLE_BYTES = (
    512 << 20
)  # of grammar workers that no request uses now; the least recently used go first
MAX_REMEMBERED = 1024  # grammars that were refused, with the reason


@dataclass(frozen=True, slots=True)
class Answers:
    """What is to be known of a step's rows beside their masks, by key."""

    failed: dict[int, Problem]  # for which there is no mask, and why
    runs: dict[int, list[int]]  # tokens that must follow each other now; the mask allows the first


class Grammars:
    """All grammars of one scheduler. A request is known here by an integer key."""

    def __init__(self, settings: Settings, process: Supervisor, control: socket.socket) -> None:
        self.masks = settings.masks()  # `fill` writes the leading rows
        self.fork_server = ForkServer(settings.fork_server_fd)
        self._settings = settings
        self._control = control
        self._supervisor = process
        self._workers: OrderedDict[Grammar, GrammarWorker] = (
            OrderedDict()
        )  # least recently used first
        self._queues = CompileQueues()
        self._worker_of: dict[int, GrammarWorker] = {}
        self._since: dict[int, float] = {}  # by key, arrival of those that wait for a compilation
        self._refused: OrderedDict[Grammar, Problem] = OrderedDict()
        self._failed: list[tuple[int, Problem | None]] = []
        self._keys = itertools.count()

    def warm_up(self) -> None:
        """Have the fork server load what it needs, which takes seconds, before the first grammar comes."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.send(b"+")

    # -- requests --------------------------------------------------------------------------------

    def open(self, grammar: Grammar, output: Sequence[int]) -> int:
        """Begin a request; returns its key. `poll` tells when its first mask can be asked for, or
        why never; and later, should its process end, why it cannot go on.

        `output` is what was generated for it before.
        """
        key = next(self._keys)
        problem = self._refused.get(grammar)
        if problem is not None:
            self._failed.append((key, problem))
            return key
        waiting = Waiting(key, output, time.monotonic())
        worker = self._workers.get(grammar)
        if worker is None:
            self._queues.add(grammar, waiting)
            self._advance_queues()
        else:
            self._join(worker, waiting)
        return key

    @property
    def has_failures(self) -> bool:
        """`poll` has problems to tell."""
        return bool(self._failed)

    def poll(self) -> list[tuple[int, Problem | None]]:
        """Keys whose wait is over since the last call; with a problem those that it was for nothing for, and
        those that have lost their process since. None that is closed."""
        opened: list[tuple[int, Problem | None]] = []
        for worker in [worker for worker in self._workers.values() if worker.has_news]:
            opened += self._poll(worker)
        self._end_overdue(time.monotonic())
        self._advance_queues()
        opened += self._failed
        self._failed = []
        return opened

    def fill(self, rows: Sequence[tuple[int, list[int]]]) -> Answers:
        """Write to masks[i] what the i-th of `rows` (key, its tokens since the last call) may draw
        next. None of them may have come with a problem before: `poll` tells after each call which have."""
        failed: dict[int, Problem] = {}
        runs: dict[int, list[int]] = {}
        by_worker: dict[GrammarWorker, list[Row]] = {}
        for index, (key, tokens) in enumerate(rows):
            by_worker.setdefault(self._worker_of[key], []).append(Row(key, index, tokens))
        for worker, wanted in by_worker.items():
            self._workers.move_to_end(worker.grammar)
            worker.ask_masks(wanted)
        for worker, wanted in by_worker.items():  # they work side by side
            answers = self._wait_masks(worker, wanted)
            failed |= answers.failed
            runs |= answers.runs
        self._failed = [(key, problem) for key, problem in self._failed if key not in failed]
        return Answers(failed, runs)

    def close(self, key: int) -> None:
        """Forget a request, in whatever state it is."""
        self._since.pop(key, None)
        worker = self._worker_of.pop(key, None)
        if worker is None:
            if not self._queues.remove(key):
                self._failed = [item for item in self._failed if item[0] != key]
            return
        worker.close_key(key)
        if worker.is_compiling and not worker.keys:  # nobody waits for it any more
            self._end(worker)
        else:
            self._evict()

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a sentence of any grammar; known when one is compiled."""
        return next(
            (worker.eos_ids for worker in self._workers.values() if worker.eos_ids), frozenset()
        )

    def shut_down(self) -> None:
        """End all processes."""
        for worker in self._workers.values():
            worker.end()
        self._control.close()
        self._supervisor.kill()  # it takes the fork server and the grammar workers with it
        self._supervisor.wait()
        for descriptor in (self._settings.masks_fd, self._settings.fork_server_fd):
            os.close(descriptor)

    def _poll(self, worker: GrammarWorker) -> list[tuple[int, Problem | None]]:
        try:
            return worker.poll()
        except WorkerLost as lost:
            if lost.out_of_time and worker.compile_cpu_s < SLOW_CPU_S:
                self._try_slowly(worker)
            else:
                self._drop(worker, lost.problem)
            return []
        finally:
            if not worker.is_compiling:
                for key in worker.keys:
                    self._since.pop(key, None)

    def _wait_masks(self, worker: GrammarWorker, wanted: list[Row]) -> Answers:
        try:
            filled = worker.wait_masks()
        except WorkerLost as lost:
            self._drop(worker, lost.problem)
            return Answers({row.key: lost.problem for row in wanted}, {})
        stray = Problem("a token that the grammar does not allow")
        return Answers(dict.fromkeys(filled.strays, stray), filled.runs)

    # -- grammar workers -----------------------------------------------------------------------------------

    def _join(self, worker: GrammarWorker, waiting: Waiting) -> None:
        self._workers.move_to_end(worker.grammar)
        self._worker_of[waiting.key] = worker
        if worker.is_compiling:
            self._since[waiting.key] = waiting.since
        worker.open_key(waiting.key, waiting.output)

    def _advance_queues(self) -> None:
        """Start as many processes for those in line as may compile now."""
        for slow in (False, True):
            while (grammar := self._queues.next(slow=slow)) and (
                worker := self._start(grammar, slow)
            ):
                for waiting in self._queues.take(grammar):
                    self._join(worker, waiting)

    def _start(self, grammar: Grammar, slow: bool) -> GrammarWorker | None:
        most, cpu_s = (MAX_SLOW, SLOW_CPU_S) if slow else (MAX_QUICK, QUICK_CPU_S)
        compiling = [worker for worker in self._workers.values() if worker.is_compiling]
        if sum(worker.compile_cpu_s == cpu_s for worker in compiling) >= most:
            return None
        if len(self._workers) >= MAX_WORKERS and not self._evict_one():
            return None
        self._replace_lost_supervisor()
        worker = GrammarWorker(grammar, self._control, self.fork_server, cpu_s)
        self._workers[grammar] = worker
        return worker

    def _replace_lost_supervisor(self) -> None:
        if self._supervisor.poll() is None:
            return
        logger.error("the supervisor of the grammars' processes was killed; another one is started")
        self._control.close()
        self.fork_server.expect_next()
        self._supervisor, self._control = supervisor.replace(self._settings)

    def _try_slowly(self, worker: GrammarWorker) -> None:
        """Have the grammar of a compilation that took its short time compiled anew, with more."""
        self._end(worker)
        for key, output in worker.feeds:
            del self._worker_of[key]
            waiting = Waiting(key, output, self._since.pop(key))
            self._queues.add(worker.grammar, waiting, slow=True)

    def _end_overdue(self, now: float) -> None:
        busy = Problem("This worker is busy with other grammars", is_of_grammar=False)
        # The grammar's fault, or each worker would be asked to do the same. Not remembered: it may have been
        # the machine's.
        too_long = Problem(f"takes longer than {WAIT_S:g} s to compile")
        latest = self._latest_overdue(now)
        overdue = [(key, busy) for key in self._queues.waiting_since(latest)]
        for key, since in self._since.items():
            if since <= latest:
                overdue.append((key, too_long if self._worker_of[key].has_started else busy))
        for key, problem in overdue:
            self.close(key)
            self._failed.append((key, problem))

    def _latest_overdue(self, now: float) -> float:
        """The time until which a request has come that has waited too long by now."""
        loaded_at = self.fork_server.loaded_at
        if loaded_at is None:
            return now - LOAD_S
        return now - WAIT_S if loaded_at <= now - WAIT_S else -math.inf

    def _end(self, worker: GrammarWorker) -> None:
        del self._workers[worker.grammar]
        worker.end()

    def _drop(self, worker: GrammarWorker, problem: Problem) -> None:
        """A grammar worker has ended or refused: so do its requests. What was its grammar's fault will not be
        tried again."""
        self._end(worker)
        for key in worker.keys:
            del self._worker_of[key]
            self._since.pop(key, None)
            self._failed.append((key, problem))
        if problem.is_of_grammar:
            self._refused[worker.grammar] = problem
        if len(self._refused) > MAX_REMEMBERED:
            self._refused.popitem(last=False)

    def _evict(self) -> None:
        while (
            sum(worker.own_bytes for worker in self._workers.values() if not worker.keys)
            > IDLE_BYTES
        ):
            self._evict_one()

    def _evict_one(self) -> bool:
        """End the grammar worker that no request has used for longest; False if all are in use."""
        idle = next((worker for worker in self._workers.values() if not worker.keys), None)
        if idle is None:
            return False
        self._end(idle)
        return True


def start(
    folder: Path,
    *,
    vocab_size: int,
    max_rows: int,
    options: GrammarOptions = GrammarOptions(),  # noqa: B008 (it is frozen)
) -> Grammars:
    """Fork the supervisor of the processes for the model in `folder`. To be called before this process has
    threads."""
    settings = Settings(
        str(folder),
        vocab_size,
        max_rows,
        options,
        masks_fd=os.memfd_create("masks"),
        fork_server_fd=os.memfd_create("fork server"),
    )
    rows, words = settings.mask_shape
    os.ftruncate(settings.masks_fd, rows * words * 4)
    os.ftruncate(settings.fork_server_fd, ForkServer.BYTES)
    return Grammars(settings, *supervisor.start(settings))

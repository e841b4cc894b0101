"""The scheduler's side: the grammars, and the requests that use or await them.

Only `fill` blocks, for at most the time that a grammar worker may need for one step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mla_router.worker.grammar.client import GrammarWorker, WorkerLost
from mla_router.worker.grammar.compile_queues import CompileQueues, Waiting
from mla_router.worker.grammar.errors import Problem
from mla_router.worker.grammar.options import GrammarOptions
from mla_router.worker.grammar.processes import GrammarProcesses
from mla_router.worker.grammar.protocol import Row
from mla_router.worker.grammar.supervisor import Settings
from mla_router.worker.grammar.workers import SLOW_CPU_S, GrammarWorkers
from mla_router.worker.mask_memory import MaskMemory
from mla_router.worker.messages import Grammar

# The longest wait of a request for its grammar, in the queue and in compilation. The limit is less than the 10 s after
# which a router moves a request to another worker. The wait begins when the fork server has loaded.
WAIT_S = 8.0
# The longest wait of a request for a fork server that loads.
LOAD_S = 60.0
MAX_REMEMBERED = 1024  # refused grammars


@dataclass(frozen=True, slots=True)
class Answers:
    """The results of a step other than the masks, by key."""

    failed: dict[int, Problem]  # rows without a mask
    runs: dict[int, list[int]]  # forced tokens; the mask allows only the first one
    # Masks of a row with drafts. There are no further ones after a draft that the grammar does not allow, or that ends
    # the text, nor after a mask of a forced token
    counts: dict[int, int] = field(default_factory=dict)


class GrammarPool:
    """The grammars of one scheduler, each with a process. A request has an integer key here."""

    def __init__(self, processes: GrammarProcesses, memory: MaskMemory) -> None:
        self.processes = processes
        self._memory = memory
        self.step = 0  # number of the last `fill` in the memory
        self._workers = GrammarWorkers(processes)
        self._queues = CompileQueues()
        self._worker_of: dict[int, GrammarWorker] = {}
        # Requests of a grammar worker that have no matcher yet, by key
        self._waiting: dict[int, Waiting] = {}
        self._refused: OrderedDict[Grammar, Problem] = OrderedDict()
        self._failed: list[tuple[int, Problem | None]] = []
        self._keys = itertools.count()

    # -- requests --------------------------------------------------------------------------------

    def open(self, grammar: Grammar, output: Sequence[int]) -> int:
        """Begins a request. Returns its key. `output` has the tokens that were generated before.

        `poll` reports when its grammar is ready or refused, and later if its process ends.
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
    def masks(self) -> np.ndarray:
        """The token bitmasks [max_rows, words] int32 of the last `fill`, which wrote the leading rows. They stay until
        `STEPS` - 1 more calls."""
        return self._memory.of(self.step)

    @property
    def has_failures(self) -> bool:
        """Whether `poll` has problems to report."""
        return bool(self._failed)

    def poll(self) -> list[tuple[int, Problem | None]]:
        """Returns the keys whose grammar has become ready since the last call (with None), and the keys that failed
        (with a problem): their grammar was refused or their process has ended. Closed keys are not among them."""
        opened: list[tuple[int, Problem | None]] = []
        for worker in [worker for worker in self._workers if worker.has_news]:
            opened += self._poll(worker)
        if not all(worker.has_started for worker in self._workers):
            self.processes.end_stopped()
        self._end_overdue(time.monotonic())
        self._advance_queues()
        opened += self._failed
        self._failed = []
        return opened

    def fill(
        self, rows: Sequence[tuple[int, list[int]]], drafts: Sequence[list[int]] = ()
    ) -> Answers:
        """Writes the token bitmask of `rows[i]` to masks[i]. A row has a key and its tokens since the last call. With
        `drafts` of each row, it has further masks after the first one, each after one draft more: room for all of them,
        but see `Answers.counts`. The drafts are not taken as tokens.

        Keys that `poll` has reported with a problem must not be among them.
        """
        failed: dict[int, Problem] = {}
        runs: dict[int, list[int]] = {}
        counts: dict[int, int] = {}
        by_worker: dict[GrammarWorker, list[Row]] = {}
        self.step = self._memory.begin()
        index = self._memory.first_row(self.step)
        for at, (key, tokens) in enumerate(rows):
            row = Row(key, index, tokens, drafts[at] if drafts else [])
            by_worker.setdefault(self._worker_of[key], []).append(row)
            index += 1 + len(row.drafts)
        for worker, wanted in by_worker.items():
            self._workers.use(worker)
            worker.ask_masks(wanted)
        for worker, wanted in by_worker.items():  # the grammar workers run in parallel
            answers = self._wait_masks(worker, wanted)
            failed |= answers.failed
            runs |= answers.runs
            counts |= answers.counts
        self._failed = [(key, problem) for key, problem in self._failed if key not in failed]
        return Answers(failed, runs, counts)

    def close(self, key: int) -> None:
        """Ends a request in any state."""
        self._waiting.pop(key, None)
        worker = self._worker_of.pop(key, None)
        if worker is None:
            if not self._queues.remove(key):
                self._failed = [item for item in self._failed if item[0] != key]
            return
        worker.close_key(key)
        if worker.is_compiling and not worker.keys:  # no request waits for it
            self._workers.end(worker)
        else:
            self._workers.evict()

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end a sentence of any grammar; empty before the first compilation."""
        return next((worker.eos_ids for worker in self._workers if worker.eos_ids), frozenset())

    def shut_down(self) -> None:
        """Ends all processes."""
        for worker in self._workers:
            worker.end()
        self.processes.shut_down()

    def _poll(self, worker: GrammarWorker) -> list[tuple[int, Problem | None]]:
        try:
            opened = worker.poll()
        except WorkerLost as lost:
            if lost.out_of_time and worker.compile_cpu_s < SLOW_CPU_S:
                self._try_slowly(worker)
            else:
                self._drop(worker, lost.problem)
            return []
        for key, _ in opened:
            del self._waiting[key]
        return opened

    def _wait_masks(self, worker: GrammarWorker, wanted: list[Row]) -> Answers:
        try:
            filled = worker.wait_masks()
        except WorkerLost as lost:
            self._drop(worker, lost.problem)
            return Answers({row.key: lost.problem for row in wanted}, {})
        stray = Problem("a token that the grammar does not allow")
        return Answers(dict.fromkeys(filled.strays, stray), filled.runs, filled.counts)

    # -- grammar workers -------------------------------------------------------------------------

    def _join(self, worker: GrammarWorker, waiting: Waiting) -> None:
        self._workers.use(worker)
        self._worker_of[waiting.key] = worker
        self._waiting[waiting.key] = waiting
        worker.open_key(waiting.key, waiting.output)

    def _advance_queues(self) -> None:
        """Starts as many compilations as the limits allow."""
        for slow in (False, True):
            while (grammar := self._queues.next(slow=slow)) and (
                worker := self._workers.start(grammar, slow=slow)
            ):
                for waiting in self._queues.take(grammar):
                    self._join(worker, waiting)

    def _try_slowly(self, worker: GrammarWorker) -> None:
        """Moves a grammar to the slow queue after its short compilation."""
        self._workers.end(worker)
        for key in sorted(worker.keys):
            del self._worker_of[key]
            self._queues.add(worker.grammar, self._waiting.pop(key), slow=True)

    def _end_overdue(self, now: float) -> None:
        busy = Problem("This worker is busy with other grammars", is_of_grammar=False)
        # Counts as the grammar's fault, so that a router does not try all workers. It is not remembered, because the
        # machine may have been too busy.
        too_long = Problem(f"takes longer than {WAIT_S:g} s to compile")
        latest = self._latest_overdue(now)
        overdue = [(key, busy) for key in self._queues.waiting_since(latest)]
        for key, waiting in self._waiting.items():
            worker = self._worker_of[key]
            if worker.is_compiling and waiting.since <= latest:
                overdue.append((key, too_long if worker.has_started else busy))
        for key, problem in overdue:
            self.close(key)
            self._failed.append((key, problem))

    def _latest_overdue(self, now: float) -> float:
        """Returns the latest arrival of requests that have waited too long at `now`."""
        loaded_at = self.processes.fork_server.loaded_at
        if loaded_at is None:
            return now - LOAD_S
        return now - WAIT_S if loaded_at <= now - WAIT_S else -math.inf

    def _drop(self, worker: GrammarWorker, problem: Problem) -> None:
        """Fails the requests of a grammar worker that has ended or refused. A grammar at fault is remembered. If it is not at
        fault, requests that still wait get another process, once."""
        self._workers.end(worker)
        for key in sorted(worker.keys):
            del self._worker_of[key]
            waiting = self._waiting.pop(key, None)
            if waiting is None or waiting.is_retried or problem.is_of_grammar:
                self._failed.append((key, problem))
            else:
                again = dataclasses.replace(waiting, is_retried=True)
                self._queues.add(worker.grammar, again, slow=worker.compile_cpu_s >= SLOW_CPU_S)
        if problem.is_of_grammar:
            self._refused[worker.grammar] = problem
        if len(self._refused) > MAX_REMEMBERED:
            self._refused.popitem(last=False)


def start(
    folder: Path,
    *,
    vocab_size: int,
    max_rows: int,
    options: GrammarOptions = GrammarOptions(),  # noqa: B008 (it is frozen)
    masks_fd: int | None = None,
) -> GrammarPool:
    """Forks the supervisor for the model in `folder`. Call it before this process has threads. `masks_fd`: file of the
    masks, which other ranks read; by default a new one."""
    if masks_fd is None:
        masks_fd = os.memfd_create("masks")
    settings = Settings(
        str(folder),
        vocab_size,
        max_rows,
        options,
        masks_fd=masks_fd,
        fork_server_fd=os.memfd_create("fork_server"),
    )
    return GrammarPool(GrammarProcesses(settings), settings.masks())

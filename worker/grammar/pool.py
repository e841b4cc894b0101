"""The scheduler's end: which grammars have a process, and which requests wait for theirs.

Nothing here waits but `fill`, and that at most as long as a host may take for one step.
"""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import socket
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from setproctitle import setproctitle

from mla_router.worker.child import die_with_parent
from mla_router.worker.grammar.client import HostClient, HostLost
from mla_router.worker.grammar.errors import Problem
from mla_router.worker.grammar.nursery import Nursery, keep
from mla_router.worker.grammar.options import GrammarOptions
from mla_router.worker.grammar.protocol import Row
from mla_router.worker.messages import Grammar

MAX_COMPILING = 2  # at the same time; the others stand in line
MAX_HOSTS = 128
IDLE_BYTES = 512 << 20  # of hosts that no request uses now; the least recently used go first
MAX_REMEMBERED = 1024  # grammars that were refused, with the reason


@dataclass(frozen=True, slots=True)
class Answers:
    """What is to be known of a step's rows beside their masks, by key."""

    failed: dict[int, Problem]  # for which there is no mask, and why
    runs: dict[int, list[int]]  # tokens that must follow each other now; the mask allows the first


class Grammars:
    """All grammars of one scheduler. A request is known here by an integer key."""

    def __init__(
        self, control: socket.socket, masks: np.ndarray, nursery: Nursery, keeper_pid: int
    ) -> None:
        self.masks = masks  # [R, ceil(vocab / 32)] int32; `fill` writes the leading rows
        self.nursery = nursery
        self._control = control
        self._keeper_pid = keeper_pid
        self._hosts: OrderedDict[Grammar, HostClient] = OrderedDict()  # least recently used first
        self._line: deque[tuple[int, Grammar, Sequence[int]]] = deque()
        self._host_of: dict[int, HostClient] = {}
        self._refused: OrderedDict[Grammar, Problem] = OrderedDict()
        self._failed: list[tuple[int, Problem | None]] = []
        self._keys = itertools.count()

    def warm_up(self) -> None:
        """Have the nursery load what it needs, which takes seconds, before the first grammar comes."""
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
        self._line.append((key, grammar, output))
        self._advance_line()
        return key

    @property
    def has_failures(self) -> bool:
        """`poll` has problems to tell."""
        return bool(self._failed)

    def poll(self) -> list[tuple[int, Problem | None]]:
        """Keys whose wait is over since the last call; with a problem those that it was for nothing for, and
        those that have lost their process since. None that is closed."""
        opened: list[tuple[int, Problem | None]] = []
        for host in [host for host in self._hosts.values() if host.has_news]:
            opened += self._poll(host)
        self._advance_line()
        opened += self._failed
        self._failed = []
        return opened

    def fill(self, rows: Sequence[tuple[int, list[int]]]) -> Answers:
        """Write to masks[i] what the i-th of `rows` (key, its tokens since the last call) may draw
        next. None of them may have come with a problem before: `poll` tells after each call which have."""
        failed: dict[int, Problem] = {}
        runs: dict[int, list[int]] = {}
        by_host: dict[HostClient, list[Row]] = {}
        for index, (key, tokens) in enumerate(rows):
            by_host.setdefault(self._host_of[key], []).append(Row(key, index, tokens))
        for host, wanted in by_host.items():
            self._hosts.move_to_end(host.grammar)
            host.ask_masks(wanted)
        for host, wanted in by_host.items():  # they work side by side
            answers = self._wait_masks(host, wanted)
            failed |= answers.failed
            runs |= answers.runs
        self._failed = [(key, problem) for key, problem in self._failed if key not in failed]
        return Answers(failed, runs)

    def close(self, key: int) -> None:
        """Forget a request, in whatever state it is."""
        host = self._host_of.pop(key, None)
        if host is not None:
            host.close_key(key)
            self._evict()
        else:
            self._line = deque(item for item in self._line if item[0] != key)
            self._failed = [item for item in self._failed if item[0] != key]

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a sentence of any grammar; known when one is compiled."""
        return next((host.eos_ids for host in self._hosts.values() if host.eos_ids), frozenset())

    def shut_down(self) -> None:
        """End all processes."""
        for host in self._hosts.values():
            host.end()
        self._control.close()
        os.kill(self._keeper_pid, signal.SIGKILL)  # it takes the nursery and the hosts with it
        os.waitpid(self._keeper_pid, 0)

    def _poll(self, host: HostClient) -> list[tuple[int, Problem | None]]:
        try:
            return host.poll()
        except HostLost as lost:
            self._drop(host, lost.problem)
            return []

    def _wait_masks(self, host: HostClient, wanted: list[Row]) -> Answers:
        try:
            filled = host.wait_masks()
        except HostLost as lost:
            self._drop(host, lost.problem)
            return Answers({row.key: lost.problem for row in wanted}, {})
        stray = Problem("a token that the grammar does not allow")
        return Answers(dict.fromkeys(filled.strays, stray), filled.runs)

    # -- hosts -----------------------------------------------------------------------------------

    def _advance_line(self) -> None:
        """Give those in line their host, in order, until one must wait for a process."""
        while self._line:
            key, grammar, output = self._line[0]
            host = self._hosts.get(grammar) or self._start(grammar)
            if host is None:
                return
            self._line.popleft()
            self._hosts.move_to_end(grammar)
            self._host_of[key] = host
            host.open_key(key, output)

    def _start(self, grammar: Grammar) -> HostClient | None:
        if sum(host.is_compiling for host in self._hosts.values()) >= MAX_COMPILING:
            return None
        if len(self._hosts) >= MAX_HOSTS and not self._evict_one():
            return None
        host = HostClient(grammar, self._control, self.nursery)
        self._hosts[grammar] = host
        return host

    def _drop(self, host: HostClient, problem: Problem) -> None:
        """A host has ended or refused: so do its requests. What was its grammar's fault will not be
        tried again."""
        del self._hosts[host.grammar]
        host.end()
        for key in host.keys:
            del self._host_of[key]
            self._failed.append((key, problem))
        if problem.is_of_grammar:
            self._refused[host.grammar] = problem
        if len(self._refused) > MAX_REMEMBERED:
            self._refused.popitem(last=False)

    def _evict(self) -> None:
        while sum(host.own_bytes for host in self._hosts.values() if not host.keys) > IDLE_BYTES:
            self._evict_one()

    def _evict_one(self) -> bool:
        """End the host that no request has used for longest; False if all are in use."""
        idle = next((host for host in self._hosts.values() if not host.keys), None)
        if idle is None:
            return False
        del self._hosts[idle.grammar]
        idle.end()
        return True


def start(
    folder: Path,
    *,
    vocab_size: int,
    max_rows: int,
    options: GrammarOptions = GrammarOptions(),  # noqa: B008 (it is frozen)
) -> Grammars:
    """Fork the nursery's keeper for the model in `folder`. To be called before this process has
    threads: what another thread holds locked while the process is copied stays locked in the copy."""
    shape = (max_rows, -(-vocab_size // 32))
    # Anonymous and shared: forks write to the same pages.
    memory = mmap.mmap(-1, shape[0] * shape[1] * 4)
    masks = np.frombuffer(memory, dtype=np.int32).reshape(shape)
    nursery = Nursery()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            die_with_parent(parent)
            setproctitle("mla_router grammar keeper")
            ours.close()
            keep(theirs, folder, vocab_size, options, masks, nursery)
            status = 0
        finally:
            os._exit(status)  # nothing of the scheduler's own clean-up
    theirs.close()
    return Grammars(ours, masks, nursery, pid)

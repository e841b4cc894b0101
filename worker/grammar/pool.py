"""The scheduler's end: which grammars have a process, and which requests wait for theirs.

Nothing here waits but `fill`, and that at most as long as a host may take for one step.
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

from mla_router.worker.grammar import keeper
from mla_router.worker.grammar.client import HostClient, HostLost
from mla_router.worker.grammar.errors import Problem
from mla_router.worker.grammar.keeper import Keeper, Settings
from mla_router.worker.grammar.nursery import Nursery
from mla_router.worker.grammar.options import GrammarOptions
from mla_router.worker.grammar.protocol import Row
from mla_router.worker.grammar.waiting import Lines, Waiting
from mla_router.worker.messages import Grammar

logger = logging.getLogger(__name__)

# How many compile at the same time, and for how long in CPU time.
MAX_QUICK, QUICK_CPU_S = 2, 0.5
MAX_SLOW, SLOW_CPU_S = 1, 5.0
# A request waits no longer for its grammar, in line and compiling: below the time (10 s) after which a
# router takes a request elsewhere, where it would begin again. It counts from the time at which the
# nursery had loaded, if the request came before.
WAIT_S = 8.0
# A request waits no longer for a nursery to load: the first one, or one that replaces a lost one.
LOAD_S = 60.0
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

    def __init__(self, settings: Settings, process: Keeper, control: socket.socket) -> None:
        self.masks = settings.masks()  # `fill` writes the leading rows
        self.nursery = Nursery(settings.nursery_fd)
        self._settings = settings
        self._control = control
        self._keeper = process
        self._hosts: OrderedDict[Grammar, HostClient] = OrderedDict()  # least recently used first
        self._lines = Lines()
        self._host_of: dict[int, HostClient] = {}
        self._since: dict[int, float] = {}  # by key, arrival of those that wait for a compilation
        self._refused: OrderedDict[Grammar, Problem] = OrderedDict()
        self._failed: list[tuple[int, Problem | None]] = []
        self._keys = itertools.count()

    def warm_up(self) -> None:
        """Have the nursery load what it needs, which takes seconds, before the first grammar comes."""
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
        host = self._hosts.get(grammar)
        if host is None:
            self._lines.add(grammar, waiting)
            self._advance_lines()
        else:
            self._join(host, waiting)
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
        self._end_overdue(time.monotonic())
        self._advance_lines()
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
        self._since.pop(key, None)
        host = self._host_of.pop(key, None)
        if host is None:
            if not self._lines.remove(key):
                self._failed = [item for item in self._failed if item[0] != key]
            return
        host.close_key(key)
        if host.is_compiling and not host.keys:  # nobody waits for it any more
            self._end(host)
        else:
            self._evict()

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a sentence of any grammar; known when one is compiled."""
        return next((host.eos_ids for host in self._hosts.values() if host.eos_ids), frozenset())

    def shut_down(self) -> None:
        """End all processes."""
        for host in self._hosts.values():
            host.end()
        self._control.close()
        self._keeper.kill()  # it takes the nursery and the hosts with it
        self._keeper.wait()
        for descriptor in (self._settings.masks_fd, self._settings.nursery_fd):
            os.close(descriptor)

    def _poll(self, host: HostClient) -> list[tuple[int, Problem | None]]:
        try:
            return host.poll()
        except HostLost as lost:
            if lost.out_of_time and host.compile_cpu_s < SLOW_CPU_S:
                self._try_slowly(host)
            else:
                self._drop(host, lost.problem)
            return []
        finally:
            if not host.is_compiling:
                for key in host.keys:
                    self._since.pop(key, None)

    def _wait_masks(self, host: HostClient, wanted: list[Row]) -> Answers:
        try:
            filled = host.wait_masks()
        except HostLost as lost:
            self._drop(host, lost.problem)
            return Answers({row.key: lost.problem for row in wanted}, {})
        stray = Problem("a token that the grammar does not allow")
        return Answers(dict.fromkeys(filled.strays, stray), filled.runs)

    # -- hosts -----------------------------------------------------------------------------------

    def _join(self, host: HostClient, waiting: Waiting) -> None:
        self._hosts.move_to_end(host.grammar)
        self._host_of[waiting.key] = host
        if host.is_compiling:
            self._since[waiting.key] = waiting.since
        host.open_key(waiting.key, waiting.output)

    def _advance_lines(self) -> None:
        """Start as many processes for those in line as may compile now."""
        for slow in (False, True):
            while (grammar := self._lines.next(slow=slow)) and (host := self._start(grammar, slow)):
                for waiting in self._lines.take(grammar):
                    self._join(host, waiting)

    def _start(self, grammar: Grammar, slow: bool) -> HostClient | None:
        most, cpu_s = (MAX_SLOW, SLOW_CPU_S) if slow else (MAX_QUICK, QUICK_CPU_S)
        compiling = [host for host in self._hosts.values() if host.is_compiling]
        if sum(host.compile_cpu_s == cpu_s for host in compiling) >= most:
            return None
        if len(self._hosts) >= MAX_HOSTS and not self._evict_one():
            return None
        self._replace_lost_keeper()
        host = HostClient(grammar, self._control, self.nursery, cpu_s)
        self._hosts[grammar] = host
        return host

    def _replace_lost_keeper(self) -> None:
        if self._keeper.poll() is None:
            return
        logger.error("the keeper of the grammars' processes was killed; another one is started")
        self._control.close()
        self.nursery.expect_next()
        self._keeper, self._control = keeper.replace(self._settings)

    def _try_slowly(self, host: HostClient) -> None:
        """Have the grammar of a compilation that took its short time compiled anew, with more."""
        self._end(host)
        for key, output in host.feeds:
            del self._host_of[key]
            waiting = Waiting(key, output, self._since.pop(key))
            self._lines.add(host.grammar, waiting, slow=True)

    def _end_overdue(self, now: float) -> None:
        busy = Problem("This worker is busy with other grammars", is_of_grammar=False)
        # The grammar's fault, or each worker would be asked to do the same. Not remembered: it may have been
        # the machine's.
        too_long = Problem(f"takes longer than {WAIT_S:g} s to compile")
        latest = self._latest_overdue(now)
        overdue = [(key, busy) for key in self._lines.waiting_since(latest)]
        for key, since in self._since.items():
            if since <= latest:
                overdue.append((key, too_long if self._host_of[key].has_started else busy))
        for key, problem in overdue:
            self.close(key)
            self._failed.append((key, problem))

    def _latest_overdue(self, now: float) -> float:
        """The time until which a request has come that has waited too long by now."""
        loaded_at = self.nursery.loaded_at
        if loaded_at is None:
            return now - LOAD_S
        return now - WAIT_S if loaded_at <= now - WAIT_S else -math.inf

    def _end(self, host: HostClient) -> None:
        del self._hosts[host.grammar]
        host.end()

    def _drop(self, host: HostClient, problem: Problem) -> None:
        """A host has ended or refused: so do its requests. What was its grammar's fault will not be
        tried again."""
        self._end(host)
        for key in host.keys:
            del self._host_of[key]
            self._since.pop(key, None)
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
        self._end(idle)
        return True


def start(
    folder: Path,
    *,
    vocab_size: int,
    max_rows: int,
    options: GrammarOptions = GrammarOptions(),  # noqa: B008 (it is frozen)
) -> Grammars:
    """Fork the keeper of the processes for the model in `folder`. To be called before this process has
    threads."""
    settings = Settings(
        str(folder),
        vocab_size,
        max_rows,
        options,
        masks_fd=os.memfd_create("masks"),
        nursery_fd=os.memfd_create("nursery"),
    )
    rows, words = settings.mask_shape
    os.ftruncate(settings.masks_fd, rows * words * 4)
    os.ftruncate(settings.nursery_fd, Nursery.BYTES)
    return Grammars(settings, *keeper.start(settings))

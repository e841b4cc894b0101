"""The process that all grammars' processes are forked from.

It has loaded what they share, the vocabulary and xgrammar, and never looks at a grammar itself. It
comes from the scheduler before that has threads or a device, and so has torch, which xgrammar needs,
for nothing. The scheduler cannot fork another one later: a *keeper* stands between them, which has
loaded nothing and does nothing but to fork the nursery, and again if it has died.
"""

from __future__ import annotations

import gc
import itertools
import logging
import mmap
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from setproctitle import setproctitle

from mla_router.worker.child import die_with_parent
from mla_router.worker.grammar.options import GrammarOptions
from mla_router.worker.grammar.protocol import Refused
from mla_router.worker.grammar.vocabulary import VocabularyError, read_vocabulary

logger = logging.getLogger(__name__)


class Nursery:
    """Which nursery there is, as all these processes see it."""

    def __init__(self) -> None:
        # Anonymous and shared: [how many there have been, the pid of the last].
        self._shared = np.frombuffer(mmap.mmap(-1, 16), dtype=np.int64)

    @property
    def generation(self) -> int:
        """Of the one that takes orders, or of the first if that is still to come."""
        return max(1, int(self._shared[0]))

    @property
    def pid(self) -> int:
        return int(self._shared[1])

    def begin(self) -> None:
        """This process is the next."""
        self._shared[1] = os.getpid()
        self._shared[0] += 1

    def has_lost(self, generation: int) -> bool:
        """Whether the nursery of that generation has died, and all its hosts with it."""
        if generation != self.generation:
            return True
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        return stat.rpartition(")")[2].split()[0] in "ZX"


def keep(
    control: socket.socket,
    folder: Path,
    vocab_size: int,
    options: GrammarOptions,
    masks: np.ndarray,
    nursery: Nursery,
) -> None:
    """Have a nursery until the scheduler closes `control`. Returns then; and in all the processes
    that come of this one, at their end."""
    own = os.getpid()
    while True:
        pid = os.fork()
        if pid == 0:
            die_with_parent(own)
            setproctitle("mla_router grammar nursery")
            nursery.begin()
            run(control, folder, vocab_size, options, masks)
            return
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 0:
            return
        # The next grammar finds the next one: it loads when that comes, so that one that cannot
        # load does not try for ever.
        logger.error("the grammar nursery has ended with status %d; another one begins", status)


def run(
    control: socket.socket,
    folder: Path,
    vocab_size: int,
    options: GrammarOptions,
    masks: np.ndarray,
) -> None:
    """Fork a host for every pair of descriptors that comes over `control`: its end of a socket, and
    a file with the grammar. Returns when the scheduler closes it, and in the hosts at their end.

    Loads what hosts need when the first message comes, which may be without descriptors.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # hosts leave no zombies
    orders = _receive(control)
    first = next(orders, None)
    if first is None:
        return
    try:
        # Here and not above: this takes seconds, and the scheduler that imports this module is not
        # to wait for it.
        from mla_router.worker.grammar import host
        from mla_router.worker.grammar.jump_forward import ForcedTokens
        from mla_router.worker.grammar.xgrammar_backend import Compiler

        vocabulary = read_vocabulary(folder, vocab_size)
        compiler = Compiler(vocabulary, any_whitespace=options.any_whitespace)
        forced = ForcedTokens(vocabulary) if options.jump_forward else None
    except VocabularyError as error:
        logger.warning("no grammars: %s", error)
        for order in itertools.chain([first], orders):
            _refuse(order)
        return
    gc.collect()
    gc.freeze()  # or the hosts' collections would copy every page that they share
    own = os.getpid()
    for order in itertools.chain([first], orders):
        if order and os.fork() == 0:
            die_with_parent(own)
            setproctitle("mla_router grammar")
            control.close()
            host.run(socket.socket(fileno=order[0]), order[1], compiler, forced, masks)
            return
        for fd in order:
            os.close(fd)


def _receive(control: socket.socket) -> Iterator[list[int]]:
    """The descriptors of each message, until the other end closes."""
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            return
        yield fds


def _refuse(order: list[int]) -> None:
    if order:
        refused = msgspec.msgpack.encode(Refused("this model's tokenizer is not supported"))
        with socket.socket(fileno=order[0]) as connection:
            connection.send(refused)
        os.close(order[1])

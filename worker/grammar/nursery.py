"""The process that all grammars' processes are forked from.

It has loaded what they share, the vocabulary and xgrammar, and never looks at a grammar itself. It is
forked from the scheduler before that has threads or a device, and so has torch, which xgrammar
needs, for nothing.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from setproctitle import setproctitle

from mla_router.worker.child import die_with_parent
from mla_router.worker.grammar.protocol import Refused
from mla_router.worker.grammar.vocabulary import VocabularyError, read_vocabulary

logger = logging.getLogger(__name__)


def run(control: socket.socket, folder: Path, vocab_size: int, masks: np.ndarray) -> None:
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
        from mla_router.worker.grammar.xgrammar_backend import Compiler

        compiler = Compiler(read_vocabulary(folder, vocab_size))
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
            host.run(socket.socket(fileno=order[0]), order[1], compiler, masks)
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

"""The scheduler's side of the supervisor and of the fork server: it orders grammar workers, and replaces what is lost."""

from __future__ import annotations

import contextlib
import logging
import os

from mla_router.worker.grammar import supervisor
from mla_router.worker.grammar.client import GrammarWorker
from mla_router.worker.grammar.fork_server import DEAD, STOPPED, ForkServer, state_of
from mla_router.worker.grammar.supervisor import Settings
from mla_router.worker.messages import Grammar

logger = logging.getLogger(__name__)


class GrammarProcesses:
    """The supervisor, and the fork server that it keeps."""

    def __init__(self, settings: Settings) -> None:
        """Forks the supervisor. Call it before this process has threads."""
        os.ftruncate(settings.fork_server_fd, ForkServer.BYTES)
        self.fork_server = ForkServer(settings.fork_server_fd)
        self._settings = settings
        self._supervisor, self._control = supervisor.start(settings)

    def warm_up(self) -> None:
        """Makes the fork server load before the first grammar arrives, which takes seconds."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.send(b"+")

    def start_worker(self, grammar: Grammar, compile_cpu_s: float) -> GrammarWorker:
        self._replace_lost_supervisor()
        return GrammarWorker(grammar, self._control, self.fork_server, compile_cpu_s)

    def end_stopped(self) -> None:
        """Ends a fork server that is stopped by a signal: the next one reads its orders. Ends a stopped supervisor whose
        fork server is dead: the orders are lost with it, and the next grammar starts both."""
        state = self.fork_server.state
        if state == STOPPED:
            logger.error("the grammar fork server is stopped by a signal, and is replaced")
            self.fork_server.expect_next()
            self.fork_server.kill()
        elif state in DEAD and state_of(self._supervisor.pid) == STOPPED:
            logger.error("the grammar supervisor is stopped by a signal, and is killed")
            self._supervisor.kill()
            self._supervisor.wait()

    def shut_down(self) -> None:
        self._control.close()
        self._supervisor.kill()  # the fork server and the grammar workers end with it
        self._supervisor.wait()
        for descriptor in (self._settings.masks_fd, self._settings.fork_server_fd):
            os.close(descriptor)

    def _replace_lost_supervisor(self) -> None:
        if self._supervisor.poll() is None:
            return
        logger.error("the grammar supervisor was killed; starting another one")
        self.fork_server.expect_next()
        try:
            process, control = supervisor.replace(self._settings)
        except OSError as error:  # too many processes, or too little memory
            # The next order finds the old socket without a reader, and fails alone. The one after it tries again.
            logger.error("the grammar supervisor cannot be started: %s", error)
            return
        self._control.close()
        self._supervisor, self._control = process, control

"""A scheduler that runs one turn of its loop when a test asks for it."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from mla_router.worker.config import WorkerConfig
from mla_router.worker.messages import Delta, Deltas, Shutdown, ToScheduler, ToServer
from mla_router.worker.scheduler.scheduler import Scheduler
from support.fake_engine import VOCAB, FakeEngine
from support.forcing_grammars import ForcingGrammars

TURN_S = 60.0  # a turn takes microseconds; after a longer time the loop has stopped


class SteppedScheduler:
    """Runs a loop in a thread that waits in `receive`. It is also the channel of that scheduler."""

    def __init__(self, engine: FakeEngine, config: WorkerConfig, *, overlap: bool) -> None:
        self.num_servers = 1
        self.deltas: dict[str, list[Delta]] = defaultdict(list)
        self._asks: queue.Queue[BaseException | None] = queue.Queue()
        self._answers: queue.Queue[Sequence[ToScheduler]] = queue.Queue()
        self.grammars = ForcingGrammars()
        grammars: Any = self.grammars
        self.scheduler = Scheduler(engine, self, config, vocab_size=VOCAB, grammars=grammars)
        loop = self.scheduler.overlap_loop if overlap else self.scheduler.normal_loop
        self._thread = threading.Thread(target=self._run, args=(loop,), daemon=True)
        self._thread.start()
        self._wait()

    def turn(self, *messages: ToScheduler) -> None:
        """Delivers messages, and returns when the scheduler asks for the next ones. Raises the error that
        ended the loop."""
        assert self._thread.is_alive(), "the loop has ended"
        self._answers.put(messages)
        self._wait()

    def stop(self) -> None:
        self._answers.put((Shutdown(),))
        self._thread.join(TURN_S)
        assert not self._thread.is_alive()

    def reason(self, rid: str) -> str:
        return "".join(delta.finish_reason for delta in self.deltas[rid])

    def tokens(self, rid: str) -> list[int]:
        return [token for delta in self.deltas[rid] for token in delta.token_ids]

    # -- called by the scheduler -----------------------------------------------------------------

    def receive(self, timeout_s: float) -> list[ToScheduler]:  # noqa: ARG002 (turns have no time)
        self._asks.put(None)
        return list(self._answers.get())

    def send(self, message: ToServer, server: int | None = None) -> None:  # noqa: ARG002 (one)
        for delta in message.items if isinstance(message, Deltas) else ():
            self.deltas[delta.rid].append(delta)

    def _run(self, loop: object) -> None:
        assert callable(loop)
        try:
            loop()
        except BaseException as error:  # noqa: BLE001 (raised again where the test is)
            self._asks.put(error)

    def _wait(self) -> None:
        error = self._asks.get(timeout=TURN_S)
        if error is not None:
            raise error

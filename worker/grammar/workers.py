"""The running grammar workers, within limits of their number, their memory and their compilations."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from mla_router.worker.grammar.client import GrammarWorker
from mla_router.worker.grammar.processes import GrammarProcesses
from mla_router.worker.messages import Grammar

# The number of parallel compilations of each queue, and the limit of their CPU time in seconds.
MAX_QUICK, QUICK_CPU_S = 2, 0.5
MAX_SLOW, SLOW_CPU_S = 1, 5.0
MAX_WORKERS = 128
IDLE_BYTES = 512 << 20  # of grammar workers without requests; the least recently used end first


class GrammarWorkers:
    """At most one for each grammar. Iteration begins with the least recently used."""

    def __init__(self, processes: GrammarProcesses) -> None:
        self._processes = processes
        self._by_grammar: OrderedDict[Grammar, GrammarWorker] = OrderedDict()

    def __iter__(self) -> Iterator[GrammarWorker]:
        return iter(self._by_grammar.values())

    def get(self, grammar: Grammar) -> GrammarWorker | None:
        return self._by_grammar.get(grammar)

    def use(self, worker: GrammarWorker) -> None:
        """Makes a worker the most recently used."""
        self._by_grammar.move_to_end(worker.grammar)

    def start(self, grammar: Grammar, *, slow: bool) -> GrammarWorker | None:
        """Starts a worker, which compiles `grammar`. Returns None if the limits do not allow it now."""
        limit, cpu_s = (MAX_SLOW, SLOW_CPU_S) if slow else (MAX_QUICK, QUICK_CPU_S)
        if sum(worker.is_compiling and worker.compile_cpu_s == cpu_s for worker in self) >= limit:
            return None
        if len(self._by_grammar) >= MAX_WORKERS and not self._evict_one():
            return None
        worker = self._by_grammar[grammar] = self._processes.start_worker(grammar, cpu_s)
        return worker

    def end(self, worker: GrammarWorker) -> None:
        del self._by_grammar[worker.grammar]
        worker.end()

    def evict(self) -> None:
        """Ends workers without requests while they have more than IDLE_BYTES."""
        while sum(worker.own_bytes for worker in self if not worker.keys) > IDLE_BYTES:
            self._evict_one()

    def _evict_one(self) -> bool:
        """Ends the least recently used worker without requests. Returns False if there is none."""
        idle = next((worker for worker in self if not worker.keys), None)
        if idle is None:
            return False
        self.end(idle)
        return True

"""Clients' names of requests, whichever server process of the worker runs them.

Each process knows its own. The others are asked when a client chooses a name, and when it aborts by one.
"""

from __future__ import annotations

from mla_router.worker.messages import AbortAll, AbortName, HasName, PeerQuery, Ping
from mla_router.worker.server.peers import Peers
from mla_router.worker.server.request_names import Names, RequestNames, name_is_taken
from mla_router.worker.server.scheduler_client import SchedulerClient


class NamedRequests:
    def __init__(self, scheduler: SchedulerClient, peers: Peers) -> None:
        self._scheduler = scheduler
        self._peers = peers
        self._here = RequestNames()

    async def add(self, names: Names, *, replace: bool = False) -> None:
        """As `RequestNames.add`; in all processes together, a name is used once."""
        self._here.add(names, replace=replace)
        if replace or len(names.own) == 1:
            return  # a lone name is an id of ours, which nobody else has
        # Taken here before the others are asked: of two that come at the same time, at most one stays.
        try:
            if any(await self._peers.ask_all(HasName(list(names.own)))):
                raise name_is_taken()
        except BaseException:
            self._here.remove(names)
            raise

    def remove(self, names: Names) -> None:
        self._here.remove(names)

    async def abort(self, name: str) -> int:
        """End the request called `name`; returns how many answers to it were running."""
        return self._abort_here(name) + sum(await self._peers.ask_all(AbortName(name)))

    async def abort_all(self) -> int:
        """End every request; returns how many answers were running."""
        return self._scheduler.abort_all() + sum(await self._peers.ask_all(AbortAll()))

    async def answer(self, question: PeerQuery) -> int:
        """What other processes ask about requests."""
        match question:
            case HasName(names):
                return int(any(name in self._here for name in names))
            case AbortName(name):
                return self._abort_here(name)
            case AbortAll():
                return self._scheduler.abort_all()
            case _:
                assert isinstance(question, Ping), f"{question} is for another process"
                return 0

    def _abort_here(self, name: str) -> int:
        # One by one and by exact name: nothing that a client sends can match another's request.
        return sum(self._scheduler.abort(rid, tell_reader=True) for rid in self._here.find(name))

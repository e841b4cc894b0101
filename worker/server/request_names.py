"""The names under which clients may abort what runs.

Inside, a request goes by an id of ours that nobody can choose: a name from a client must never
reach another client's request. Here its own name is looked up, whole and exactly.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mla_router.worker.messages import AbortAll, AbortName, HasName, Ping, Question
from mla_router.worker.server.errors import InvalidField, InvalidRequest
from mla_router.worker.server.ipc.peers import Peers
from mla_router.worker.server.ipc.scheduler_client import SchedulerClient

PREFIXES = ("chatcmpl-", "cmpl-", "resp_")  # how the OpenAI endpoints show our ids


MAX_LENGTH = 256
SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # harmless in logs and headers


def name_is_taken() -> InvalidRequest:
    return InvalidField("rid", "a request of this name is running")


def check_rid(rid: str | list[str] | None, choices: int) -> str | list[str] | None:
    """A name for all that is asked for, or one for each. Raises InvalidField."""
    if rid is None:
        return None
    names = [rid] if isinstance(rid, str) else rid
    if isinstance(rid, list) and (len(rid) != choices or len(set(rid)) != choices):
        raise InvalidField("rid", f"one name, or {choices} different ones")
    if not all(1 <= len(name) <= MAX_LENGTH for name in names):
        raise InvalidField("rid", f"1 to {MAX_LENGTH} characters")
    return rid


def trace_of(headers: Mapping[str, str], request_id: str | None = None) -> str | None:
    """What the client calls this request in its logs: vLLM's body field, or the header. Raises InvalidField."""
    if request_id is not None and not SANE_ID.fullmatch(request_id):
        raise InvalidField("request_id", "1 to 128 letters, digits and characters of `._:-`")
    given = headers.get("X-Request-Id", "")
    return request_id or (given if SANE_ID.fullmatch(given) else None)


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one HTTP request. Each says what it is a name of: some of the scheduler's ids."""

    own: Mapping[str, list[str]]  # of no other request
    trace: str | None = None  # the client's X-Request-Id: others may have the same
    rids: Sequence[str] = field(default_factory=list)  # that `trace` names: all of them


class RequestNames:
    def __init__(self) -> None:
        self._rids: dict[str, list[str]] = {}
        self._traces: defaultdict[str, list[Names]] = defaultdict(list)

    def add(self, names: Names, *, replace: bool = False) -> None:
        for name in names.own:
            if name in self._rids and not replace:
                raise name_is_taken()
        self._rids.update(names.own)
        if names.trace is not None:
            self._traces[names.trace].append(names)

    def remove(self, names: Names) -> None:
        for name, rids in names.own.items():
            if self._rids.get(name) is rids:  # else another one has replaced it
                del self._rids[name]
        if names.trace is not None:
            same = self._traces[names.trace]
            same[:] = [other for other in same if other is not names]
            if not same:
                del self._traces[names.trace]

    def __contains__(self, name: str) -> bool:
        return name in self._rids

    def find(self, name: str) -> list[str]:
        """The scheduler's ids of the requests called `name`; none if they have ended."""
        plain = [name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)]
        for spelled in (name, *plain):
            if spelled in self._rids:
                return self._rids[spelled]
            if spelled in self._traces:
                return [rid for names in self._traces[spelled] for rid in names.rids]
        return []


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

    async def answer(self, question: Question) -> int:
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

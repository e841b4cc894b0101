"""The names by which clients may abort their requests.

Inside the worker a request has a random id, so that a client's name never reaches another client's request. This module
maps names to these ids. A name must match exactly.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mla_router.worker.messages import AbortAll, AbortName, HasName, PeerQuery, Ping
from mla_router.worker.server.errors import InvalidField, InvalidRequest
from mla_router.worker.server.ipc.peers import Peers
from mla_router.worker.server.ipc.scheduler_client import SchedulerClient

# Of the ids in answers of the OpenAI and Anthropic endpoints
PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
MAX_LENGTH = 256
SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # safe in logs and headers


def name_is_taken() -> InvalidRequest:
    return InvalidField("rid", "Duplicate request ID: a request of this name is running")


def check_rid(rid: str | list[str] | None, choices: int) -> str | list[str] | None:
    """Returns the checked `rid`: one name for the request, or one for each choice. Raises InvalidField."""
    if rid is None:
        return None
    names = [rid] if isinstance(rid, str) else rid
    if isinstance(rid, list):
        if len(rid) != choices:
            raise InvalidField("rid", f"one name, or {choices}: one for each choice")
        if len(set(rid)) != choices:
            raise InvalidField("rid", "Duplicate request ID: the names must differ")
    if not all(1 <= len(name) <= MAX_LENGTH for name in names):
        raise InvalidField("rid", f"1 to {MAX_LENGTH} characters")
    return rid


def trace_of(headers: Mapping[str, str], request_id: str | None = None) -> str | None:
    """Returns the client's own id of the request: vLLM's body field or X-Request-Id. Raises InvalidField."""
    if request_id is not None and not SANE_ID.fullmatch(request_id):
        raise InvalidField("request_id", "1 to 128 letters, digits and characters of `._:-`")
    given = headers.get("X-Request-Id", "")
    return request_id or (given if SANE_ID.fullmatch(given) else None)


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one HTTP request, with the ids that the scheduler uses."""

    own: Mapping[str, list[str]]  # unique names; each names some of the ids
    trace: str | None = None  # the client's X-Request-Id; other requests may have the same
    rids: Sequence[str] = field(default_factory=list)  # all ids, which `trace` names


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
            if self._rids.get(name) is rids:  # else a continued stream has replaced it
                del self._rids[name]
        if names.trace is not None:
            same = self._traces[names.trace]
            same[:] = [other for other in same if other is not names]
            if not same:
                del self._traces[names.trace]

    def __contains__(self, name: str) -> bool:
        return name in self._rids

    def find(self, name: str) -> list[str]:
        """Returns the scheduler's ids of the requests named `name`; an empty list if they have ended."""
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
        """Adds names that are unique over all API processes. `replace`: the names may exist. Raises InvalidField."""
        # Before the other processes are asked, so that of two simultaneous requests at most one succeeds
        self._here.add(names, replace=replace)
        if replace or len(names.own) == 1:
            return  # a single name is a random id of this process
        try:
            if any(await self._peers.ask_all(HasName(list(names.own)))):
                raise name_is_taken()
        except BaseException:
            self._here.remove(names)
            raise

    def remove(self, names: Names) -> None:
        self._here.remove(names)

    async def abort(self, name: str) -> int:
        """Aborts the requests named `name`. Returns the number of running choices."""
        return self._abort_here(name) + sum(await self._peers.ask_all(AbortName(name)))

    async def abort_all(self) -> int:
        """Aborts all requests of the worker. Returns the number of running choices."""
        return self._scheduler.abort_all() + sum(await self._peers.ask_all(AbortAll()))

    async def answer(self, question: PeerQuery) -> int:
        """Answers a question of another process."""
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
        # By exact name only: a client cannot match another client's request.
        return sum(self._scheduler.abort(rid, notify=True) for rid in self._here.find(name))

"""The names under which clients may abort what runs.

Inside, a request goes by an id of ours that nobody can choose: a name from a client must never
reach another client's request. Here its own name is looked up, whole and exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

from mla_router.worker.server.errors import InvalidField, InvalidRequest

PREFIXES = ("chatcmpl-", "cmpl-", "resp_")  # how the OpenAI endpoints show our ids


def name_is_taken() -> InvalidRequest:
    return InvalidField("rid", "a request of this name is running")


class RequestNames:
    def __init__(self) -> None:
        self._rids: dict[str, list[str]] = {}

    def add(self, names: Mapping[str, list[str]], *, replace: bool = False) -> None:
        """`names` says of each what it is a name of: some of the scheduler's ids."""
        for name in names:
            if name in self._rids and not replace:
                raise name_is_taken()
        self._rids.update(names)

    def remove(self, names: Mapping[str, list[str]]) -> None:
        for name, rids in names.items():
            if self._rids.get(name) is rids:  # else another one has replaced it
                del self._rids[name]

    def __contains__(self, name: str) -> bool:
        return name in self._rids

    def find(self, name: str) -> list[str]:
        """The scheduler's ids of the request called `name`; none if it has ended."""
        for prefix in PREFIXES:
            if name not in self._rids:
                name = name.removeprefix(prefix)
        return self._rids.get(name, [])
